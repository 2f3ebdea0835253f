"""Looks at a file's structure before it is opened, and refuses those that cost much more to unpack than their
bytes and pixels justify."""

from collections.abc import Callable

from maxsimd.engine.media.errors import PictureError

# A progressive JPEG has some ten scans, each a pass over the whole picture.
_MOST_SCANS = 100
# Of a PNG, beside those that hold its pixels.
_MOST_CHUNKS = 1_000
_ONCE = (b"iCCP", b"eXIf")
_OF_PIXELS = (b"IDAT", b"fdAT", b"fcTL")


def check_file(data: bytes, check_size: Callable[[tuple[int, int]], None]) -> None:
    """Raises PictureError for a file that is not to be opened, `check_size` for a size that is too large."""
    if data[:2] == b"\xff\xd8":
        _check_jpeg(data)
    elif data[:8] == b"\x89PNG\r\n\x1a\n":
        _check_png(data)
    elif data[:4] == b"RIFF" and data[12:16] == b"VP8X":
        # Of such a file memory for the whole canvas is taken as it is opened.
        width, height = (1 + int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
        check_size((width, height))


def _check_jpeg(data: bytes) -> None:
    # What is compressed has no such bytes; a preview within the file may have some of its own.
    if data.count(b"\xff\xda") > _MOST_SCANS:
        raise PictureError("has too many scans for a JPEG; save it anew, not progressive")


def _check_png(data: bytes) -> None:
    at, others, once = 8, 0, dict.fromkeys(_ONCE, 0)
    while at + 8 <= len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        others += kind not in _OF_PIXELS
        if kind in once:
            once[kind] += 1
        if others > _MOST_CHUNKS or max(once.values()) > 1:
            raise PictureError("has too many chunks for a PNG; save it anew, without what is no picture")
        at += 12 + length
