"""Finds and loads the compiled library, once."""

import ctypes
import functools
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

# Imported for its OpenMP runtime, whose threads the kernels share.
import torch  # noqa: F401

_NUMBER, _POINTER = ctypes.c_int64, ctypes.c_void_p

_ARGUMENTS = {
    "maxsim_float32": [_POINTER] * 5 + [_NUMBER] * 2 + [_POINTER],
    "maxsim_bfloat16": [_POINTER] * 5 + [_NUMBER] * 2 + [_POINTER],
    "maxsim_apart_float32": [_POINTER] * 7 + [_NUMBER] * 2 + [_POINTER],
    "maxsim_apart_bfloat16": [_POINTER] * 7 + [_NUMBER] * 2 + [_POINTER],
    "pack": [_POINTER, _NUMBER, _NUMBER, _POINTER],
    "linear": [
        ctypes.c_int, _POINTER, *[_NUMBER] * 3,  # kind of number, x with its stride, rows and inputs
        _POINTER, _NUMBER, *[_POINTER] * 3, _NUMBER,  # weights with units, scales and sums, bias, columns
        ctypes.c_int, _POINTER, _NUMBER,  # GELU, residual with its stride
        *[_POINTER] * 2, ctypes.c_float, _POINTER,  # weight, bias and epsilon of the norm, output
    ],
    "attention": [
        ctypes.c_int, *[_POINTER] * 4, *[_NUMBER] * 3, *[_POINTER, _NUMBER] * 2,
        _POINTER, ctypes.c_int, _NUMBER, ctypes.c_float, _POINTER,
    ],
    "layers": [
        ctypes.c_int, *[_POINTER] * 2, *[_NUMBER] * 2, ctypes.c_float,  # kind, tables, layers, heads, scale
        *[_POINTER, _NUMBER] * 2, *[_POINTER] * 2,  # hidden states, sequences, workspace, first rows
    ],
}  # fmt: skip

# Kinds of numbers, as the library counts them.
FLOAT32, BFLOAT16, INT8, FLOAT16 = range(4)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library with its argument types declared, or None if it was not built or cannot run here.

    Its functions release Python's lock and compute on as many threads as torch does."""
    path = next((path for path in map(_path, EXTENSION_SUFFIXES) if path.exists()), None)
    if path is None:
        return None
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError:
        return None
    if not loaded.maxsimd_is_supported():
        return None
    for name, arguments in _ARGUMENTS.items():
        function = getattr(loaded, f"maxsimd_{name}")
        function.argtypes, function.restype = arguments, None
    find = loaded.maxsimd_first_not_finite
    find.argtypes, find.restype = [_POINTER] * 4 + [_NUMBER], _NUMBER
    size = loaded.maxsimd_layers_workspace
    size.argtypes, size.restype = [_POINTER, _NUMBER], _NUMBER
    loaded.maxsimd_use_amx.argtypes, loaded.maxsimd_use_amx.restype = [ctypes.c_int], ctypes.c_int
    return loaded


def is_available() -> bool:
    """Whether the kernels were built and this processor can run them."""
    return library() is not None


def kernels() -> ctypes.CDLL:
    """The library. Raises RuntimeError if the kernels are not available."""
    loaded = library()
    if loaded is None:
        raise RuntimeError("the compiled kernels are not available on this machine")
    return loaded


def _path(suffix: str) -> Path:
    return Path(__file__).with_name("_cpu" + suffix)
