"""Pictures that requests name by URL: from hosts that the operator has named, and from files in a folder; by
default from nowhere. Hosts have public addresses unless their address is named: no client reaches through the
server what only the server can reach."""

import asyncio
import ipaddress
import os
import socket
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from maxsimd.api.config import ServerConfig, SetupError
from maxsimd.engine import InvalidRequestError
from maxsimd.engine.media import Content, MissingPicture, PictureError, PictureFile, PictureLimits, PictureUrl

if TYPE_CHECKING:
    from maxsimd.api.state import HeldBytes

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# Networks that Python's tables call public, without machines of the public internet: protocol assignments
# (RFC 6890), 6to4 relays (RFC 7526), Azure's host service, documentation (RFC 9637), segment routing (RFC
# 9602).
_REFUSED = tuple(
    ipaddress.ip_network(each)
    for each in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "3fff::/20", "5f00::/16")
)
# The upper half of an interface identifier whose lower half is an IPv4 address (RFC 5214, ISATAP).
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)


class AddressRefusedError(OSError):
    """A host has an address that is not public."""


def is_public(address: str) -> bool:
    """Whether an address belongs to one machine of the public internet: no loopback, private, link-local or
    multicast network, nor one inside an IPv6 address (mapped, 6to4, Teredo, NAT64)."""
    try:
        parsed = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return False
    return "%" not in address and all(_is_public(each) for each in (parsed, *_embedded_ipv4(parsed)))


def _is_public(address: _Address) -> bool:
    is_local = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    is_refused = any(address in network for network in _REFUSED if network.version == address.version)
    return address.is_global and not (is_local or is_refused or address.is_multicast or address.is_reserved)


def _embedded_ipv4(address: _Address) -> list[_Address]:
    """The IPv4 addresses inside an IPv6 address. Those of NAT64 are reserved, and so refused."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    held = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if (int(address) >> 32) & 0xFFFF_FFFF in _ISATAP:
        held.append(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
    return [each for each in held if each is not None]


class CheckedResolver(AbstractResolver):
    """Looks hosts up, and refuses a host if `may_connect` refuses any of its addresses. Connections go to the
    checked addresses."""

    def __init__(self, may_connect: Callable[[str], bool] = is_public) -> None:
        self._may_connect = may_connect
        self._resolver = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises AddressRefusedError, and OSError for an unknown host."""
        found = await self._resolver.resolve(host, port, family)
        if not found or not all(self._may_connect(each["host"]) for each in found):
            raise AddressRefusedError(f"{host} has an address that is not public")
        return found

    async def close(self) -> None:
        await self._resolver.close()


_MOST_REDIRECTS = 3
_SECONDS = 10.0
# For all requests together.
_MOST_CONNECTIONS = 64
_CHUNK_BYTES = 64 * 1024
_REDIRECTS = (301, 302, 303, 307, 308)
_SCHEMES = ("https", "http")
_LONGEST_URL = 8_192
_NOT_PUBLIC = "is on a host whose address is not public; send the file itself"
_NO_URL = "has a URL that cannot be read; give https://host/path"


# Scheme, host and port.
_Origin: TypeAlias = tuple[str, str, int]


