"""Which addresses a server may connect to for a client: those of the public internet alone, so that no client
reaches through it what only the server can reach."""

import ipaddress
import socket
from collections.abc import Callable

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# Networks that Python's tables call public, and in which no machine of the public internet is: protocol
# assignments (RFC 6890), 6to4 relays (RFC 7526), Azure's host service, documentation (RFC 9637), segment
# routing (RFC 9602).
_REFUSED = tuple(
    ipaddress.ip_network(each)
    for each in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "3fff::/20", "5f00::/16")
)
# The upper half of an interface's identifier that holds an IPv4 address in the lower (RFC 5214, ISATAP).
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)


class AddressRefusedError(OSError):
    """A host has an address that is not public."""


def is_public(address: str) -> bool:
    """Whether an address, in figures, belongs to one machine of the public internet: it is none of loopback,
    private and link-local networks and multicast, and holds no such IPv4 address (mapped, 6to4, Teredo,
    NAT64)."""
    try:
        parsed = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return False
    return "%" not in address and all(_is_public(each) for each in (parsed, *_held(parsed)))


def _is_public(address: _Address) -> bool:
    is_local = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    is_refused = any(address in network for network in _REFUSED if network.version == address.version)
    return address.is_global and not (is_local or is_refused or address.is_multicast or address.is_reserved)


def _held(address: _Address) -> list[_Address]:
    """The IPv4 addresses that an IPv6 address stands for. (Those of NAT64 are reserved, and so refused.)"""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    held: list[_Address] = [each for each in (address.ipv4_mapped, address.sixtofour) if each is not None]
    if address.teredo is not None:
        held += address.teredo
    if (int(address) >> 32) & 0xFFFF_FFFF in _ISATAP:
        held.append(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
    return held


class CheckedResolver(AbstractResolver):
    """Looks hosts up, and refuses one that has any address of which `may_connect` says no. Connections are
    made to the very addresses that were checked."""

    def __init__(self, may_connect: Callable[[str], bool] = is_public) -> None:
        self._may_connect = may_connect
        self._resolver = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises AddressRefusedError, and OSError for a host that cannot be found."""
        found = await self._resolver.resolve(host, port, family)
        if not found or not all(self._may_connect(each["host"]) for each in found):
            raise AddressRefusedError(f"{host} has an address that is not public")
        return found

    async def close(self) -> None:
        await self._resolver.close()
