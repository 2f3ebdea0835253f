"""Loads the compiled libraries, each once, and says which instructions of the processor they may use.

MAXSIMD_MAX_CPU_ISA caps the instructions, to run on one machine what others run. torch and oneDNN have caps
of their own, to be set with it: ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA."""

import ctypes
import functools
import os
import platform
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch  # whose OpenMP threads the kernels share

VARIABLE = "MAXSIMD_MAX_CPU_ISA"
# Each includes those before it; `avx512_bf16` includes VNNI, `all` includes AMX.
LEVELS = ("default", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "all")


@functools.cache
def isa_cap() -> str:
    """The highest level that may be used. Raises ValueError for an unknown level in the environment."""
    named = os.environ.get(VARIABLE, "").strip().lower() or "all"
    if named not in LEVELS:
        raise ValueError(f"{VARIABLE} is {named!r}, but must be one of {', '.join(LEVELS)}")
    return named


def may_use(level: str) -> bool:
    return LEVELS.index(level) <= LEVELS.index(isa_cap())


def multiplies_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 natively and may be used so."""
    return (may_use("avx512_bf16") and torch.cpu._is_avx512_bf16_supported()) or (
        may_use("all") and torch.cpu._is_amx_tile_supported()
    )


def used_instruction_sets() -> str:
    """The instruction sets in use, for logs and reports."""
    has = {
        "avx2": torch.cpu._is_avx2_supported(),
        "avx512": torch.cpu._is_avx512_supported(),
        "avx512_vnni": torch.cpu._is_vnni_supported(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
    }
    found = [level for level, present in has.items() if present and may_use(level)]
    if may_use("all") and torch.cpu._is_amx_tile_supported():
        found.append("amx")
    return ", ".join(found) or "neither AVX2 nor AVX-512"


# Names of processors that the kernels are compiled for.
_MACHINES = ("x86_64", "amd64")

_KIND, _NUMBER, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p

_EPILOGUE: list[Any] = [
    ctypes.c_int, *[_POINTER, _NUMBER] * 2,  # activation, addend and residual with their strides
    *[_POINTER] * 2, ctypes.c_float, _POINTER,  # weight, bias and epsilon of the norm, output
]  # fmt: skip

_ARGUMENTS: dict[str, list[Any]] = {
    **dict.fromkeys(("maxsim_float32", "maxsim_bfloat16"), [_POINTER] * 5 + [_NUMBER] * 2 + [_POINTER]),
    **dict.fromkeys(
        ("maxsim_apart_float32", "maxsim_apart_bfloat16"), [_POINTER] * 7 + [_NUMBER] * 2 + [_POINTER]
    ),
    "first_not_finite": [_POINTER] * 4 + [_NUMBER],
    "pack": [_POINTER, _NUMBER, _NUMBER, _POINTER],
    "linear": [
        _KIND, _POINTER, *[_NUMBER] * 3,  # kind, x with its stride, rows and inputs
        _POINTER, _NUMBER, *[_POINTER] * 3, _NUMBER,  # weights with units, scales and sums, bias, columns
        *_EPILOGUE,
    ],
    "linear_blocks": [
        _POINTER, *[_NUMBER] * 3, *[_POINTER] * 3, _NUMBER,  # x, kinds and blocks of weights, bias, columns
        *_EPILOGUE,
    ],
    "unpack": [_POINTER] * 2 + [_NUMBER] * 2 + [_POINTER],
    "norm": [
        _KIND, *[_POINTER, _NUMBER] * 2, *[_NUMBER] * 2,  # kind, x and residual, rows and columns
        *[_POINTER] * 2, ctypes.c_float, ctypes.c_int, _POINTER,  # weight, bias, epsilon, centered, output
    ],
    "norm_rotary": [
        _KIND, _POINTER, *[_NUMBER] * 5,  # kind, heads with their stride, rows, counts and size
        *[_POINTER] * 4, ctypes.c_float,  # cosines, sines, weights of norms, epsilon
    ],
    "attention": [
        _KIND, *[_POINTER] * 4, *[_NUMBER] * 3, *[_POINTER, _NUMBER] * 2,
        _POINTER, ctypes.c_int, _NUMBER, ctypes.c_float, _POINTER,
    ],
    "layers": [
        _KIND, *[_POINTER] * 2, *[_NUMBER] * 2, ctypes.c_float,  # kind, tables, layers, heads, scale
        *[_POINTER, _NUMBER] * 2, *[_POINTER] * 2,  # hidden states, sequences, workspace, first rows
    ],
    "layers_workspace": [_POINTER, _NUMBER],
    "rotary_layers": [
        _KIND, *[_POINTER] * 3, *[_NUMBER] * 4, ctypes.c_float, ctypes.c_int,  # kind, tables, sizes, scale
        *[_POINTER, _NUMBER] * 2, _POINTER,  # hidden states, sequences, workspace
    ],
    "rotary_layers_workspace": [_POINTER, _NUMBER],
    "embed": [
        _KIND, *[_POINTER] * 3, _NUMBER,  # kind, ids, rows
        *[_POINTER, _NUMBER] * 3, _NUMBER,  # tables with their rows, columns
        *[_POINTER] * 2, ctypes.c_float, _POINTER,  # weight, bias and epsilon of the norm, output
    ],
    "use_amx": [ctypes.c_int],
    "product_peak": [_KIND],
}  # fmt: skip

_RESULTS = dict.fromkeys(("first_not_finite", "layers_workspace", "rotary_layers_workspace"), _NUMBER) | {
    "embed": ctypes.c_int,
    "use_amx": ctypes.c_int,
    "product_peak": ctypes.c_double,
}

# Kinds of numbers, as the library counts them.
FLOAT32, BFLOAT16, INT8, FLOAT16 = range(4)
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


def why_unavailable() -> str | None:
    """The reason why the kernels cannot run here, or None."""
    found = _found()
    return found if isinstance(found, str) else None


def is_available() -> bool:
    """Whether the kernels were built and this processor can run them."""
    return why_unavailable() is None


def kernels() -> ctypes.CDLL:
    """The library, whose functions release the GIL and use as many threads as torch. Raises RuntimeError if
    it was not built or cannot run here."""
    found = _found()
    if isinstance(found, str):
        raise RuntimeError(f"the compiled kernels are not available on this machine: {found}")
    return found


@functools.cache
def _found() -> ctypes.CDLL | str:
    loaded = _load("_cpu")
    if isinstance(loaded, str):
        return loaded
    if not may_use("avx512_bf16"):
        return f"{VARIABLE} allows no AVX-512 with BF16"
    if not loaded.maxsimd_is_supported():
        return "this processor lacks AVX-512 with VNNI and BF16"
    for name, arguments in _ARGUMENTS.items():
        function = getattr(loaded, f"maxsimd_{name}")
        function.argtypes, function.restype = arguments, _RESULTS.get(name)
    loaded.maxsimd_use_amx(may_use("all"))
    return loaded


@functools.cache
def int8_function(name: str, level: str) -> Any:
    """The function for int8 layers at a level, in the library of that name; None if it was not built or
    cannot run here."""
    loaded = _load(name)
    if isinstance(loaded, str) or not may_use(level):
        return None
    if not getattr(loaded, f"maxsimd_{level}_is_supported")():
        return None
    function = getattr(loaded, f"maxsimd_{level}_linear")
    function.argtypes, function.restype = [_POINTER] * 2, None
    return function


def address(tensor: torch.Tensor | None) -> int:
    """The address of a tensor; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def strided(rows: torch.Tensor | None) -> tuple[int, int]:
    """The address of a tensor and the distance of its rows in numbers; zeros for None."""
    return (0, 0) if rows is None else (rows.data_ptr(), rows.stride(0))


def with_close_columns(rows: torch.Tensor) -> torch.Tensor:
    """[rows, columns] with the numbers of a row side by side."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def check_float32(count: int, *tensors: torch.Tensor | None) -> None:
    """Raises ValueError unless each tensor has `count` float32 numbers side by side, or is None."""
    for each in tensors:
        if each is not None and (
            each.dtype is not torch.float32 or each.shape != (count,) or not each.is_contiguous()
        ):
            raise ValueError(f"a bias or the weight of a norm must be {count} float32 numbers")


def _load(name: str) -> ctypes.CDLL | str:
    """The library of that name beside this file, or the reason why there is none."""
    paths = (Path(__file__).with_name(name + suffix) for suffix in EXTENSION_SUFFIXES)
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        if platform.machine().lower() not in _MACHINES:
            return f"the kernels are for x86-64, and this is {platform.machine()}"
        return "the kernels were not compiled when maxsimd was installed"
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        return f"the kernels cannot be loaded: {error}"
