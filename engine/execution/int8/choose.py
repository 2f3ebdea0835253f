"""Which way of multiplying int8 a processor takes: the fastest of those that are right on it."""

import functools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from maxsimd.engine.execution.int8.products import KernelProduct, OneDnnProduct
from maxsimd.engine.execution.int8.rounding import (
    ROW_MAX,
    Make,
    PlainProduct,
    Product,
    RoundedWeights,
    round_weights,
)
from maxsimd.engine.execution.short_timing import milliseconds_in_turns
from maxsimd.engine.ops.cpu import int8_linear
from maxsimd.engine.ops.cpu.instruction_sets import in_words

log = logging.getLogger(__name__)

# Rows and sides of the layer that is timed.
_TIMED_ROWS, _TIMED_SIDE = 128, 768
_TOLERANCE = 1e-5
# What int8 is timed beside: a product by torch, of weights that are not rounded.
_FLOAT32 = "float32"
# How much slower it must be for a warning: less may be chance.
_CLEARLY = 1.1


@dataclass(frozen=True, slots=True)
class Path:
    """A way of multiplying int8: its name, the largest weight that it is given, and what makes a layer."""

    name: str
    most: int
    make: Make


PLAIN = Path("plain float32 products", ROW_MAX, PlainProduct)


@functools.cache
def choose_path(compiled: bool) -> Path:
    """The path that this process takes; `compiled` says whether our own kernels may be used.

    How finely weights are rounded depends only on which paths are right, never on the timing."""
    path = choose(candidates(compiled))
    log.debug("int8: weights up to %d, on a CPU with %s", path.most, in_words())
    return path


def candidates(compiled: bool) -> list[Path]:
    """What may run here, beside the plain products."""
    # Without VNNI, oneDNN adds two products in 16 bits, as our kernels do; those hold weights of 7 bits.
    found = [Path("oneDNN", most, OneDnnProduct) for most in (ROW_MAX, int8_linear.AVX2.most)]
    kernels = [kernel for kernel in int8_linear.KERNELS if compiled and kernel.is_available()]
    return found + [
        Path(f"our kernel for {kernel.title}", kernel.most, functools.partial(KernelProduct, kernel))
        for kernel in kernels
    ]


def choose(paths: Iterable[Path]) -> Path:
    """The fastest of the paths that are right with the largest weights, or the plain one; with a warning
    where it is slower than float32."""
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
    """Whether a path gives what the plain one gives, on random layers and on the largest sums there are."""
    generator = torch.Generator().manual_seed(0)
    try:
        for rows, inputs, columns in ((1, 70, 33), (37, 256, 64)):
            x = torch.randn(rows, inputs, generator=generator)
            weight = torch.randn(columns, inputs, generator=generator)
            bias = torch.randn(columns, generator=generator)
            largest = torch.full_like(weight, 1.0) * torch.where(bias > 0, 1.0, -1.0)[:, None]
            ones = torch.ones_like(x)
            for values, layer in ((x, weight), (x.abs() + 1, largest), (ones, largest), (-ones, largest)):
                rounded = round_weights(layer, bias, path.most)
                if not _agree(path.make(rounded), rounded, values):
                    return False
    except Exception as error:
        log.debug("int8 by %s does not run here: %s", path.name, error)
        return False
    return True


def _agree(product: Product, rounded: RoundedWeights, values: torch.Tensor) -> bool:
    expected = PlainProduct(rounded).linear(values, False)
    found = product.linear(values, False)
    return found.shape == expected.shape and bool(
        ((found - expected).abs() <= _TOLERANCE * expected.abs().max()).all()
    )


@torch.inference_mode()
def _milliseconds(paths: Mapping[str, Path]) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TIMED_ROWS, _TIMED_SIDE, generator=generator)
    weight = torch.randn(_TIMED_SIDE, _TIMED_SIDE, generator=generator)
    products = {name: path.make(round_weights(weight, None, path.most)) for name, path in paths.items()}
    runs = {name: functools.partial(product.linear, x, False) for name, product in products.items()}
    return milliseconds_in_turns(runs | {_FLOAT32: functools.partial(torch.nn.functional.linear, x, weight)})
