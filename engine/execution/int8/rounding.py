"""How weights and rows are rounded to int8, and the product of them in plain torch: the definition."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from maxsimd.engine.ops.cpu.linear import Norm

ROW_MAX = 127
ZERO = 128  # the byte of a row's zero


@dataclass(frozen=True, slots=True, eq=False)
class RoundedWeights:
    """The weights of a layer as integers, each column with a scale of its own, and its bias."""

    weight: torch.Tensor  # int8 [columns, inputs]
    scales: torch.Tensor  # float32 [columns]
    bias: torch.Tensor | None  # float32 [columns]


class Product(Protocol):
    """A layer whose weights are rounded: float32 [rows, inputs] -> float32 [rows, columns]."""

    def linear(self, rows: torch.Tensor, gelu: bool) -> torch.Tensor:
        """The product plus the bias, then GELU (exact form) if `gelu` is set."""

    def linear_norm(self, rows: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        """The layer norm of the product plus the bias plus the residual [rows, columns]."""


Make = Callable[[RoundedWeights], Product]


def round_weights(weight: torch.Tensor, bias: torch.Tensor | None, most: int) -> RoundedWeights:
    """Rounds [columns, inputs] symmetrically to integers of at most `most`."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1) / most
    # A column of zeros has the scale 0, and may be divided by any number.
    rounded = (weight / scales.clamp(min=1e-30)[:, None]).round().to(torch.int8)
    return RoundedWeights(rounded, scales, None if bias is None else bias.float())


def round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [n, inputs] as bytes, uint8 with zero at 128, and scales [n, 1]. The scale of a row with a
    number that is not finite is not finite either."""
    sizes = torch.linalg.vector_norm(rows, float("inf"), dim=1, keepdim=True)
    # Rows of nothing but tiny numbers are zero: the inverse of those may be infinite. A number divided by a
    # tensor would be multiplied by its reciprocal, which is rounded once more.
    inverses = torch.where(sizes > 1e-30, torch.full_like(sizes, ROW_MAX) / sizes, 0.0)
    shifted = (rows * inverses).round_().add_(ZERO)
    return shifted.to(torch.uint8), torch.where(sizes <= 1e-30, 0.0, sizes / ROW_MAX)


class TorchProduct:
    """Both in plain torch: `sums` gives the product of the integers, and the rest follows here."""

    def __init__(self, weights: RoundedWeights) -> None:
        self._bias = torch.zeros(len(weights.scales)) if weights.bias is None else weights.bias

    def scaled_sums(self, rows: torch.Tensor) -> torch.Tensor:
        """The products of bytes [n, inputs] with the columns, times the columns' scales: float32."""
        raise NotImplementedError

    def linear(self, rows: torch.Tensor, gelu: bool) -> torch.Tensor:
        shifted, scales = round_rows(rows)
        out = self.scaled_sums(shifted)
        torch.addcmul(self._bias, out, scales, out=out)
        return torch.nn.functional.gelu(out) if gelu else out

    def linear_norm(self, rows: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        total = self.linear(rows, False).add_(residual)
        return torch.nn.functional.layer_norm(total, total.shape[1:], norm.weight, norm.bias, norm.epsilon)


class PlainProduct(TorchProduct):
    """The definition, which runs everywhere: a product of the integers in float32."""

    def __init__(self, weights: RoundedWeights) -> None:
        super().__init__(weights)
        self._weights = weights

    def scaled_sums(self, rows: torch.Tensor) -> torch.Tensor:
        return ((rows.float() - ZERO) @ self._weights.weight.float().T).mul_(self._weights.scales)
