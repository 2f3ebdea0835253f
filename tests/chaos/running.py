"""Servers in processes of their own, and what can be asked of such a process."""

import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.forked import Program
from tests.server.conftest import Server, free_port

ROOT = Path(__file__).parents[2]
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SETTLING_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class State:
    """A server's work by name, asyncio tasks and descriptors. Comparisons leave out memory: bytes in the C
    library's heaps (None if unknown) and Python's small objects."""

    held: dict[str, int]
    tasks: int
    descriptors: int
    malloc_bytes: int | None = field(compare=False)
    blocks: int = field(compare=False)


@dataclass
class Running(Server):
    """A running server. One that is not `hooked` is the plain command, of which nothing can be asked."""

    control: socket.socket | None = None
    _asking: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def ask(self, do: str, **values: Any) -> Any:
        """Has the hooks do something; see server.py. Threads may ask at a time."""
        assert self.control is not None
        with self._asking, self.control.makefile("rb") as answers:
            self.control.sendall(json.dumps({"do": do, **values}).encode() + b"\n")
            return json.loads(answers.readline())

    @property
    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * _PAGE

    @property
    def peak_bytes(self) -> int:
        """The most since the start, or since `forget_peak`."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def state(self) -> State:
        return State(**self.ask("stats"), descriptors=len(os.listdir(f"/proc/{self.process.pid}/fd")))

    def settled(self, is_settled: Callable[[State], bool] = lambda state: not state.held) -> State:
        """The state once it is as asked for; or when that takes too long, as it is then."""
        end = time.monotonic() + _SETTLING_SECONDS
        while not is_settled(state := self.state()) and time.monotonic() < end:
            time.sleep(0.1)
        return state


@contextmanager
def running(model: str | None, *options: str, hooked: bool = True, before: Any = None) -> Iterator[Running]:
    """A ready server in float32, of the embedded model by default. Its process calls `before` first."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        module = "tests.chaos.server" if hooked else None
        port = free_port()
        words = ["serve", *filter(None, [model]), "--dtype", "float32", "--port", str(port), *options]
        log_file = folder / "log"
        log_file.touch()
        environment = {"HF_HUB_OFFLINE": "1", "MAXSIMD_DRAIN_SECONDS": "0"}
        environment["CHAOS_SOCKET"] = str(folder / "control")
        process = Program(words, module=module, environment=environment, before=before).start(log_file)
        server = Running(f"http://127.0.0.1:{port}", process, log_file)
        try:
            server.wait_until_ready()
            if hooked:
                server.control = socket.socket(socket.AF_UNIX)
                server.control.connect(str(folder / "control"))
            yield server
        except Exception as error:
            error.add_note(f"the end of the server's log:\n{server.log[-4000:]}")
            raise
        finally:
            if server.control is not None:
                server.control.close()
            if process.poll() is None:
                process.kill()
                process.wait()
