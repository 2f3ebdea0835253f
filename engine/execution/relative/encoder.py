"""What replaces a transformers encoder whose attention has no interface."""

from typing import Any

import torch
from torch import nn

from maxsimd.engine.execution.attention.interface import StepAttention
from maxsimd.engine.execution.layout import Layout

# Tables of positions reach at least this far, and twice as far whenever that is not enough.
_LEAST_REACH = 64


class PackedEncoder(nn.Module):
    """Runs the layers of `inner`, which it replaces, over packed rows [1, rows, hidden] with the attention of
    the step that its backbone was last called with."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self._step: StepAttention[Any] | None = None

    @property
    def layer(self) -> Any:
        """The layers, which others may replace."""
        return self.inner.layer

    def take_attention(
        self, backbone: nn.Module, arguments: Any, options: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """A hook for the backbone's calls."""
        self._step = options.get("step_attention")
        return arguments, options

    @property
    def step(self) -> StepAttention[Any]:
        if self._step is None:
            raise RuntimeError("packed attention was called outside of a packed step")
        return self._step


def reach_of(layout: Layout) -> int:
    """How far tables of positions must reach for the whole sequences of a step, rounded up so that they are
    seldom made anew."""
    reach = _LEAST_REACH
    while reach + 1 < layout.longest:
        reach *= 2
    return reach


def distances(reach: int, device: torch.device) -> torch.Tensor:
    """The positions of keys relative to a query, int64 [2 * reach + 1]."""
    return torch.arange(-reach, reach + 1, device=device)


def in_heads(projected: torch.Tensor, heads: int) -> torch.Tensor:
    """A projection [1, rows, heads * head_dim] as [heads, rows, head_dim]."""
    separate: torch.Tensor = projected[0].unflatten(-1, (heads, -1))  # [rows, heads, head_dim]
    return separate.transpose(0, 1)
