"""Starts the processes of a fleet, restarts those that die, and ends them all."""

import asyncio
import fcntl
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from maxsimd.api.config import ServerConfig, SetupError
from maxsimd.api.http.sockets import open_sockets
from maxsimd.api.process import exit_at_once, handled_signals, show_stacks_on_sigusr1
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.host import usable_cores

_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Setup:
    """The setup of a front or of the engine in `slot`, sent on stdin, where others cannot read it. Fronts
    listen on `front_paths` for each other and `sockets` (descriptors) for clients, and share a `secret`."""

    is_front: bool
    slot: int
    engine_paths: tuple[str, ...]
    front_paths: tuple[str, ...]
    sockets: tuple[int, ...]
    engine_config: EngineConfig
    server_config: ServerConfig
    secret: bytes

    def encoded(self) -> bytes:
        whole = msgspec.msgpack.encode(self)
        return len(whole).to_bytes(_LENGTH_BYTES, "little") + whole


def read_setup() -> Setup:
    """Reads this process's setup. The process ends when its parent does."""
    length = int.from_bytes(sys.stdin.buffer.read(_LENGTH_BYTES), "little")
    setup = msgspec.msgpack.decode(sys.stdin.buffer.read(length), type=Setup)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    return setup


def _leave_with_parent() -> None:
    while os.read(0, 1):
        pass
    exit_at_once(1)


log = logging.getLogger("maxsimd.fleet")

# Failed starts in a row after which a process is given up (one, if it was never ready); seconds before the
# next start, which double each time.
_MOST_FAILURES, _PAUSE_SECONDS = 5, 0.5
# Seconds beyond its grace for a front to end, and seconds for the engines afterwards.
_MARGIN_SECONDS, _ENGINE_SECONDS = 10.0, 5.0
_FOLDERS = "maxsimd-fleet-"
# Seconds between looks whether a process is ready.
_LOOK_SECONDS = 0.02


def supervise(engine_config: EngineConfig, server_config: ServerConfig, started: float) -> int:
    """Serves by several processes until a signal. Returns the exit status. `started` is for the log
    (perf_counter)."""
    try:
        sockets = open_sockets(server_config.host, server_config.port)
    except SetupError as error:
        log.error("%s", error)
        return 1
    try:
        remove_left_folders()
        made = locked_folder()
    except OSError:
        log.error("no folder for temporary files can be written to; set TMPDIR to one that can")
        return 1
    with made as folder:
        return asyncio.run(_Fleet(engine_config, server_config, sockets, Path(folder)).run())


def locked_folder() -> "tempfile.TemporaryDirectory[str]":
    """A new folder for sockets, locked until this process ends. Raises OSError."""
    while True:
        made = tempfile.TemporaryDirectory(prefix=_FOLDERS, ignore_cleanup_errors=True)
        with suppress(FileNotFoundError):  # another start has removed it before it was locked
            descriptor = os.open(made.name, os.O_RDONLY)
            with suppress(OSError):  # without locks no folder is ever removed
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.exists(made.name):
                return made
            os.close(descriptor)


