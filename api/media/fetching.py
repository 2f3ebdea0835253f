"""Fetches pictures from hosts that the operator has named, and only from public addresses unless they are
named: no client reaches through the server what only the server can reach."""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from maxsimd.engine.media import PictureError

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
    held: list[_Address] = [each for each in (address.ipv4_mapped, address.sixtofour) if each is not None]
    if address.teredo is not None:
        held += address.teredo
    if (int(address) >> 32) & 0xFFFF_FFFF in _ISATAP:
        held.append(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
    return held


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
_NOT_PUBLIC = "is on a host whose address is not public, which is not fetched from"
_NO_URL = "has a URL that cannot be read; give https://host/path"


@dataclass(frozen=True, slots=True)
class _Origin:
    scheme: str
    host: str
    port: int


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
        except AddressRefusedError:
            raise PictureError(_NOT_PUBLIC) from None
        except PictureError:
            raise
        except ValueError:
            raise PictureError(_NO_URL) from None
        except (aiohttp.ClientError, OSError) as error:
            refused = isinstance(error.__cause__, AddressRefusedError)
            if refused or isinstance(getattr(error, "os_error", None), AddressRefusedError):
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
                # Unpacked data could be many times larger.
                auto_decompress=False,
                headers={"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "maxsimd"},
            )
        return self._session


def _origin_of_option(allowed: str) -> _Origin:
    """Raises ValueError if this names no host."""
    try:
        origin = _origin(URL(allowed if "://" in allowed else f"https://{allowed}"))
    except ValueError:
        origin = None
    if origin is None:
        raise ValueError(f"{allowed!r} names no host; give example.com, or http://example.com:8080")
    return origin


def _read_url(text: str) -> URL:
    """Raises ValueError. The library that connects reads URLs alike."""
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
