"""Texts and pictures as callers send them (`Content`), and how pictures are read, with Pillow.

Pictures come out upright (EXIF's orientation applied), in RGB with 8 bits a channel, on white where
transparent. Only the first frame and the upper 8 bits of 16-bit colors are read, and color profiles are
ignored. The size is checked before pixels are unpacked; reading takes some 20 bytes a pixel.
"""

import base64
import binascii
import ctypes
import re
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from hashlib import sha256
from importlib import import_module
from io import BytesIO
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray


class PictureError(ValueError):
    """A picture cannot be fetched or read. The message continues the picture's name."""


# A progressive JPEG has some ten scans, each a pass over the whole picture. Previews have some more.
_MOST_SCANS = 30
# The size of a JPEG's segment. Tags may share their bytes, and older Pillow copies them for each.
_MOST_EXIF_BYTES = 65_536
# Chunks of a PNG beside those of its pixels.
_MOST_CHUNKS = 1_000
_ONCE = (b"iCCP", b"eXIf")
# Parts of any file, such as markers of a JPEG or blocks of a GIF. Pillow reads them within half a second.
_MOST_READS = 500_000
_OF_PIXELS = (b"IDAT", b"fdAT", b"fcTL")


def _check_file(data: bytes, limits: "PictureLimits") -> None:
    """Refuses files that cost far more to unpack than their bytes and pixels justify. Raises PictureError."""
    if data[:2] == b"\xff\xd8":
        # Compressed data has no such bytes; previews may have some.
        if data.count(b"\xff\xda") > _MOST_SCANS:
            raise PictureError("has too many scans for a JPEG; save it anew, not progressive")
    elif data[:8] == b"\x89PNG\r\n\x1a\n":
        _check_png(data)
    elif data[:4] == b"RIFF" and data[12:16] == b"VP8X":
        # Opening it allocates the whole canvas.
        width, height = (1 + int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
        limits.check_size((width, height))


def _check_png(data: bytes) -> None:
    at, others, seen = 8, 0, set[bytes]()
    while at + 8 <= len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        others += kind not in _OF_PIXELS
        if others > _MOST_CHUNKS or (kind in _ONCE and kind in seen):
            raise PictureError("has too many chunks for a PNG; save it anew, without what is no picture")
        seen.add(kind)
        at += 12 + length


class _FewReads(BytesIO):
    """A file that Pillow reads in its own loops, which nothing can interrupt, so that reads are counted."""

    _left = _MOST_READS

    def read(self, size: int | None = -1) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise PictureError("has too many parts; save it anew, without what is no picture")
        return super().read(size)


@dataclass(frozen=True, eq=False)
class Picture:
    """Read-only pixels in RGB, uint8 [height, width, 3], upright and without transparency."""

    pixels: NDArray[np.uint8]

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    @property
    def width(self) -> int:
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        return int(self.pixels.shape[0])

    def read(self, limits: object) -> "Picture":
        """Returns itself. Raises PictureError for other pixels, which a caller may have given."""
        shape, kind = self.pixels.shape, self.pixels.dtype
        if kind != np.uint8 or len(shape) != 3 or shape[2] != 3 or 0 in shape:
            raise PictureError(f"has {kind} pixels {list(shape)}; give uint8 [height, width, 3]")
        return self

    @cached_property
    def digest(self) -> bytes:
        """32 bytes of SHA-256 over pixels and shape; most CPUs have instructions for it."""
        digest = sha256(np.array(self.pixels.shape, dtype="<i8").tobytes())
        digest.update(np.ascontiguousarray(self.pixels).data)
        return digest.digest()


_LOADED = Path("/proc/self/maps")
# The only supported version of libwebp's decoding interface (src/webp/decode.h).
_INTERFACE = 0x0209
# The first part begins after "RIFF", the length and "WEBP"; each part has a head.
_PARTS, _HEAD = 12, 8


def still_webp(data: bytes, limits: "PictureLimits") -> Any:
    """Decodes a WebP picture without animation to a Pillow image, while other threads run. Returns None if
    Pillow must open the file, or tell why it cannot. Raises PictureError if it is too large."""
    library = _library() if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None
    # Width, height, whether pixels may be transparent, whether it is an animation, and six numbers more.
    features = (ctypes.c_int * 10)()
    if library is None or library.WebPGetFeaturesInternal(data, len(data), features, _INTERFACE) != 0:
        return None
    width, height, has_alpha, is_animation, *_ = features
    if is_animation:
        return None
    limits.check_size((width, height))
    pixels = np.empty((height, width, 4), dtype=np.uint8)
    if not library.WebPDecodeRGBAInto(data, len(data), pixels.ctypes.data, pixels.nbytes, 4 * width):
        return None
    image = _pillow_of_four(pixels, "RGBA" if has_alpha else "RGB")
    at = _PARTS
    while at + _HEAD <= len(data):
        length = int.from_bytes(data[at + 4 : at + _HEAD], "little")
        if data[at : at + 4] == b"EXIF":
            image.info["exif"] = data[at + _HEAD : at + _HEAD + length]
            break
        at += _HEAD + length + length % 2
    return image


@cache
def _library() -> ctypes.CDLL | None:
    """Returns the libwebp that Pillow has loaded. Pillow holds Python's lock while it decodes; ctypes does
    not.

    `WebPDecodeRGBAInto` takes a file, its length, the pixels' address and size, and a row's size; null
    means failure. `WebPGetFeaturesInternal` returns 0 for a header that it could read."""
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
    look.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int), ctypes.c_int)
    look.restype = ctypes.c_int
    return library