def remove_left_folders() -> None:
    """Removes folders whose supervisor was killed: nobody holds their lock. Folders with other files stay,
    without sockets. Raises OSError if no folder is writable."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*"):
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid != os.geteuid():
                    continue
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for each in folder.iterdir():
                    if each.is_socket():
                        each.unlink()
                folder.rmdir()
            finally:
                os.close(descriptor)


class _Fleet:
    def __init__(
        self,
        engine_config: EngineConfig,
        server_config: ServerConfig,
        sockets: Sequence[socket.socket],
        folder: Path,
    ) -> None:
        engine_paths = tuple(str(folder / f"engine-{i}") for i in range(server_config.replicas))
        front_paths = tuple(str(folder / f"front-{i}") for i in range(server_config.fronts))
        numbers = tuple(each.fileno() for each in sockets)
        devices = engine_config.device.split(",")
        threads = engine_config.threads or max(1, usable_cores().threads // server_config.replicas)
        secret = secrets.token_bytes(32)
        setup = Setup(False, 0, engine_paths, front_paths, numbers, engine_config, server_config, secret)
        self._engines, self._fronts = list[_Process](), list[_Process]()
        self._is_asked = asyncio.Event()
        for slot in range(server_config.replicas):
            own = replace(engine_config, device=devices[slot % len(devices)].strip(), threads=threads)
            self._engines.append(_Process(replace(setup, slot=slot, engine_config=own), self._is_asked))
        for slot in range(server_config.fronts):
            self._fronts.append(_Process(replace(setup, is_front=True, slot=slot), self._is_asked))
        self._sockets = sockets
        self._signal = signal.SIGINT  # without a signal there is nothing to drain
        self._seconds = server_config.drain_seconds + server_config.grace_seconds + _MARGIN_SECONDS

    async def run(self) -> int:
        """Returns on a signal, or when no engine or no front can be started."""
        loop = asyncio.get_running_loop()
        for number in handled_signals():
            loop.add_signal_handler(number, self._handle_signal, number)
        show_stacks_on_sigusr1(also=self._show_stacks)
        engines = [asyncio.create_task(each.live()) for each in self._engines]
        # Only the first front reports a wrong configuration.
        first = asyncio.create_task(self._fronts[0].live())
        fronts = [first, *(asyncio.create_task(self._after(first, each)) for each in self._fronts[1:])]
        living = [*engines, *fronts]
        ends: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._is_asked.wait()),
            asyncio.create_task(asyncio.wait(engines)),
            asyncio.create_task(asyncio.wait(fronts)),
        ]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        # Fronts end first: they need the engines to finish their requests.
        for processes, most in ((self._fronts, self._seconds), (self._engines, _ENGINE_SECONDS)):
            ending = [asyncio.create_task(each.end(most, self._signal)) for each in processes]
            await asyncio.sleep(0)
            # Refuses connections once the fronts have closed theirs.
            for listening in self._sockets:
                listening.close()
            await asyncio.gather(*ending)
        for task in (*living, *ends):
            task.cancel()
        return 0 if self._is_asked.is_set() else 1

    def _handle_signal(self, number: signal.Signals) -> None:
        if self._is_asked.is_set():
            log.warning("stopped at once by a second signal")
            exit_at_once(128 + number)  # and with it all others, whose input ends
        self._signal = number
        self._is_asked.set()

    def _show_stacks(self) -> None:
        """Skips processes that are starting: the signal would end them."""
        for each in (*self._fronts, *self._engines):
            each.show_stacks()

    async def _after(self, first: "asyncio.Task[None]", other: "_Process") -> None:
        """Starts another front once the first is ready."""
        while not self._fronts[0].is_ready:
            if first.done():
                return
            await asyncio.sleep(_LOOK_SECONDS)
        await other.live()


class _Process:
    """One process of the fleet and its replacements."""

    def __init__(self, setup: Setup, is_asked: asyncio.Event) -> None:
        """`is_asked` is set once the fleet is to end."""
        self._setup, self._is_asked = setup, is_asked
        paths = setup.front_paths if setup.is_front else setup.engine_paths
        self._path = Path(paths[setup.slot])
        self._name = f"{'front' if setup.is_front else 'replica'} {setup.slot}"
        self._process: asyncio.subprocess.Process | None = None
        self._ending = asyncio.Event()
        # Whether it listens for other processes, or did when it ended.
        self.is_ready = False

    async def live(self) -> None:
        """Returns once the process is to end or cannot be restarted."""
        failures = 0
        was_ever_ready = False
        while not self._ending.is_set():
            try:
                status = await self._run()
            except OSError as error:
                log.error("%s cannot be started: %s", self._name, error)
                status = 1
            if self._ending.is_set() or (status == 0 and self._is_asked.is_set()):
                return
            was_ever_ready |= self.is_ready
            failures = 0 if self.is_ready else failures + 1
            if failures == _MOST_FAILURES or not was_ever_ready:
                log.error("%s has ended (%s) and is not started again", self._name, _reason(status))
                return
            log.warning("%s has ended (%s) and is started again", self._name, _reason(status))
            if failures:
                await asyncio.sleep(_PAUSE_SECONDS * 2**failures)

    async def end(self, seconds: float, number: signal.Signals) -> None:
        """Ends the process by a signal within `seconds`."""
        self._ending.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        # On SIGINT a starting process writes a traceback.
        process.send_signal(number if self.is_ready else signal.SIGTERM)
        try:
            async with asyncio.timeout(seconds):
                await process.wait()
        except TimeoutError:
            log.warning("%s did not end in time and is killed", self._name)
            process.kill()
            await process.wait()

    def show_stacks(self) -> None:
        if self._process is not None and self._process.returncode is None and self.is_ready:
            self._process.send_signal(signal.SIGUSR1)

    async def _run(self) -> int:
        """Returns the exit status."""
        self._path.unlink(missing_ok=True)  # an earlier process may have left it
        self.is_ready = False
        self._process = await asyncio.create_subprocess_exec(
            # The name is for the list of processes.
            *(sys.executable, "-m", "maxsimd.api.fleet.process", *self._name.split()),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=self._setup.sockets if self._setup.is_front else (),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self._setup.encoded())
        ended = asyncio.create_task(self._process.wait())
        while not ended.done():
            self.is_ready = self.is_ready or self._path.exists()
            await asyncio.wait({ended}, timeout=None if self.is_ready else _LOOK_SECONDS)
        return ended.result()


def _reason(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
