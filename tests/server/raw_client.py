"""A client that sends bytes as they are, and takes its time."""

import json
import socket
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

RERANK = json.dumps({"query": "q", "documents": ["d"]}).encode()


@dataclass(frozen=True)
class Received:
    """The bytes that came until the server closed the connection, or until a client's patience ended."""

    data: bytes
    closed: bool
    seconds: float

    @property
    def status(self) -> int:
        """The status of the first answer; 0 where there is none."""
        return int(self.data.split(b" ", 2)[1]) if self.data else 0

    @property
    def headers(self) -> dict[str, str]:
        lines = self.data.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}

    @property
    def error(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.data.partition(b"\r\n\r\n")[2])["error"]


class RawClient:
    def __init__(self, url: str, receive_buffer: int | None = None) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(600)
        self.socket.connect((parts.hostname, parts.port))
        self._opened = time.monotonic()

    def send(self, *parts: bytes, every: float = 0.0) -> "RawClient":
        """Sends the parts, `every` so many seconds one, for as long as the server takes them."""
        for number, part in enumerate(parts):
            if number:
                time.sleep(every)
            try:
                self.socket.sendall(part)
            except OSError:
                break
        return self

    def receive(self, patience: float = 20.0) -> Received:
        """Reads until the server closes; `seconds` are those since the connection was opened."""
        data, closed = b"", False
        self.socket.settimeout(patience)
        try:
            while more := self.socket.recv(1 << 16):
                data += more
            closed = True
        except TimeoutError:
            pass
        except ConnectionResetError:
            closed = True
        return Received(data, closed, time.monotonic() - self._opened)

    def close(self) -> None:
        self.socket.close()


def post(path: str, body: bytes, *headers: str) -> bytes:
    return head(f"POST {path} HTTP/1.1", f"Content-Length: {len(body)}", *headers) + body


def head(*lines: str) -> bytes:
    return "\r\n".join([*lines, "Host: x", "", ""]).encode("latin-1")