# TIFF is left out: its tiles may be far larger than the picture, and its gray has many meanings.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# Formats that Pillow reads into one picture at once.
_READ_AT_ONCE = ("PNG", "JPEG", "BMP")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_TRANSPARENT = ("RGBA", "LA", "PA", "RGBa", "La")
_WHITE = (255, 255, 255, 255)
# Above this Pillow refuses files itself.
_MOST_PIXELS = 150_000_000
# Qwen's processors have the same limit; CLIP's makes gigabytes of one line of 8,000 pixels.
_MAX_ASPECT_RATIO = 200
# The most pixels of WebP, and of a compressed BMP, for Pillow, which lets nothing else run meanwhile.
_MOST_AT_ONCE = 2_000_000
# Copied at once, within about a millisecond.
_STRIP_PIXELS = 512 * 1024
# Pillow allocates blocks of this size: as large as a picture needs.
_BLOCK_BYTES = 1 << 29
_ORIENTATION = 0x0112
# Offsets of the bits a channel and the color type in a PNG's header, and two color types.
_DEPTH, _COLOR, _GRAY, _RGB = 24, 25, 0, 2


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """The most bytes of a file, and pixels of a picture (up to 150 million, else ValueError)."""

    file_bytes: int = 20 * 1024 * 1024
    pixels: int = 50_000_000

    def __post_init__(self) -> None:
        if self.file_bytes < 1 or not 1 <= self.pixels <= _MOST_PIXELS:
            raise ValueError(f"a picture must have a byte, and from 1 to {_MOST_PIXELS:,} pixels")

    def check_size(self, size: tuple[int, int]) -> None:
        """Raises PictureError for a picture that is too large, too elongated or empty."""
        width, height = size
        if width < 1 or height < 1:
            raise PictureError(f"has {width} x {height} pixels; send one that has some")
        if width * height > self.pixels:
            raise PictureError(
                f"has {width:,} x {height:,} pixels, but may have {self.pixels:,}; send a smaller picture"
            )
        if max(size) > _MAX_ASPECT_RATIO * min(size):
            raise PictureError(
                f"has {width:,} x {height:,} pixels, but may be at most {_MAX_ASPECT_RATIO} times as long as "
                "wide; send a part of it"
            )


