"""Fetches pictures from hosts that the operator has named. Where none is named, nothing is fetched."""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

import aiohttp
from yarl import URL

from maxsimd.api.media.addresses import AddressRefusedError, CheckedResolver, is_public
from maxsimd.engine.media import PictureError

_MOST_REDIRECTS = 3
_SECONDS = 10.0
# For all requests together, of which each fetches a few at a time.
_MOST_CONNECTIONS = 64
_CHUNK_BYTES = 64 * 1024
_REDIRECTS = (301, 302, 303, 307, 308)
_SCHEMES = ("https", "http")
_LONGEST_URL = 8_192
_NO_URL = "has a URL that cannot be read; give https://host/path"


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a URL leads: scheme, host in lower case, and port."""

    scheme: str
    host: str
    port: int


class MediaFetcher:
    """Owns the connections to media hosts; used on one event loop, closed by `close`.

    `allowed` are hosts by their names (https on its port), or origins (`http://host:8080`). Each URL and each
    redirect is checked against them, each address that a name has by `may_connect`, and the connection goes
    to the address that was checked. An address that is itself among the `allowed` may be any: the operator
    has named it. No proxy, cookie or credential of the environment takes part."""

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
        """The bytes that a URL leads to. Raises PictureError, saying what is wrong."""
        try:
            async with asyncio.timeout(self._seconds):
                return await self._fetch(url)
        except TimeoutError:
            raise PictureError(f"was not received within {self._seconds:g} s") from None
        except AddressRefusedError:
            raise PictureError(
                "is on a host whose address is not public, which is not fetched from"
            ) from None
        except PictureError:
            raise
        except ValueError:
            raise PictureError(_NO_URL) from None
        except (aiohttp.ClientError, OSError) as error:
            refused = isinstance(error.__cause__, AddressRefusedError)
            if refused or isinstance(getattr(error, "os_error", None), AddressRefusedError):
                raise PictureError(
                    "is on a host whose address is not public, which is not fetched from"
                ) from None
            raise PictureError(f"cannot be fetched ({type(error).__name__})") from None

    async def close(self) -> None:
        """Closes all connections; does nothing where none was made."""
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
            raise PictureError(
                f"is at {origin.scheme}://{origin.host}, from where this server fetches nothing; send the "
                "file itself as data:image/...;base64,..., or have the operator allow the host"
            )

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        if response.status != 200:
            raise PictureError(f"cannot be fetched: its host answers with status {response.status}")
        if not response.content_type.startswith("image/"):
            raise PictureError(
                f"is fetched as {response.content_type[:60]}; only pictures can be read (image/...)"
            )
        if (response.content_length or 0) > self._most_bytes:
            raise PictureError(f"has more than {self._most_bytes:,} bytes; send a smaller file")
        data = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            data += chunk
            if len(data) > self._most_bytes:
                raise PictureError(f"has more than {self._most_bytes:,} bytes; send a smaller file")
        return bytes(data)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            resolver = CheckedResolver(self._may_connect)
            connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, limit=_MOST_CONNECTIONS)
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                # What is unpacked could be many times what is sent.
                auto_decompress=False,
                headers={"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "maxsimd"},
            )
        return self._session


def _origin_of_option(allowed: str) -> _Origin:
    """Raises ValueError for what names no host."""
    try:
        origin = _origin(URL(allowed if "://" in allowed else f"https://{allowed}"))
    except ValueError:
        origin = None
    if origin is None:
        raise ValueError(f"{allowed!r} names no host; give example.com, or http://example.com:8080")
    return origin


def _read_url(text: str) -> URL:
    """Raises ValueError for what is no URL. The library that connects reads it alike."""
    if len(text) > _LONGEST_URL:
        raise ValueError("too long")
    return URL(text)


def _origin(url: URL) -> _Origin | None:
    host = (url.raw_host or "").rstrip(".").lower()
    if (
        url.scheme not in _SCHEMES
        or not host
        or not url.port
        or url.user is not None
        or url.password is not None
    ):
        return None
    return _Origin(url.scheme, host, url.port)
