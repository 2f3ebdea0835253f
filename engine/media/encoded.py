"""Files that come as text: base64, and URLs that hold their data (RFC 2397)."""

import base64
import binascii
import re

from maxsimd.engine.media.errors import PictureError

_DATA_URL = re.compile(r"data:(?P<kind>[\w.+/-]*)(?:;[\w.+-]+=[^;,]*)*(?P<base64>;base64)?,", re.IGNORECASE)
_LONGEST_PREFIX = 256
# Characters that are decoded in one go, within a millisecond or so; a multiple of 4.
_PIECE = 512 * 1024
_SPACE = str.maketrans("", "", " \t\r\n")


def bytes_of_data_url(url: str, most_bytes: int) -> bytes:
    """The bytes of `data:image/...;base64,...`. Raises PictureError for another URL, for what is no picture
    by its media type, and for more than `most_bytes`."""
    head = _DATA_URL.match(url[:_LONGEST_PREFIX])
    if head is None or head["base64"] is None:
        raise PictureError("is no data URL; give data:image/png;base64,... with the file's bytes")
    kind = head["kind"].lower()
    if kind and not kind.startswith("image/") and kind != "application/octet-stream":
        raise PictureError(f"is of the media type {kind}; only pictures can be read (image/...)")
    return bytes_of_base64(url, most_bytes, head.end())


def bytes_of_base64(text: str, most_bytes: int, start: int = 0) -> bytes:
    """The bytes that base64 stands for, from the character `start` on; white space is passed over, URL-safe
    letters and missing padding are taken too. Raises PictureError for what is no base64, and for more than
    `most_bytes`, before anything is decoded."""
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
    """The characters from `start` on, without white space."""
    plain = bytearray()
    for first in range(start, len(text), _PIECE):
        plain += text[first : first + _PIECE].translate(_SPACE).encode("ascii")
    return bytes(plain)


def _decoded(plain: bytes, altchars: bytes | None) -> bytes:
    """Piece by piece, so that other threads run between two. Raises binascii.Error."""
    data = bytearray()
    for first in range(0, len(plain), _PIECE):
        data += base64.b64decode(plain[first : first + _PIECE], altchars=altchars, validate=True)
    return bytes(data)


def _altchars(plain: bytes) -> bytes | None:
    return b"-_" if b"-" in plain or b"_" in plain else None
