"""Linear layers that torch multiplies, on CPUs and in precisions that our kernels are not for: in the fastest
of several ways that are right on this processor, by a short timing at load.

They differ by far: torch's own float32 products (MKL) use AVX-512 on some makers' processors alone, and its
products in 16 bits are slow where the processor has none.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from maxsimd.engine.execution.linear import replace_linears
from maxsimd.engine.execution.short_timing import milliseconds_in_turns
from maxsimd.engine.ops.cpu.instruction_sets import in_words

log = logging.getLogger(__name__)

# Rows and sides of the layer that is timed.
_TIMED_ROWS, _TIMED_SIDE = 128, 768
# How many times as fast as torch's another way must be: oneDNN compiles a kernel for each number of rows,
# which costs some of what it wins.
_MARGIN = 1.2
# A way is right if it differs from torch's result by no more than this, in units of the largest number.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

# Makes what replaces a layer, told whether it takes the GELU behind it along.
Make = Callable[[nn.Linear, bool], nn.Module]


class OneDnnLinear(nn.Module):
    """Replaces an `nn.Linear`, and the GELU (exact form) that follows it if `gelu` is set, by oneDNN's
    product with a weight that is laid out for it once."""

    def __init__(self, layer: nn.Linear, gelu: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
        self._bias = layer.bias.detach() if layer.bias is not None else None
        self._activation = "gelu" if gelu else "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        count = len(rows)
        if count == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        rows = nn.functional.pad(rows, (0, 0, 0, rounded(count) - count))
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self._bias, self._activation, [], "none"
        )
        return out[:count].view(*x.shape[:-1], self.out_features)


def rounded(rows: int) -> int:
    """A number of rows that is not smaller, of which there are few: oneDNN compiles a kernel for each, of
    about 0.4 MB, and torch keeps a thousand of them. At most an eighth is added, or less than 8 rows."""
    step = max(8, 1 << max(0, rows.bit_length() - 4))
    return -(-rows // step) * step


class Float32Linear(nn.Module):
    """Replaces an `nn.Linear` whose weight has 16 bits, and the GELU that follows it if `gelu` is set: the
    weight is kept as it is, and multiplied in float32."""

    def __init__(self, layer: nn.Linear, gelu: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self._gelu = gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        out = nn.functional.linear(x.float(), self.weight.float(), bias)
        return (nn.functional.gelu(out) if self._gelu else out).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Way:
    """A way of multiplying: its name, and what makes a layer, or None where layers stay as they are."""

    name: str
    make: Make | None


TORCH = Way("torch", None)


@functools.cache
def choose_way(dtype: torch.dtype) -> Way:
    """The way that layers of this precision take in this process."""
    right = [way for way in candidates(dtype) if is_right(way, dtype)]
    milliseconds = _milliseconds([TORCH, *right], dtype)
    fastest = min(milliseconds, key=milliseconds.__getitem__)
    name = fastest if _MARGIN * milliseconds[fastest] <= milliseconds[TORCH.name] else TORCH.name
    measured = ", ".join(f"{each} {taken:.2f} ms" for each, taken in milliseconds.items())
    precision = str(dtype).removeprefix("torch.")
    log.debug("%s: %s, by a short timing on a CPU with %s: %s", precision, name, in_words(), measured)
    return next(way for way in (TORCH, *right) if way.name == name)


def candidates(dtype: torch.dtype) -> list[Way]:
    """What may be faster than torch's layers."""
    found = []
    if torch.backends.mkldnn.is_available() and dtype is not torch.float16:
        found.append(Way("oneDNN", OneDnnLinear))
    if dtype is not torch.float32:
        found.append(Way("float32 products", Float32Linear))
    return found


@torch.inference_mode()
def is_right(way: Way, dtype: torch.dtype) -> bool:
    """Whether a way gives what torch's layers give in float32, on random layers with and without GELU."""
    generator = torch.Generator().manual_seed(0)
    try:
        for rows, inputs, columns, gelu in ((1, 70, 33, False), (37, 256, 64, True)):
            layer = _random_layer(inputs, columns, dtype, generator)
            x = torch.randn(rows, inputs, generator=generator).to(dtype)
            expected = nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float())
            expected = nn.functional.gelu(expected) if gelu else expected
            found = x if way.make is None else way.make(layer, gelu)(x)
            difference = (found.float() - expected).abs().max()
            if found.dtype is not dtype or not difference <= _TOLERANCE[dtype] * expected.abs().max():
                return False
    except Exception as error:
        log.debug("linear layers in %s by %s do not run here: %s", dtype, way.name, error)
        return False
    return True


def lay_out(module: nn.Module, way: Way) -> int:
    """Replaces every `nn.Linear`; returns the number of weights."""
    return 0 if way.make is None else replace_linears(module, way.make)


def _random_layer(inputs: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(inputs, columns, dtype=dtype)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


@torch.inference_mode()
def _milliseconds(ways: list[Way], dtype: torch.dtype) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    layer = _random_layer(_TIMED_SIDE, _TIMED_SIDE, dtype, generator)
    x = torch.randn(_TIMED_ROWS, _TIMED_SIDE, generator=generator).to(dtype)
    layers: Mapping[str, nn.Module] = {
        way.name: layer if way.make is None else way.make(layer, False) for way in ways
    }
    return milliseconds_in_turns({name: functools.partial(each, x) for name, each in layers.items()})
