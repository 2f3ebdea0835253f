"""The late-interaction head as one kernel that gathers, projects and normalizes the pooled rows. It is
compared with the plain head when it is built.
"""

import logging

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.checkpoint.heads import Dense, FirstColumns, ModuleHead, Normalize
from maxsimd.engine.execution.self_check.samples import largest
from maxsimd.engine.ops.triton.projection import Projection, is_supported, project
from maxsimd.pooling.methods import GatheringHead, Head
from maxsimd.pooling.ragged import to_device

log = logging.getLogger(__name__)

# torch's normalize divides by at least this length.
_EPSILON = 1e-12
# The largest difference from the plain head, as a share of the largest number, by the precision of products:
# several times what rounding explains.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# More rows than a block of the kernel, and no multiple of it.
_ROWS = 150


class FusedProjection(GatheringHead):
    """A linear layer and an L2 normalization, with products in the precision of the hidden states, sums in
    float32, and results in `dtype`. Called with rows instead of indices, it is the `plain` head."""

    def __init__(self, plain: Head, projection: Projection, dtype: torch.dtype) -> None:
        self._plain = plain
        self._projection = projection
        self._dtype = dtype

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._plain(rows)

    def gather(self, hidden: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
        return project(hidden, to_device(rows, hidden.device), self._projection, self._dtype)

    def __str__(self) -> str:
        return str(self._plain)


def fused(head: Head, products: torch.dtype, results: torch.dtype) -> Head:
    """The head as one kernel that multiplies in `products` and writes `results`. Returns the head itself if
    it is more than a projection and a normalization, or, with a warning, if the kernel fails or differs."""
    projection = _projection_of(head, products)
    if projection is None or not is_supported(len(projection.weight)):
        return head
    ours = FusedProjection(head, projection, results)
    mismatch = find_mismatch(ours, head, projection.weight)
    if mismatch is None:
        return ours
    log.warning("the fused projection is not used: %s", mismatch)
    return head


@torch.inference_mode()
def find_mismatch(ours: GatheringHead, plain: Head, weight: torch.Tensor) -> str | None:
    """None if a fused head agrees with the plain head on random rows, else a description of the mismatch."""
    random = np.random.default_rng(0)
    states = torch.from_numpy(random.standard_normal((_ROWS, weight.shape[1])))
    hidden, rows = states.to(weight.device, weight.dtype), random.integers(0, _ROWS, _ROWS)
    try:
        found = ours.gather(hidden, rows).float()
        expected = plain(hidden[to_device(rows, hidden.device)].float())
        worst = largest([found - expected]) / (largest([expected]) or 1.0)
    except Exception as error:
        return f"it failed: {error}"
    if worst <= _TOLERANCE[weight.dtype]:
        return None
    return f"it differs from the plain head by {worst:.2g} of the largest number"


def _projection_of(head: Head, products: torch.dtype) -> Projection | None:
    """The projection of a head, with weights for `products`; None if the head does anything else."""
    inner, columns, normalized = head, None, False
    if isinstance(head, FirstColumns):
        inner, columns, normalized = head.inner, head.dimensions, head.normalized
    if not isinstance(inner, ModuleHead) or not inner.modules or not isinstance(inner.modules[0], Dense):
        return None
    dense, after = inner.modules[0], inner.modules[1:]
    if dense.use_residual or not isinstance(dense.activation_function, torch.nn.Identity):
        return None
    if type(dense.linear) is not torch.nn.Linear:  # laid out for the CPU's kernels
        return None
    if len(after) > 1 or not all(isinstance(module, Normalize) for module in after):
        return None
    if columns is not None and after and not normalized:
        return None  # the first columns of a normalized row, which are not normalized themselves
    # The first columns depend on the first rows of the weight alone, with or without a bias.
    weight = dense.linear.weight.detach()[:columns]
    bias = None if dense.linear.bias is None else dense.linear.bias.detach()[:columns].float().contiguous()
    return Projection(weight.to(products).contiguous(), bias, _EPSILON if after or normalized else None)
