"""Linear layers with weights in int8 for CPUs without AVX-512 BF16, which the other kernels need.

Rows are rounded to bytes, each with a scale of its own, and multiplied by whichever of several ways is right
and fastest on this processor."""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from maxsimd.engine.execution.devices import milliseconds_in_turns
from maxsimd.engine.execution.linear import ReplacedLinear, norm_of, replace_layers
from maxsimd.engine.ops.cpu import int8_linear
from maxsimd.engine.ops.cpu.library import used_instruction_sets
from maxsimd.engine.ops.cpu.linear import Norm

log = logging.getLogger(__name__)
ROW_MAX = 127
ZERO = 128  # the byte of a row's zero


@dataclass(frozen=True, slots=True, eq=False)
class RoundedWeights:
    """The weights of a layer as integers, each column with its own scale, and the bias."""

    weight: torch.Tensor  # int8 [columns, inputs]
    scales: torch.Tensor  # float32 [columns]
    bias: torch.Tensor | None  # float32 [columns]


class Product(Protocol):
    """A layer with int8 weights: float32 [rows, inputs] -> float32 [rows, columns]."""

    def linear(self, rows: torch.Tensor, gelu: bool) -> torch.Tensor:
        """The product plus the bias, then exact GELU if `gelu` is set."""

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
    """float32 [n, inputs] as uint8 with zero at 128, and scales [n, 1], NaN for a row that is not finite."""
    sizes = torch.linalg.vector_norm(rows, float("inf"), dim=1, keepdim=True)
    # Rows of tiny numbers are zero: their inverse may be infinite. A number divided by a tensor would be
    # multiplied by its reciprocal, which is rounded once more.
    inverses = torch.where(sizes > 1e-30, torch.full_like(sizes, ROW_MAX) / sizes, 0.0)
    shifted = (rows * inverses).round_().add_(ZERO)
    scales = torch.where(sizes <= 1e-30, 0.0, sizes / ROW_MAX)
    return shifted.to(torch.uint8), torch.where(sizes.isfinite(), scales, torch.nan)


