"""Listening sockets, TLS, and how many connections a process may have. Imports nothing heavy, for processes
that only start others."""

import resource
import socket
import ssl

from maxsimd.api.config import ServerConfig, SetupError

BACKLOG = 1024
# Descriptors for the rest of the process, which has some 30 while it serves, more while it loads.
_OTHER_DESCRIPTORS = 100
# A load opens files beside the listener and the event loop's own.
_FEWEST_DESCRIPTORS = 32
_MOST_BY_DEFAULT = 10_000
_MOST_DESCRIPTORS = 1 << 20
_MOST_GRPC_CONNECTIONS = 512


def raise_descriptor_limit() -> int:
    """Raises the process's limit on descriptors as far as possible and useful, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return soft
    return wanted


def max_connections(asked_for: int | None, descriptors: int) -> int:
    """The connections that so many descriptors allow. Raises SetupError for more, and for too few."""
    if descriptors == resource.RLIM_INFINITY:
        return asked_for or _MOST_BY_DEFAULT
    if descriptors < _FEWEST_DESCRIPTORS:
        raise SetupError(
            f"a limit of {descriptors} descriptors (ulimit -n) is too low to load a model and to serve; "
            f"raise it to {_FEWEST_DESCRIPTORS} or more"
        )
    possible = max(descriptors // 4, descriptors - _OTHER_DESCRIPTORS)
    if asked_for is not None and asked_for > possible:
        raise SetupError(
            f"--limit max_connections={asked_for} is more than the {possible} that a limit of {descriptors} "
            "descriptors (ulimit -n) leaves; lower the one or raise the other"
        )
    return asked_for or min(possible, _MOST_BY_DEFAULT)


def connections_by_port(config: ServerConfig, descriptors: int) -> tuple[int, int]:
    """The most connections for HTTP and for gRPC. Raises SetupError."""
    of_grpc = 0 if config.grpc_port is None else _MOST_GRPC_CONNECTIONS
    if descriptors != resource.RLIM_INFINITY:
        of_grpc = min(of_grpc, descriptors // 4)
        descriptors -= of_grpc
    return max_connections(config.max_connections, descriptors), of_grpc


def open_sockets(host: str, port: int) -> list[socket.socket]:
    """Listens on all addresses of a host. Raises SetupError."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        is_only_ipv6 = {family for family, *_ in found} == {socket.AF_INET6}
        for family, _, _, _, address in dict.fromkeys(found):
            # All addresses get the same port, even if the system chose it.
            free = sockets[0].getsockname()[1] if sockets else port
            sockets.append(_listening(family, (address[0], free, *address[2:]), is_only_ipv6))
    except OSError as error:
        for opened in sockets:
            opened.close()
        reason = (error.strerror or str(error)).lower()
        raise SetupError(
            f"cannot listen on {host}, port {port}: {reason}; choose another --host or --port, "
            "or stop what listens there"
        ) from error
    return sockets


def _listening(family: int, address: tuple[object, ...], is_only_ipv6: bool) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # IPv4 has its own socket, unless :: is the only address.
            takes_ipv4 = is_only_ipv6 and address[0] == "::"
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not takes_ipv4)
        listening.setblocking(False)
        listening.bind(address)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """TLS 1.2 or later, or None for plain HTTP. Raises SetupError for unusable files."""
    if config.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    files = f"--tls-cert {config.tls_cert!r}"
    if config.tls_key is not None:
        files += f" and --tls-key {config.tls_key!r}"
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, _no_password)
    except ssl.SSLError as error:
        reason = (error.reason or "no PEM").lower().replace("_", " ")
        raise SetupError(f"cannot use {files}: {reason}; give a certificate chain and its own key") from error
    except OSError as error:
        raise SetupError(f"cannot read {files}: {error.strerror}") from error
    return context


def _no_password() -> str:
    raise SetupError(
        "the key of --tls-key has a password; give one without (openssl pkey -in KEY -out PLAIN)"
    )
