"""The ways in which int8 products are computed, beside the plain one."""

import torch

from maxsimd.engine.execution.int8.rounding import ZERO, RoundedWeights, TorchProduct
from maxsimd.engine.ops.cpu import int8_linear
from maxsimd.engine.ops.cpu.linear import Norm

# Rows of one call: what is made of them stays in the cache, and oneDNN generates code for few sizes.
_ROWS = 256


class OneDnnProduct(TorchProduct):
    """By oneDNN through torch, which has code for VNNI, AMX, AVX-VNNI and ARM's dot products. Raises where
    this build of torch lacks it."""

    def __init__(self, weights: RoundedWeights) -> None:
        super().__init__(weights)
        columns, inputs = weights.weight.shape
        self._columns = columns
        self._scales = weights.scales
        self._zeros = torch.zeros(columns, dtype=torch.int32)
        self._packed = torch.ops.onednn.qlinear_prepack(weights.weight, [_ROWS, inputs])

    def linear(self, rows: torch.Tensor, gelu: bool) -> torch.Tensor:
        if len(rows) <= _ROWS:
            return super().linear(rows, gelu)
        out = rows.new_empty(len(rows), self._columns)
        for first in range(0, len(rows), _ROWS):
            out[first : first + _ROWS] = super().linear(rows[first : first + _ROWS], gelu)
        return out

    def scaled_sums(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, ZERO, self._packed, self._scales, self._zeros, None,
            1.0, 0, torch.float32, "none", [], "none",
        )  # fmt: skip
        return out


class KernelProduct:
    """By a kernel of our own, which rounds, multiplies and finishes in one go."""

    def __init__(self, kernel: int8_linear.Kernel, weights: RoundedWeights) -> None:
        self._weights = int8_linear.pack(kernel, weights.weight, weights.scales, weights.bias)

    def linear(self, rows: torch.Tensor, gelu: bool) -> torch.Tensor:
        return int8_linear.linear(rows, self._weights, gelu)

    def linear_norm(self, rows: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        return int8_linear.linear_norm(rows, residual, self._weights, norm)