def decoded(data: bytes, limits: PictureLimits) -> Picture:
    """Reads the picture that a file holds. Raises PictureError, and ModuleNotFoundError without Pillow."""
    if len(data) > limits.file_bytes:
        raise PictureError(
            f"has {len(data):,} bytes, but may have {limits.file_bytes:,}; send a smaller file"
        )
    image_module = pillow()
    _check_file(data, limits)
    try:
        if (still := still_webp(data, limits)) is not None:
            return _picture(still, None)
        with image_module.open(_FewReads(data), formats=FORMATS) as image:
            limits.check_size(image.size)
            _check_at_once(image)
            box = image.tile[0][1] if image.format == "GIF" and image.tile else None
            _make_room(image)
            image.load()
            _scale_transparent_color(image, data)
            return _picture(image, box)
    except (PictureError, MemoryError):
        raise
    except image_module.UnidentifiedImageError:
        raise PictureError(
            f"is no picture that can be read; send {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        ) from None
    except image_module.DecompressionBombError:
        raise PictureError(f"has more than {limits.pixels:,} pixels; send a smaller picture") from None
    except Exception as error:
        # Pillow raises OSError, SyntaxError, ValueError, struct.error and more for damaged files.
        raise PictureError(f"cannot be read: its file is damaged ({_in_short(error)})") from None


# Pillow opens files lazily, and two threads that read one at once each get a part of it.
_CALLERS_FILES = threading.Lock()


def picture_of_pillow(image: Any, limits: PictureLimits) -> Picture:
    """Reads a picture that the caller has opened with Pillow. Raises PictureError."""
    limits.check_size(image.size)
    try:
        with _CALLERS_FILES:
            image.load()
            is_upright = image.getexif().get(_ORIENTATION, 1) == 1
        # It is rotated in place, so copy the caller's own.
        return _picture(image if is_upright else image.copy(), None)
    except (PictureError, MemoryError):
        raise
    except Exception as error:
        raise PictureError(f"cannot be read ({_in_short(error)})") from None


@cache
def pillow() -> ModuleType:
    """Imports Pillow and its readers, at load so that no request waits. Raises ModuleNotFoundError."""
    import PIL.Image
    import PIL.ImageOps

    for name in FORMATS:
        import_module(f"PIL.{name.capitalize() if name != 'WEBP' else 'WebP'}ImagePlugin")
    _library()
    # Pillow holds Python's lock while it allocates. Large blocks come from the system and need no clearing.
    import_module("PIL._imaging").set_block_size(_BLOCK_BYTES)
    # Pillow warns of odd tags and quotes them.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    return PIL.Image


def _check_at_once(image: Any) -> None:
    """Raises PictureError for a WebP or BMP file that Pillow would decode for long."""
    width, height = image.size
    if image.tile and image.tile[0][0] == "bmp_rle" and width * height > _MOST_AT_ONCE:
        raise PictureError(
            f"has {width:,} x {height:,} pixels, but as compressed BMP may have {_MOST_AT_ONCE:,}; send a PNG"
        )
    if image.format == "WEBP" and width * height > _MOST_AT_ONCE:
        is_still = getattr(image, "n_frames", 1) == 1
        if _library() is not None or not is_still:
            raise PictureError(
                f"is an animation of {width:,} x {height:,} pixels, but as WebP may have {_MOST_AT_ONCE:,}, "
                "or it is damaged; send a still picture"
            )


def _scale_transparent_color(image: Any, data: bytes) -> None:
    """Converts a PNG's transparent color to the numbers that Pillow makes of the pixels."""
    color = image.info.get("transparency")
    if image.format != "PNG" or color is None or isinstance(color, bytes):
        return
    depth, kind = data[_DEPTH], data[_COLOR]
    if kind == _GRAY and depth in (2, 4):
        image.info["transparency"] = color * (255 // (2**depth - 1))
    elif kind == _RGB and depth == 16:
        image.info["transparency"] = tuple(value >> 8 for value in color)


def _picture(image: Any, box: tuple[int, int, int, int] | None) -> Picture:
    """Makes a picture, white outside of its `box`."""
    from PIL import ImageOps

    if len(image.info.get("exif") or b"") > _MOST_EXIF_BYTES:
        raise PictureError(f"has more than {_MOST_EXIF_BYTES:,} bytes of EXIF; save it without them")
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode in _SIXTEEN_BITS:
        return Picture(_of_sixteen_bits(np.asarray(image), image.info.get("transparency")))
    if image.mode == "F":
        raise PictureError("has floating-point pixels; send one with 8 or 16 bits a channel")
    pixels = _array_of(image)
    if box is not None:
        pixels = pixels.copy()
        left, upper, right, lower = box
        pixels[:upper], pixels[lower:], pixels[:, :left], pixels[:, right:] = 255, 255, 255, 255
    return Picture(pixels)


def _array_of(image: Any) -> NDArray[np.uint8]:
    """Returns pixels [height, width, 3] in RGB, on white, strip by strip: other threads run in between."""
    width, height = image.size
    if width * height <= _STRIP_PIXELS:
        return np.asarray(_in_rgb(image))
    pixels = np.empty((height, width, 3), dtype=np.uint8)
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        pixels[top:bottom] = np.asarray(_in_rgb(image.crop((0, top, width, bottom))))
    return pixels


def pillow_of(pixels: NDArray[np.uint8]) -> Any:
    """Makes a Pillow image of pixels [height, width, 3]. Other threads run meanwhile."""
    four = np.empty((*pixels.shape[:2], 4), dtype=np.uint8)
    four[:, :, :3] = pixels
    return _pillow_of_four(four, "RGB")


def _pillow_of_four(pixels: NDArray[np.uint8], mode: str) -> Any:
    """Makes a Pillow image of pixels [height, width, 4] in mode RGBA, or RGB without the fourth channel.
    Pillow keeps four bytes a pixel in both, and lets other threads run while it copies them."""
    height, width, _ = pixels.shape
    raw = "RGBA" if mode == "RGBA" else "RGBX"
    image = pillow().frombuffer(raw, (width, height), pixels, "raw", raw, 0, 1)
    return image if mode == "RGBA" else image.convert("RGB")


def _make_room(image: Any) -> None:
    """Allocates a large picture's pixels ahead. Pillow would zero them while it holds Python's lock, but
    not when it crops a larger picture from a smaller."""
    width, height = image.size
    if width * height > _STRIP_PIXELS and image.format in _READ_AT_ONCE:
        image.im = pillow().new(image.mode, (1, 1)).im.crop((0, 0, width, height))


def _of_sixteen_bits(values: NDArray[Any], transparent: object) -> NDArray[np.uint8]:
    """Converts gray numbers, which Pillow would clip at 255; the transparent one becomes white."""
    if values.min() < 0 or values.max() > 65_535:
        raise PictureError("has numbers that are no colors of 16 bits; send one with 8 or 16 bits a channel")
    gray = ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
    if isinstance(transparent, int):
        gray[values == transparent] = 255
    return np.repeat(gray[:, :, None], 3, axis=2)


def _in_rgb(image: Any) -> Any:
    if image.mode in _TRANSPARENT or "transparency" in image.info:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        image = pillow().alpha_composite(pillow().new("RGBA", image.size, _WHITE), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _in_short(error: Exception) -> str:
    """Returns an error's kind and its first words, which may quote the file."""
    said = "".join(character if character.isprintable() else " " for character in str(error))[:80]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


_DATA_URL_HEAD = re.compile(r"data:(?P<kind>[\w.+/-]*)(?:;[\w.+-]+=[^;,]*)*(?P<base64>;base64)?,", re.I)
_LONGEST_PREFIX = 256
# Characters decoded at once, within about a millisecond: a multiple of 4.
_PIECE = 512 * 1024
_SPACE = str.maketrans("", "", " \t\r\n")


def bytes_of_data_url(url: str, most_bytes: int) -> bytes:
    """Decodes `data:image/...;base64,...`. Raises PictureError, also for more than `most_bytes`."""
    head = _DATA_URL_HEAD.match(url[:_LONGEST_PREFIX])
    if head is None or head["base64"] is None:
        raise PictureError("is no data URL; give data:image/png;base64,... with the file's bytes")
    kind = head["kind"].lower()
    if kind and not kind.startswith("image/") and kind != "application/octet-stream":
        raise PictureError(f"is of the media type {kind}; only pictures can be read (image/...)")
    return bytes_of_base64(url, most_bytes, head.end())


def bytes_of_base64(text: str, most_bytes: int, start: int = 0) -> bytes:
    """Decodes base64 from the character `start` on. White space, URL-safe letters and missing padding are
    allowed. Raises PictureError, for more than `most_bytes` before anything is decoded."""
    if 3 * (len(text) - start) // 4 > most_bytes + most_bytes // 16 + 64:
        raise PictureError(f"has more than {most_bytes:,} bytes; send a smaller file")
    try:
        # In pieces, so that other threads run in between.
        pieces = (text[at : at + _PIECE] for at in range(start, len(text), _PIECE))
        plain = b"".join(piece.translate(_SPACE).encode("ascii") for piece in pieces).rstrip(b"=")
        plain += b"=" * (-len(plain) % 4)
        altchars = b"-_" if b"-" in plain or b"_" in plain else None
        parts = (plain[at : at + _PIECE] for at in range(0, len(plain), _PIECE))
        data = b"".join(base64.b64decode(part, altchars, validate=True) for part in parts)
    except (UnicodeEncodeError, binascii.Error):
        raise PictureError("is no base64; encode the file's bytes") from None
    if not data:
        raise PictureError("is empty; send the file's bytes")
    if len(data) > most_bytes:
        raise PictureError(f"has {len(data):,} bytes, but may have {most_bytes:,}; send a smaller file")
    return data


# Pages are drawn with this resolution: an A4 page has 1240 x 1754 pixels.
_PIXELS_AN_INCH = 150
_POINTS_AN_INCH = 72
# PDFium draws one page at a time.
_DRAWING = threading.Lock()


@dataclass(frozen=True, slots=True)
class PictureAt:
    """A picture in a file, read when it is needed."""

    path: Path

    def read(self, limits: PictureLimits) -> Picture:
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise PictureError(f"cannot be read: {error}") from None
        return decoded(data, limits)


@dataclass(frozen=True, slots=True)
class PdfPage:
    """A page of a PDF, counted from 0, drawn when it is needed."""

    path: Path
    page: int

    def read(self, limits: PictureLimits) -> Picture:
        from pypdfium2 import PdfDocument, PdfiumError

        with _DRAWING:
            try:
                with PdfDocument(self.path) as document:
                    page = document[self.page]
                    scale = _PIXELS_AN_INCH / _POINTS_AN_INCH
                    limits.check_size((ceil(page.get_width() * scale), ceil(page.get_height() * scale)))
                    bitmap = page.render(scale=scale, rev_byteorder=True, prefer_bgrx=False)
                    drawn = np.array(bitmap.to_numpy())
                    page.close()
            except PdfiumError as error:
                raise PictureError(f"is a page that cannot be drawn: {error}") from None
        gray = drawn.ndim == 2 or drawn.shape[2] == 1
        return Picture(np.repeat(drawn.reshape(*drawn.shape[:2], 1), 3, axis=2) if gray else drawn[:, :, :3])


def pages_of(path: Path) -> list[PdfPage]:
    """Returns the pages of a PDF. Raises PictureError for other files and for PDFs with a password, and
    ImportError without pypdfium2."""
    from pypdfium2 import PdfDocument, PdfiumError

    with _DRAWING:
        try:
            with PdfDocument(path) as document:
                count = len(document)
        except (PdfiumError, OSError) as error:
            raise PictureError(f"cannot be read as a PDF: {error}") from None
    return [PdfPage(path, number) for number in range(count)]


_DATA_URL = "data:"
# A picture is some thousand tokens, whatever the bytes of its file.
_CHARACTERS_A_PICTURE = 4_096


@dataclass(frozen=True, slots=True)
class PictureFile:
    data: bytes

    def read(self, limits: PictureLimits) -> Picture:
        return decoded(self.data, limits)


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """A picture's file in base64 or as a data URL."""

    text: str

    def read(self, limits: PictureLimits) -> Picture:
        is_url = self.text[: len(_DATA_URL)].lower() == _DATA_URL
        data = (bytes_of_data_url if is_url else bytes_of_base64)(self.text, limits.file_bytes)
        return decoded(data, limits)


@dataclass(frozen=True, slots=True)
class MissingPicture:
    """A picture that cannot be had; errors give the reason behind its name."""

    reason: str

    def read(self, limits: PictureLimits) -> Picture:
        raise PictureError(self.reason)


@dataclass(frozen=True, slots=True)
class PictureUrl:
    """A picture at a URL. The API fetches it before the engine sees it."""

    url: str

    def read(self, limits: PictureLimits) -> Picture:
        raise PictureError("is at a URL; give the bytes of its file, as the engine fetches nothing")


class OpenImage(Protocol):
    """The part of Pillow's `Image` that is used, without importing Pillow."""

    @property
    def size(self) -> tuple[int, int]: ...

    @property
    def mode(self) -> str: ...

    def copy(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class PillowPicture:
    """A picture that a Python caller has opened with Pillow."""

    image: OpenImage

    def read(self, limits: PictureLimits) -> Picture:
        return picture_of_pillow(self.image, limits)

    def __hash__(self) -> int:
        return id(self.image)


AnyPicture: TypeAlias = (
    Picture | PictureFile | PictureAt | PdfPage | EncodedPicture | PictureUrl | MissingPicture | PillowPicture
)
Part: TypeAlias = str | AnyPicture


@dataclass(frozen=True, slots=True)
class Content:
    """A query or document with pictures: texts and pictures in their order, at least one."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("content has no parts; give at least one text or picture")

    @classmethod
    def of(cls, parts: Sequence[Part]) -> "Content":
        return cls(tuple(parts))

    @property
    def pictures(self) -> tuple[AnyPicture, ...]:
        return tuple(part for part in self.parts if not isinstance(part, str))

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(part for part in self.parts if isinstance(part, str))

    @property
    def has_pictures(self) -> bool:
        return not {*map(type, self.parts)} <= {str}

    def __len__(self) -> int:
        """Returns the number of characters of a text that is about as much work."""
        return sum(len(part) if isinstance(part, str) else _CHARACTERS_A_PICTURE for part in self.parts)


def is_pillow(item: object) -> bool:
    """Whether an object is a Pillow image, without importing Pillow."""
    return _is_pillow_type(type(item))  # type: ignore[arg-type]  # mypy: types cannot be hashed


@lru_cache(maxsize=256)
def _is_pillow_type(kind: type) -> bool:
    return any(f"{each.__module__}.{each.__qualname__}" == "PIL.Image.Image" for each in kind.__mro__)
