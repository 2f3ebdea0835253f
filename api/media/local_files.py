"""Reads pictures from one folder of this machine that the operator has named."""

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from maxsimd.engine.media import PictureError

_LONGEST_URL = 12_288
_NO_URL = "has a URL that cannot be read; give file:///folder/name"


def bytes_of_local_file(url: str, folder: Path | None, most_bytes: int) -> bytes:
    """The bytes of the file that a URL (`file:///...`) names, if it lies in the folder, links followed.
    Raises PictureError; the message does not tell whether a file outside of the folder exists."""
    if folder is None:
        raise PictureError(
            "is a file of this server's machine, of which none is read; send the file itself as "
            "data:image/...;base64,..., or have the operator allow a folder"
        )
    named = _path(url)
    root = folder.resolve()
    outside = PictureError("is a file outside of the folder from which pictures are read")
    # Before any link is followed: where links outside lead is nobody's business.
    if ".." in named.parts or not (named.is_relative_to(root) or named.is_relative_to(folder.absolute())):
        raise outside
    try:
        path = named.resolve()
    except (OSError, ValueError, RuntimeError):
        raise PictureError("is a file that cannot be opened") from None
    if not path.is_relative_to(root):
        raise outside
    return _read(path, root, most_bytes)


def _path(url: str) -> Path:
    try:
        parts = urlsplit(url if len(url) <= _LONGEST_URL else "")
    except ValueError:
        raise PictureError(_NO_URL) from None
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise PictureError(_NO_URL)
    return Path(unquote(parts.path))


def _read(path: Path, root: Path, most_bytes: int) -> bytes:
    try:
        # Not blocking, because a pipe would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        raise PictureError("is a file that cannot be opened") from None
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise PictureError("is no regular file")
        # A folder on the way may have become a link since it was looked at. (Where there is no /proc, this
        # refuses.)
        opened = Path(f"/proc/self/fd/{descriptor}")
        if not opened.resolve().is_relative_to(root):
            raise PictureError("is a file outside of the folder from which pictures are read")
        if about.st_size > most_bytes:
            raise PictureError(
                f"has {about.st_size:,} bytes, but may have {most_bytes:,}; send a smaller file"
            )
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(most_bytes)
    finally:
        os.close(descriptor)
