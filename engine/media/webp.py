"""Still WebP pictures, decoded by the library that Pillow has loaded.

Pillow holds Python's lock while it opens and decodes one, so that no other thread runs; a call through ctypes
does not."""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_LOADED = Path("/proc/self/maps")
# The version of libwebp's interface for reading (src/webp/decode.h): of another one nothing is told.
_INTERFACE = 0x0209
# Where a file's first part begins, after "RIFF", its length and "WEBP", and how long a part's head is.
_PARTS, _HEAD = 12, 8


class _Features(ctypes.Structure):
    """libwebp's `WebPBitstreamFeatures`."""

    _fields_ = (
        ("width", ctypes.c_int),
        ("height", ctypes.c_int),
        ("has_alpha", ctypes.c_int),
        ("has_animation", ctypes.c_int),
        ("format", ctypes.c_int),
        ("others", ctypes.c_uint32 * 5),
    )


@dataclass(frozen=True, slots=True)
class WebpHeader:
    """What a file's head says: width and height in pixels, whether pixels may be transparent, and whether
    there is one frame alone."""

    size: tuple[int, int]
    has_alpha: bool
    is_still: bool


def is_webp(data: bytes) -> bool:
    """Whether a file says that it is one."""
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def header_of(data: bytes) -> WebpHeader | None:
    """None where the library is not found, and for what it cannot read."""
    library = _library()
    features = _Features()
    if library is None or library.WebPGetFeaturesInternal(data, len(data), features, _INTERFACE) != 0:
        return None
    size = features.width, features.height
    return WebpHeader(size, bool(features.has_alpha), not features.has_animation)


def rgba_of(data: bytes, size: tuple[int, int]) -> NDArray[np.uint8] | None:
    """The pixels [height, width, 4] of a file with one frame of this width and height. None where the library
    is not found, and for what it cannot decode, which Pillow then says in its words."""
    library = _library()
    if library is None:
        return None
    width, height = size
    pixels = np.empty((height, width, 4), dtype=np.uint8)
    made = library.WebPDecodeRGBAInto(data, len(data), pixels.ctypes.data, pixels.nbytes, 4 * width)
    return pixels if made else None


def exif_of(data: bytes) -> bytes | None:
    """The part of a file that says how the picture was taken, and how it is turned."""
    at = _PARTS
    while at + _HEAD <= len(data):
        length = int.from_bytes(data[at + 4 : at + _HEAD], "little")
        if data[at : at + 4] == b"EXIF":
            return data[at + _HEAD : at + _HEAD + length]
        at += _HEAD + length + length % 2
    return None


def is_available() -> bool:
    """Whether the library is found."""
    return _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    """libwebp, with two functions. `WebPDecodeRGBAInto` takes a file, its length, and where the pixels go,
    with its size and that of a row in bytes; it gives null for a file that it cannot decode, or that does not
    fit there. `WebPGetFeaturesInternal` gives 0 for a head that it could read."""
    from PIL import _webp  # noqa: F401 (loads the library)

    try:
        lines = _LOADED.read_text(encoding="utf-8", errors="replace").splitlines()
        names = {line.split(maxsplit=5)[-1] for line in lines if "/libwebp" in line}
        (path,) = [name for name in names if Path(name).name.startswith(("libwebp-", "libwebp.so"))]
        library = ctypes.CDLL(path)
        decode, look = library.WebPDecodeRGBAInto, library.WebPGetFeaturesInternal
    except (OSError, ValueError, AttributeError):
        return None
    decode.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    decode.restype = ctypes.c_void_p
    look.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(_Features), ctypes.c_int)
    look.restype = ctypes.c_int
    return library
