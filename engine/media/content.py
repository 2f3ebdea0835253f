"""Texts and pictures as callers send them: content, picture files, base64 and data URLs (RFC 2397), PDF
pages.

The `read` methods raise PictureError.
"""

import base64
import binascii
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from maxsimd.engine.media.decoding import Picture, PictureError, PictureLimits, decoded, picture_of_pillow

_DATA_URL_HEAD = re.compile(
    r"data:(?P<kind>[\w.+/-]*)(?:;[\w.+-]+=[^;,]*)*(?P<base64>;base64)?,", re.IGNORECASE
)
_LONGEST_PREFIX = 256
# Characters that are decoded in one go, within a millisecond or so; a multiple of 4.
_PIECE = 512 * 1024
_SPACE = str.maketrans("", "", " \t\r\n")


def bytes_of_data_url(url: str, most_bytes: int) -> bytes:
    """Decodes `data:image/...;base64,...`. Raises PictureError for other URLs and media types, and for
    more than `most_bytes`."""
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
        plain = _plain(text, start).rstrip(b"=")
        data = _decoded(plain + b"=" * (-len(plain) % 4), _altchars(plain))
    except (UnicodeEncodeError, binascii.Error):
        raise PictureError("is no base64; encode the file's bytes") from None
    if not data:
        raise PictureError("is empty; send the file's bytes")
    if len(data) > most_bytes:
        raise PictureError(f"has {len(data):,} bytes, but may have {most_bytes:,}; send a smaller file")
    return data


def _plain(text: str, start: int) -> bytes:
    plain = bytearray()
    for first in range(start, len(text), _PIECE):
        plain += text[first : first + _PIECE].translate(_SPACE).encode("ascii")
    return bytes(plain)


def _decoded(plain: bytes, altchars: bytes | None) -> bytes:
    """Decodes in pieces, so that other threads run in between. Raises binascii.Error."""
    data = bytearray()
    for first in range(0, len(plain), _PIECE):
        data += base64.b64decode(plain[first : first + _PIECE], altchars=altchars, validate=True)
    return bytes(data)


def _altchars(plain: bytes) -> bytes | None:
    return b"-_" if b"-" in plain or b"_" in plain else None


# PDFs have no pixels: a page is drawn with as many an inch. An A4 page is 1240 x 1754 then.
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
                    pixels = page.get_width() * page.get_height() * scale**2
                    if pixels > limits.pixels:
                        raise PictureError(
                            f"is a page of {pixels:,.0f} pixels; at most {limits.pixels:,} are read"
                        )
                    bitmap = page.render(scale=scale, rev_byteorder=True, prefer_bgrx=False)
                    drawn = np.array(bitmap.to_numpy())
                    page.close()
            except PdfiumError as error:
                raise PictureError(f"is a page that cannot be drawn: {error}") from None
        grey = drawn.ndim == 2 or drawn.shape[2] == 1
        return Picture(np.repeat(drawn.reshape(*drawn.shape[:2], 1), 3, axis=2) if grey else drawn[:, :, :3])


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


# A picture, in whichever form it came.
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
        return any(not isinstance(part, str) for part in self.parts)

    def __len__(self) -> int:
        """Returns the number of characters of a text that is about as much work."""
        return sum(len(part) if isinstance(part, str) else _CHARACTERS_A_PICTURE for part in self.parts)


def is_pillow(item: object) -> bool:
    """Whether an object is a Pillow image, without importing Pillow."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == "PIL.Image.Image" for kind in type(item).__mro__)
