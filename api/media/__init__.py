"""Pictures that requests name by URL: from named hosts and from files in a folder, by default from
nowhere."""

import asyncio
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from maxsimd.api.config import ServerConfig, SetupError
from maxsimd.engine import InvalidRequestError
from maxsimd.engine.media import Content, MissingPicture, PictureError, PictureFile, PictureLimits, PictureUrl

if TYPE_CHECKING:
    from maxsimd.api.media.fetching import MediaFetcher
    from maxsimd.api.state import HeldBytes


_LONGEST_URL = 12_288
_NO_URL = "has a URL that cannot be read; give file:///folder/name"


def bytes_of_local_file(url: str, folder: Path | None, most_bytes: int) -> bytes:
    """The bytes of a file in the folder, after links, by its URL (`file:///...`). Raises PictureError, which
    does not tell whether a file outside of the folder exists."""
    if folder is None:
        raise PictureError(
            "is a file of this server's machine, of which none is read; send the file itself as "
            "data:image/...;base64,..., or have the operator allow a folder"
        )
    named = _path(url)
    root = folder.resolve()
    outside = PictureError("is a file outside of the folder from which pictures are read")
    # Check before following any link: where outside links lead stays secret.
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
        # Non-blocking, because opening a pipe would wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        raise PictureError("is a file that cannot be opened") from None
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise PictureError("is no regular file")
        # A folder may have become a link since the check.
        opened = _OPEN_FILES / str(descriptor)
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


R = TypeVar("R")
# A descriptor's link to the file that is open.
_OPEN_FILES = Path("/proc/self/fd")
_Files = dict[PictureUrl, PictureFile | MissingPicture]

# For one request.
_TOGETHER = 8


class MediaSources:
    """Gets the pictures that requests name by URL, from the hosts and the folder of the configuration alone.
    Used on one event loop, closed by `close`. Raises SetupError for a wrong host or folder."""

    def __init__(self, config: ServerConfig) -> None:
        self._most_images = config.max_images
        self._most_bytes = config.max_body_mb * 1024 * 1024
        self._limits = PictureLimits()
        self._folder = None if config.allowed_media_dir is None else Path(config.allowed_media_dir).absolute()
        if self._folder is not None and not self._folder.is_dir():
            raise SetupError(f"--allowed-media-dir {config.allowed_media_dir} is no folder; name one")
        if self._folder is not None and not _OPEN_FILES.is_dir():
            raise SetupError(
                f"--allowed-media-dir needs {_OPEN_FILES}, which this system does not have; leave it out"
            )
        self._fetcher = (
            _fetcher(config.allowed_media_host, self._limits) if config.allowed_media_host else None
        )

    async def filled(self, found: R, held: "HeldBytes") -> R:
        """Returns what was read of a request (texts and content, in lists and tuples), with the files of its
        URLs. Raises InvalidRequestError for too many pictures, and for those that cannot be had."""
        contents = [*_contents(found)]
        if not contents:
            return found
        count = sum(len(content.pictures) for content in contents)
        if count > self._most_images:
            raise InvalidRequestError(
                f"this request has {count} pictures, and one may have {self._most_images}; send it in parts"
            )
        urls = {part for content in contents for part in content.parts if isinstance(part, PictureUrl)}
        if not urls:
            return found
        files = await self._files(urls, held)
        filled: R = _with_files(found, files)
        return filled

    async def close(self) -> None:
        if self._fetcher is not None:
            await self._fetcher.close()

    async def _files(self, urls: Iterable[PictureUrl], held: "HeldBytes") -> _Files:
        """Fetches each URL once. Together the files have no more bytes than a body may have. A missing file
        becomes an error when its document is read."""
        gate, files, room = asyncio.Semaphore(_TOGETHER), _Files(), self._most_bytes

        async def fetch(url: PictureUrl) -> None:
            nonlocal room
            async with gate:
                try:
                    data = await self._bytes(url.url)
                except PictureError as error:
                    files[url] = MissingPicture(str(error))
                    return
            room -= len(data)
            if room < 0:
                raise InvalidRequestError(
                    f"the pictures of this request have together more than {self._most_bytes:,} bytes; send "
                    "fewer at a time, or smaller files"
                )
            held.add(len(data))
            files[url] = PictureFile(data)

        tasks = [asyncio.create_task(fetch(url)) for url in urls]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return files

    async def _bytes(self, url: str) -> bytes:
        if url[:5].lower() == "file:":
            return await asyncio.to_thread(bytes_of_local_file, url, self._folder, self._limits.file_bytes)
        if self._fetcher is None:
            raise PictureError(
                "is at a URL, and this server fetches nothing; send the file itself as "
                "data:image/...;base64,..., or have the operator allow its host (--allowed-media-host)"
            )
        return await self._fetcher.fetch(url)


def _fetcher(hosts: Collection[str], limits: PictureLimits) -> "MediaFetcher":
    # Load this only if needed.
    from maxsimd.api.media.fetching import MediaFetcher

    try:
        return MediaFetcher(hosts, limits.file_bytes)
    except ValueError as error:
        raise SetupError(f"--allowed-media-host: {error}") from error


def _contents(found: Any) -> Iterator[Content]:
    if isinstance(found, Content):
        yield found
    elif isinstance(found, tuple | list) and not (found and isinstance(found[0], int)):
        for each in found:
            if isinstance(each, Content | tuple | list):
                yield from _contents(each)


def _with_files(found: Any, files: _Files) -> Any:
    match found:
        case Content():
            parts = [files[part] if isinstance(part, PictureUrl) else part for part in found.parts]
            return replace(found, parts=tuple(parts))
        case tuple():
            return tuple(_with_files(each, files) for each in found)
        case list():
            return [_with_files(each, files) for each in found]
        case _:
            return found
