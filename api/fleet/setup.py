"""What a process of a fleet is told when it is started: on its standard input, where others cannot read it.

The input stays open as long as whoever has started the process lives."""

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec

from maxsimd.api.config import ServerConfig
from maxsimd.api.process import leave_at_once
from maxsimd.engine.config import EngineConfig

_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Setup:
    """One process: a front, or the engine in `slot`. Engines listen on the `engine_paths`, and fronts, for
    each other, on the `front_paths`; a front lets clients in from the descriptors in `sockets`."""

    is_front: bool
    slot: int
    engine_paths: tuple[str, ...]
    front_paths: tuple[str, ...]
    sockets: tuple[int, ...]
    engine_config: EngineConfig
    server_config: ServerConfig

    def encoded(self) -> bytes:
        """For `read_setup` of another process."""
        whole = msgspec.msgpack.encode(self)
        return len(whole).to_bytes(_LENGTH_BYTES, "little") + whole


def read_setup() -> Setup:
    """Of this process, which ends at once when whoever has started it does."""
    length = int.from_bytes(sys.stdin.buffer.read(_LENGTH_BYTES), "little")
    setup = msgspec.msgpack.decode(sys.stdin.buffer.read(length), type=Setup)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    return setup


def remove(path: str) -> None:
    """Removes the socket that a process before this one has left, if there is one."""
    Path(path).unlink(missing_ok=True)


def _leave_with_parent() -> None:
    while os.read(0, 1):
        pass
    leave_at_once(1)
