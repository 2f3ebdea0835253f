"""The head of late interaction as one kernel: it gathers kept tokens, projects and normalises them."""

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers.base.modules import Dense, Normalize

from maxsimd.engine.checkpoint.heads import FirstColumns, ModuleHead
from maxsimd.engine.ops.triton.projection import is_supported, project
from maxsimd.pooling.methods import GatheringHead, Head
from maxsimd.pooling.transfer import to_device

# Below which torch's normalize divides by this instead of by the length.
_EPSILON = 1e-12


class FusedProjection(GatheringHead):
    """A linear layer and an L2 normalisation, with products in the precision of the hidden states, sums in
    float32, and results in `dtype`; other than by rows as they lie it is the head that it stands for."""

    def __init__(
        self,
        plain: Head,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        normalized: bool,
        dtype: torch.dtype,
    ) -> None:
        self._plain = plain
        self._weight = weight
        self._bias = bias
        self._normalized = normalized
        self._dtype = dtype

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._plain(rows)

    def gather(self, hidden: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
        """What the head makes of `hidden[rows]`: [len(rows), dim]."""
        index = to_device(rows, hidden.device)
        return project(hidden, index, self._weight, self._bias, self._normalized, _EPSILON, self._dtype)

    def __str__(self) -> str:
        return str(self._plain)


def fused(head: Head, products: torch.dtype, results: torch.dtype) -> Head:
    """The same head as one kernel that multiplies in `products` and writes `results`; or the head itself,
    where it is more than one projection and one normalisation."""
    inner, columns, normalized = head, None, False
    if isinstance(head, FirstColumns):
        inner, columns, normalized = head.inner, head.dimensions, head.normalised
    if not isinstance(inner, ModuleHead) or not inner.modules or not isinstance(inner.modules[0], Dense):
        return head
    dense, after = inner.modules[0], inner.modules[1:]
    if dense.use_residual or not isinstance(dense.activation_function, torch.nn.Identity):
        return head
    if type(dense.linear) is not torch.nn.Linear:  # laid out for the CPU's kernels
        return head
    if len(after) > 1 or not all(isinstance(module, Normalize) for module in after):
        return head
    if columns is not None and after and not normalized:
        return head  # the first columns of a normalised row, which are not normalised themselves
    # With a bias or without, the first columns hang on nothing but the first rows of the weight.
    weight = dense.linear.weight.detach()[:columns]
    bias = None if dense.linear.bias is None else dense.linear.bias.detach()[:columns].float().contiguous()
    if not is_supported(len(weight)):
        return head
    return FusedProjection(head, weight.to(products).contiguous(), bias, bool(after) or normalized, results)