class MediaFetcher:
    """Owns the connections to media hosts; used on one event loop, closed by `close`.

    `allowed` are names of hosts (https on its port) or origins (`http://host:8080`). Every URL and redirect
    is checked against them, and every address of a name by `may_connect`. An address among the `allowed` may
    be any. Proxies, cookies and credentials of the environment are not used.
    """

    def __init__(
        self,
        allowed: Collection[str],
        most_bytes: int,
        *,
        seconds: float = _SECONDS,
        may_connect: Callable[[str], bool] = is_public,
    ) -> None:
        self._allowed = frozenset(map(_origin_of_option, allowed))
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._may_connect = may_connect
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, url: str) -> bytes:
        """Raises PictureError."""
        try:
            async with asyncio.timeout(self._seconds):
                return await self._fetch(url)
        except TimeoutError:
            raise PictureError(f"was not received within {self._seconds:g} s") from None
        except PictureError:
            raise
        except ValueError:
            raise PictureError(_NO_URL) from None
        except (aiohttp.ClientError, OSError) as error:
            causes = (error, error.__cause__, getattr(error, "os_error", None))
            if any(isinstance(each, AddressRefusedError) for each in causes):
                raise PictureError(_NOT_PUBLIC) from None
            raise PictureError(f"cannot be fetched ({type(error).__name__})") from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _fetch(self, text: str) -> bytes:
        url = _read_url(text)
        for _ in range(_MOST_REDIRECTS + 1):
            self._check(url)
            async with self._opened().get(url, allow_redirects=False) as response:
                if response.status in _REDIRECTS and "Location" in response.headers:
                    url = url.join(_read_url(response.headers["Location"]))
                    continue
                return await self._read(response)
        raise PictureError(f"is redirected more than {_MOST_REDIRECTS} times")

    def _check(self, url: URL) -> None:
        origin = _origin(url)
        if origin is None:
            raise PictureError(_NO_URL)
        if origin not in self._allowed:
            scheme, host, _ = origin
            raise PictureError(
                f"is at {scheme}://{host}, from where this server fetches nothing; send the "
                "file itself as data:image/...;base64,..., or have the operator allow the host"
            )

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        if response.status != 200:
            raise PictureError(f"cannot be fetched: its host answers with status {response.status}")
        if not response.content_type.startswith("image/"):
            raise PictureError(
                f"is fetched as {response.content_type[:60]}; only pictures can be read (image/...)"
            )
        too_large = PictureError(f"has more than {self._most_bytes:,} bytes; send a smaller file")
        if (response.content_length or 0) > self._most_bytes:
            raise too_large
        data = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            data += chunk
            if len(data) > self._most_bytes:
                raise too_large
        return bytes(data)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            resolver = CheckedResolver(self._may_connect)
            connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, limit=_MOST_CONNECTIONS)
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                # Unpacked data could be many times larger.
                auto_decompress=False,
                headers={"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "maxsimd"},
            )
        return self._session


def _origin_of_option(allowed: str) -> _Origin:
    """Raises ValueError if this names no host."""
    try:
        if origin := _origin(URL(allowed if "://" in allowed else f"https://{allowed}")):
            return origin
    except ValueError:
        pass
    raise ValueError(f"{allowed!r} names no host; give example.com, or http://example.com:8080")


def _read_url(text: str) -> URL:
    """Raises ValueError. The library that connects reads URLs alike."""
    if len(text) > _LONGEST_URL:
        raise ValueError("too long")
    return URL(text)


def _origin(url: URL) -> _Origin | None:
    host = (url.raw_host or "").rstrip(".").lower()
    is_plain = url.scheme in _SCHEMES and url.user is None and url.password is None
    return (url.scheme, host, url.port) if is_plain and host and url.port else None


_LONGEST_FILE_URL = 12_288
_OUTSIDE = "is a file outside of the folder from which pictures are read"
_NO_FILE_URL = "has a URL that cannot be read; give file:///folder/name"


def bytes_of_local_file(url: str, folder: Path | None, most_bytes: int) -> bytes:
    """The bytes of a file in the folder, after links, by its URL (`file:///...`). Raises PictureError, which
    does not tell whether a file outside of the folder exists."""
    if folder is None:
        raise PictureError(
            "is a file of this server's machine, which reads none; send the file itself as "
            "data:image/...;base64,..., or have the operator allow a folder"
        )
    try:
        parts = urlsplit(url if len(url) <= _LONGEST_FILE_URL else "")
    except ValueError:
        raise PictureError(_NO_FILE_URL) from None
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise PictureError(_NO_FILE_URL)
    named, root = Path(unquote(parts.path)), folder.resolve()
    # Check before following any link: where outside links lead stays secret.
    if ".." in named.parts or not (named.is_relative_to(root) or named.is_relative_to(folder.absolute())):
        raise PictureError(_OUTSIDE)
    try:
        path = named.resolve()
    except (OSError, ValueError, RuntimeError):
        raise PictureError("is a file that cannot be opened") from None
    if not path.is_relative_to(root):
        raise PictureError(_OUTSIDE)
    return _read(path, root, most_bytes)


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
            raise PictureError(_OUTSIDE)
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
        self._fetcher: MediaFetcher | None = None
        if config.allowed_media_host:
            try:
                self._fetcher = MediaFetcher(config.allowed_media_host, self._limits.file_bytes)
            except ValueError as error:
                raise SetupError(f"--allowed-media-host: {error}") from error

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