class PlainProduct:
    """The definition: a product of the integers in float32, which runs everywhere."""

    def __init__(self, weights: RoundedWeights) -> None:
        self._weight, self._scales = weights.weight, weights.scales
        self._bias = torch.zeros_like(weights.scales) if weights.bias is None else weights.bias

    def scaled_sums(self, rows: torch.Tensor) -> torch.Tensor:
        """The products of bytes [n, inputs] with the columns, times the columns' scales: float32."""
        return ((rows.float() - ZERO) @ self._weight.float().T).mul_(self._scales)

    def linear(self, rows: torch.Tensor, gelu: bool) -> torch.Tensor:
        shifted, scales = round_rows(rows)
        out = self.scaled_sums(shifted)
        torch.addcmul(self._bias, out, scales, out=out)
        return torch.nn.functional.gelu(out) if gelu else out

    def linear_norm(self, rows: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        total = self.linear(rows, False).add_(residual)
        return torch.nn.functional.layer_norm(total, total.shape[1:], norm.weight, norm.bias, norm.epsilon)


# Rows of one call, so that their results stay in the cache and oneDNN generates code for few sizes.
_ROWS_OF_A_CALL = 256


class OneDnnProduct(PlainProduct):
    """The integers' product by oneDNN through torch: VNNI, AMX, AVX-VNNI, ARM's dot products. Raises if torch
    was built without it."""

    def __init__(self, weights: RoundedWeights) -> None:
        super().__init__(weights)
        self._columns, inputs = weights.weight.shape
        self._zeros = torch.zeros(self._columns, dtype=torch.int32)
        self._weight = torch.ops.onednn.qlinear_prepack(weights.weight, [_ROWS_OF_A_CALL, inputs])

    def linear(self, rows: torch.Tensor, gelu: bool) -> torch.Tensor:
        if len(rows) <= _ROWS_OF_A_CALL:
            return super().linear(rows, gelu)
        out = rows.new_empty(len(rows), self._columns)
        for first in range(0, len(rows), _ROWS_OF_A_CALL):
            out[first : first + _ROWS_OF_A_CALL] = super().linear(rows[first : first + _ROWS_OF_A_CALL], gelu)
        return out

    def scaled_sums(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, ZERO, self._weight, self._scales, self._zeros, None,
            1.0, 0, torch.float32, "none", [], "none",
        )  # fmt: skip
        return out


# Rows and sides of the layer that is timed.
_TIMED_ROWS, _TIMED_SIDE = 128, 768
_TOLERANCE = 1e-5
# The name of torch's product with weights that are not rounded, which int8 is timed beside.
_FLOAT32 = "float32"
# Slowdown by int8 above which a warning is logged. Less may be chance.
_CLEARLY = 1.1


@dataclass(frozen=True, slots=True)
class Path:
    """A way of multiplying int8: its name, the largest weight that it takes, and how it makes a product."""

    name: str
    most: int
    make: Make


PLAIN = Path("plain float32 products", ROW_MAX, PlainProduct)


@functools.cache
def choose_path(compiled: bool) -> Path:
    """The path of this process; `compiled` allows our own kernels. The size of weights depends on the right
    paths alone, never on the timing."""
    path = choose(candidates(compiled))
    log.debug("int8: weights up to %d, on a CPU with %s", path.most, used_instruction_sets())
    return path


def candidates(compiled: bool) -> list[Path]:
    # Without VNNI, oneDNN and our kernels add two products in 16 bits, which hold weights of 7 bits.
    found = [Path("oneDNN", most, OneDnnProduct) for most in (ROW_MAX, int8_linear.AVX2.most)]
    kernels = [kernel for kernel in int8_linear.KERNELS if compiled and kernel.is_available()]
    return found + [
        Path(f"our kernel for {kernel.title}", kernel.most, functools.partial(_packed, kernel))
        for kernel in kernels
    ]


def _packed(kernel: int8_linear.Kernel, weights: RoundedWeights) -> int8_linear.Int8Linear:
    return int8_linear.pack(kernel, weights.weight, weights.scales, weights.bias)


def choose(paths: Iterable[Path]) -> Path:
    """The fastest right path with the largest weights, or the plain one; warns if it is slower than
    float32."""
    right = [path for path in paths if is_right(path)]
    most = max((path.most for path in right), default=PLAIN.most)
    contenders = {path.name: path for path in right if path.most == most}
    contenders[PLAIN.name] = Path(PLAIN.name, most, PLAIN.make)
    milliseconds = _milliseconds(contenders)
    in_float32 = milliseconds.pop(_FLOAT32)
    chosen = min(milliseconds, key=milliseconds.__getitem__)
    measured = ", ".join(f"{name} {taken:.2f} ms" for name, taken in milliseconds.items())
    why = f"by a short timing: {measured}" if right else "because nothing else is right here"
    log.debug("int8: %s, %s", chosen, why)
    if milliseconds[chosen] > _CLEARLY * in_float32:
        log.warning(
            "int8 saves memory alone on this CPU: a layer takes %.2f ms, and %.2f in float32; leave "
            "quantization out to be faster",
            milliseconds[chosen],
            in_float32,
        )
    return contenders[chosen]


@torch.inference_mode()
def is_right(path: Path) -> bool:
    """Whether a path gives the plain one's results, on random layers and on the largest possible sums."""
    generator = torch.Generator().manual_seed(0)
    try:
        for rows, inputs, columns in ((1, 70, 33), (37, 256, 64)):
            x = torch.randn(rows, inputs, generator=generator, dtype=torch.float32)
            weight = torch.randn(columns, inputs, generator=generator, dtype=torch.float32)
            bias = torch.randn(columns, generator=generator, dtype=torch.float32)
            largest = torch.full_like(weight, 1.0) * torch.where(bias > 0, 1.0, -1.0)[:, None]
            ones = torch.ones_like(x)
            for values, layer in ((x, weight), (x.abs() + 1, largest), (ones, largest), (-ones, largest)):
                rounded = round_weights(layer, bias, path.most)
                expected = PlainProduct(rounded).linear(values, False)
                found = path.make(rounded).linear(values, False)
                if found.shape != expected.shape:
                    return False
                if not ((found - expected).abs() <= _TOLERANCE * expected.abs().max()).all():
                    return False
    except Exception as error:
        log.debug("int8 by %s does not run here: %s", path.name, error)
        return False
    return True


@torch.inference_mode()
def _milliseconds(paths: Mapping[str, Path]) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TIMED_ROWS, _TIMED_SIDE, generator=generator, dtype=torch.float32)
    weight = torch.randn(_TIMED_SIDE, _TIMED_SIDE, generator=generator, dtype=torch.float32)
    products = {name: path.make(round_weights(weight, None, path.most)) for name, path in paths.items()}
    runs = {name: functools.partial(product.linear, x, False) for name, product in products.items()}
    return milliseconds_in_turns(runs | {_FLOAT32: functools.partial(torch.nn.functional.linear, x, weight)})


class RoundedLinear(ReplacedLinear):
    """Runs a layer, and the GELU after it if `gelu` is set, with int8 weights."""

    def __init__(self, layer: nn.Linear, gelu: bool, path: Path) -> None:
        super().__init__(layer)
        self._product = _product(layer, path)
        self._gelu = gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._product.linear(_rows(x), self._gelu)
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)


class RoundedOutput(nn.Module):
    """Replaces the end of the attention and the feed-forward of a BERT layer: a linear layer, the residual
    sum, and a layer norm."""

    def __init__(self, output: Any, path: Path) -> None:
        super().__init__()
        self._product, self._norm = _product(output.dense, path), norm_of(output.LayerNorm)

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        out = self._product.linear_norm(_rows(hidden_states), _rows(input_tensor), self._norm)
        return out.to(input_tensor.dtype).view(input_tensor.shape)


def round_layers(backbone: nn.Module, path: Path) -> int:
    """Replaces every linear layer of a backbone; returns the number of weights."""
    return replace_layers(
        backbone,
        lambda layer, gelu: RoundedLinear(layer, gelu, path),
        lambda output: RoundedOutput(output, path),
    )


def _product(layer: nn.Linear, path: Path) -> Product:
    bias = None if layer.bias is None else layer.bias.detach()
    return path.make(round_weights(layer.weight.detach(), bias, path.most))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., n] as float32 [rows, n]."""
    return x.float().reshape(-1, x.shape[-1])
