"""Linear layers with int8 weights for processors without AVX-512 BF16, compiled: float32 in and out. A row's
bits do not depend on other rows in the call, on the number of threads, or on the kernel."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from maxsimd.engine.ops.cpu.library import int8_function, strided
from maxsimd.engine.ops.cpu.linear import Norm, as_rows, rows_like
from maxsimd.engine.ops.cpu.memory import empty_in_large_pages

_OCTET = 8  # inputs that weights are padded to a multiple of
_ZERO = 128  # the byte of a row's zero


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel, in a library for its instructions."""

    title: str
    level: str  # what it needs, as MAXSIMD_MAX_CPU_ISA names it
    library: str
    most: int  # of a weight, so that sums of products fit
    lanes: int  # columns that are packed together
    panel: int  # columns that are multiplied together
    words: Callable[[torch.Tensor], torch.Tensor]  # of weights [columns, octets, 8]: [columns, words], int32

    def is_available(self) -> bool:
        """Whether it was built and this processor can run it."""
        return self.function is not None

    @property
    def function(self) -> Any:
        """The compiled function, or None."""
        return int8_function(self.library, self.level)


def _with_excess(octets: torch.Tensor) -> torch.Tensor:
    """Eight weights, then -128 times the sums of those whose products are added in 16 bits: of each half of
    an octet, the first two are added to those of the other half, and so are the last two."""
    sums = octets.unflatten(2, (2, 2, 2)).sum((2, 4), dtype=torch.int16)  # [columns, octets, 2]
    return torch.cat([octets.view(torch.int32), sums.mul_(-_ZERO).view(torch.int32)], dim=2).flatten(1)


def _with_start(octets: torch.Tensor) -> torch.Tensor:
    """-128 times the sum of all weights, then all of them, four at a time."""
    start = octets.sum((1, 2), dtype=torch.int32).mul_(-_ZERO)
    return torch.cat([start[:, None], octets.flatten(1).view(torch.int32)], dim=1)


AVX2 = Kernel("AVX2", "avx2", "_cpu_avx2", 63, 8, 8, _with_excess)
AVX512 = Kernel("AVX-512", "avx512", "_cpu_avx512", 63, 16, 32, _with_excess)
AVX512_VNNI = Kernel("AVX-512 with VNNI", "avx512_vnni", "_cpu_avx512", 127, 16, 32, _with_start)
KERNELS = (AVX2, AVX512, AVX512_VNNI)


def is_available() -> bool:
    """Whether this processor can run any of the kernels."""
    return any(kernel.is_available() for kernel in KERNELS)


class _Layer(ctypes.Structure):
    """`Layer` of int8_linear.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("x_stride", "rows", "inputs")),
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "bias")),
        ("columns", ctypes.c_int64),
        ("gelu", ctypes.c_bool),
        ("out", ctypes.c_void_p),
    )


class _Norm(ctypes.Structure):
    """`Norm` of int8_linear.h."""

    _fields_ = (
        ("residual", ctypes.c_void_p),
        ("residual_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        ("epsilon", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Int8Linear:
    """A layer with packed weights [columns, inputs], and a scale and a bias for each column, padded with
    zeros to whole panels. Each row of its input is rounded to int8 with its own scale."""

    kernel: Kernel
    packed: torch.Tensor  # int32 [columns / lanes, words, lanes]
    scales: torch.Tensor  # float32 [columns]
    bias: torch.Tensor  # float32 [columns]
    inputs: int
    columns: int

    def linear(self, rows: torch.Tensor, gelu: bool) -> torch.Tensor:
        """`rows @ weight.T + bias`, float32 [..., inputs] to [..., columns], then exact GELU if `gelu`."""
        return self._run(rows, gelu, None)

    def linear_norm(self, rows: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        """`norm(linear(rows) + residual)`, where residual is float32 [..., columns]."""
        added = rows_like(residual, rows, self.columns)
        return self._run(rows, False, _Norm(*strided(added), *norm.checked(self.columns)))

    def _run(self, x: torch.Tensor, gelu: bool, norm: _Norm | None) -> torch.Tensor:
        function = self.kernel.function
        if function is None:
            raise RuntimeError(
                f"the compiled kernel for {self.kernel.title} is not available on this machine"
            )
        rows = as_rows(x, self.inputs, torch.float32)
        out = torch.empty(len(rows), self.columns, dtype=torch.float32)
        weights = (each.data_ptr() for each in (self.packed, self.scales, self.bias))
        layer = _Layer(*strided(rows), *rows.shape, *weights, self.columns, gelu, out.data_ptr())
        function(ctypes.byref(layer), None if norm is None else ctypes.byref(norm))
        return out.view(*x.shape[:-1], self.columns)


def pack(kernel: Kernel, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> Int8Linear:
    """Packs int8 weights [columns, inputs] with their scales [columns]. Raises ValueError for weights that
    are too large for the kernel."""
    if weight.numel() and int(weight.int().abs().max()) > kernel.most:
        raise ValueError(f"weights are beyond {kernel.most}, which the kernel cannot add up")
    columns, inputs = weight.shape
    more = -columns % kernel.panel
    filled = torch.nn.functional.pad(weight, (0, -inputs % _OCTET, 0, more))
    words = kernel.words(filled.unflatten(1, (-1, _OCTET)).contiguous())
    laid_out = words.unflatten(0, (-1, kernel.lanes)).transpose(1, 2)
    packed = empty_in_large_pages(laid_out.shape, laid_out.dtype).copy_(laid_out)
    bias = torch.zeros(columns, dtype=torch.float32) if bias is None else bias.float()
    scales, bias = (torch.nn.functional.pad(each, (0, more)) for each in (scales.float(), bias))
    return Int8Linear(kernel, packed, scales, bias, inputs, columns)
