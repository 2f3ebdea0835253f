"""Attention with linear biases, in both directions: a product of query and key loses with their distance, by
which positions are told apart.

Source: Press, Smith & Lewis 2022 (arXiv 2108.12409); the slopes for other numbers of heads than powers of two
are those of its authors' code.
"""

import math
from typing import Any

import torch

from maxsimd.engine.ops.qkv import PositionBias

# Tables of distances reach at least this far, and twice as far whenever that is not enough.
_LEAST_REACH = 64


def slopes_of(heads: int) -> list[float]:
    """What each head loses by one position, largest first for a power of two: 2^(-8 i / heads) for the i-th.

    Another number of heads has the slopes of the power of two below it, and then every other slope of twice
    that power."""
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return slopes if power == heads else slopes + slopes_of(2 * power)[::2][: heads - power]


class AlibiBias:
    """What distances add to products in each of a model's `heads`: a table for all of its layers and many
    steps, in float32 whatever the precision of the model."""

    def __init__(self, heads: int) -> None:
        self._slopes = slopes_of(heads)
        self._tables: dict[tuple[int, torch.device], PositionBias] = {}

    def reaching(self, tokens: int, device: torch.device) -> PositionBias:
        """The table for sequences of at most `tokens` tokens."""
        reach = _LEAST_REACH
        while reach + 1 < tokens:
            reach *= 2
        if (reach, device) not in self._tables:
            apart = torch.arange(-reach, reach + 1, device=device).abs().float()
            # One head at a time: a device takes numbers along, and would wait for a tensor of the host.
            by_distance = torch.stack([apart * -slope for slope in self._slopes])
            self._tables[reach, device] = PositionBias(by_distance)
        return self._tables[reach, device]


def eager_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    position_bias: PositionBias,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention of [batch, heads, tokens, head_dim] each, with a mask [batch, 1, tokens, tokens] that
    is added. Returns [batch, tokens, heads, head_dim] and the weights."""
    weights = torch.matmul(query, key.transpose(2, 3)).float() * scaling
    weights = weights + position_bias.terms(query, key, scaling)
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = torch.softmax(weights, dim=-1).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
