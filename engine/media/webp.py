"""Still WebP pictures, decoded by the library that Pillow has loaded.

Pillow holds Python's lock while it decodes one, so that no other thread runs; a call through ctypes does
not."""

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_LOADED = Path("/proc/self/maps")


def rgba_of(data: bytes, size: tuple[int, int]) -> NDArray[np.uint8] | None:
    """The pixels [height, width, 4] of a file with one frame of this width and height. None where the library
    is not found, and for what it cannot decode, which Pillow then says in its words."""
    decode = _decoder()
    if decode is None:
        return None
    width, height = size
    pixels = np.empty((height, width, 4), dtype=np.uint8)
    made = decode(data, len(data), pixels.ctypes.data, pixels.nbytes, 4 * width)
    return pixels if made else None


def is_available() -> bool:
    """Whether the library is found."""
    return _decoder() is not None


@cache
def _decoder() -> "ctypes._NamedFuncPointer | None":
    """libwebp's `WebPDecodeRGBAInto`: the file, its length, and where the pixels go, with its size and that
    of a row in bytes. It gives null for a file that it cannot decode, or that does not fit there."""
    from PIL import _webp  # noqa: F401 (loads the library)

    try:
        lines = _LOADED.read_text(encoding="utf-8", errors="replace").splitlines()
        names = {line.split(maxsplit=5)[-1] for line in lines if "/libwebp" in line}
        (path,) = [name for name in names if Path(name).name.startswith(("libwebp-", "libwebp.so"))]
        decode = ctypes.CDLL(path).WebPDecodeRGBAInto
    except (OSError, ValueError, AttributeError):
        return None
    decode.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    decode.restype = ctypes.c_void_p
    return decode
