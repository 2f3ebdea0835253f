"""A process of clients that take their time: `python -m tests.chaos.slow PORT COUNT SECONDS`. Opens that
many connections, prints a line when all are open and the server is done with what they have asked for, and
one of JSON when the server has closed them, or has not within that many seconds."""

import json
import resource
import select
import socket
import sys
import time
from dataclasses import asdict, dataclass, field

from maxsimd.api.sockets import raise_descriptor_limit

_OTHER_DESCRIPTORS = 50
# How long an answer may take to begin.
_ANSWER_SECONDS = 60
# How often a client does something; tools that hold connections open do every 10 to 15 seconds. That all do
# so at once is what clients of their own never do.
_EVERY_SECONDS, _GROUPS = 5.0, 500
_HEAD = b"POST /rerank HTTP/1.1\r\nHost: x\r\n"
# Answered with more than fits into the system's buffers.
_LONG = json.dumps({"query": "q", "documents": ["word " * 1_000_000]}).encode()


@dataclass(frozen=True, slots=True)
class Kind:
    """What a client sends at first and every few seconds; how much it reads as often, None for all."""

    name: str
    share: float
    first: bytes
    drip: bytes = b""
    reads: int | None = None

    @property
    def is_answered(self) -> bool:
        """Whether what it sends at first is a whole request."""
        return not self.drip


# Those whose answers take the server some work come first.
KINDS = (
    Kind("slow readers", 0.01, _HEAD + b"Content-Length: %d\r\n\r\n" % len(_LONG) + _LONG, reads=500),
    Kind("half headers", 0.4, _HEAD + b"X-Slow: ", b"x"),
    Kind("half bodies", 0.3, _HEAD + b"Content-Length: 1000000\r\n\r\n", b" "),
    Kind("idle", 0.29, b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"),
)


@dataclass(slots=True)
class Seen:
    """Of one kind: connections, those still open in the end, and seconds from opening to the server's
    closing."""

    opened: int = 0
    refused: int = 0
    left_open: int = 0
    seconds: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Client:
    kind: Kind
    socket: socket.socket
    opened: float


def main(port: int, count: int, seconds: float) -> None:
    descriptors = raise_descriptor_limit()
    if descriptors != resource.RLIM_INFINITY:
        count = min(count, descriptors - _OTHER_DESCRIPTORS)
    seen = {kind.name: Seen() for kind in KINDS}
    waiting = select.epoll()
    clients: dict[int, Client] = {}
    for kind in KINDS:
        for _ in range(round(kind.share * count)):
            client = _open(kind, port)
            if client is None:
                seen[kind.name].refused += 1
                continue
            seen[kind.name].opened += 1
            clients[client.socket.fileno()] = client
            # One that reads slowly learns only of the connection's end; its data are to stay where they are.
            waiting.register(client.socket, select.EPOLLIN if kind.reads is None else select.EPOLLHUP)
    for client in clients.values():
        if client.kind.is_answered:
            _wait_for_answer(client.socket)
    print("open", flush=True)
    _watch(clients, waiting, seen, time.monotonic() + seconds)
    for client in clients.values():
        seen[client.kind.name].left_open += 1
    print(json.dumps({name: asdict(one) for name, one in seen.items()}), flush=True)


def _watch(clients: dict[int, Client], waiting: select.epoll, seen: dict[str, Seen], deadline: float) -> None:
    """Until all connections are closed, or the deadline."""
    tick, turn = time.monotonic(), 0
    groups: list[dict[int, Client]] = [{} for _ in range(_GROUPS)]
    for number, client in clients.items():
        groups[number % _GROUPS][number] = client
    while clients and (now := time.monotonic()) < deadline:
        closed = [number for number, _ in waiting.poll(max(0.0, tick - now)) if _is_closed(clients[number])]
        for number in closed:
            client = clients.pop(number)
            del groups[number % _GROUPS][number]
            seen[client.kind.name].seconds.append(time.monotonic() - client.opened)
            waiting.unregister(number)
            client.socket.close()
        if time.monotonic() >= tick:
            tick, turn = tick + _EVERY_SECONDS / _GROUPS, turn + 1
            for client in groups[turn % _GROUPS].values():
                _go_on(client)


def _open(kind: Kind, port: int) -> Client | None:
    client = socket.socket()
    client.settimeout(20)
    if kind.reads is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    try:
        client.connect(("127.0.0.1", port))
        opened = time.monotonic()
        client.sendall(kind.first)
    except OSError:
        client.close()
        return None
    client.setblocking(False)
    return Client(kind, client, opened)


def _wait_for_answer(reader: socket.socket) -> None:
    begun = select.poll()
    begun.register(reader, select.POLLIN)
    begun.poll(1e3 * _ANSWER_SECONDS)


def _is_closed(client: Client) -> bool:
    try:
        return client.socket.recv(1 << 16) == b"" or client.kind.reads is not None
    except BlockingIOError:
        return False
    except OSError:
        return True


def _go_on(client: Client) -> None:
    """What the client does now and then. That the connection is over is noticed elsewhere."""
    try:
        if client.kind.drip:
            client.socket.send(client.kind.drip)
        elif client.kind.reads is not None:
            client.socket.recv(client.kind.reads)
    except OSError:
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
