"""Processes that start with everything imported: copies of one that has done nothing else (`tests.imported`).

Python imports 4,000 modules before a server starts, which takes ten times as long as the start itself."""

import atexit
import os
import pickle
import resource
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

# The socket of the process that is copied, for a worker that shares that of its run.
SOCKET = "MAXSIMD_TESTS_SOCKET"


@cache
def parent() -> str:
    """The socket of the process that is copied, which is started if there is none."""
    if SOCKET in os.environ:
        return os.environ[SOCKET]
    folder = TemporaryDirectory()
    path = str(Path(folder.name, "socket"))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.imported", path], stdin=subprocess.PIPE, cwd=Path(__file__).parents[1],
        start_new_session=True,
    )  # fmt: skip

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        folder.cleanup()

    atexit.register(end)
    return path


class Forked:
    """A copy that calls a function, with the methods of `subprocess.Popen` and `files` for 0, 1 and 2."""

    def __init__(self, target: Callable[..., object], *arguments: object, files: Sequence[int]) -> None:
        self.returncode: int | None = None
        call = pickle.dumps((os.getcwd(), dict(os.environ), target, arguments))
        self._connection = _connected(parent())
        socket.send_fds(self._connection, [len(call).to_bytes(8, "little")], list(files))
        self._connection.sendall(call)
        self.pid = self._received(None)
        assert self.pid is not None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._received(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self._received(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _received(self, timeout: float | None) -> int | None:
        """The next number, or None if it does not come in time."""
        self._connection.settimeout(timeout)
        try:
            data = self._connection.recv(8)
        except (BlockingIOError, TimeoutError):
            return None
        if not data:
            raise RuntimeError("the process that is copied has ended")
        return int.from_bytes(data, "little", signed=True)


def _connected(path: str) -> socket.socket:
    """A connection, as soon as everything is imported."""
    deadline = time.monotonic() + 300
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return connection


@dataclass(frozen=True, slots=True)
class Program:
    """`maxsimd` with these arguments, or a file or module in its place, after a function `before`."""

    arguments: Sequence[str]
    file: Path | None = None
    module: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    descriptors: int | None = None
    before: Callable[[], None] | None = None

    def start(self, out: Path, error: Path | None = None, given: Path | None = None) -> Forked:
        """Starts it with what it prints in files, which may be one."""
        write = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY
        files = [os.open(given or os.devnull, os.O_RDONLY | os.O_NOCTTY)]
        files += [os.open(path, write, 0o644) for path in (out, error or out)]
        try:
            return Forked(_run_in_copy, self, files=files)
        finally:
            for file in files:
                os.close(file)

    def run(self, stdin: bytes = b"", status: int = 0) -> "subprocess.CompletedProcess[str]":
        """Runs it to its end, which must have this status."""
        with TemporaryDirectory() as temporary:
            out, error, given = (Path(temporary, name) for name in ("out", "error", "given"))
            given.write_bytes(stdin)
            ended = self.start(out, error, given).wait(1800)
            found = [file.read_text("utf-8") if file.exists() else "" for file in (out, error)]
        assert ended == status, found[1]
        return subprocess.CompletedProcess([*self.arguments], ended, *found)


def run_command(*arguments: str, stdin: bytes = b"", status: int = 0) -> "subprocess.CompletedProcess[str]":
    """Runs `maxsimd` with these arguments; it must end with this status."""
    return Program(arguments).run(stdin, status)


# The rest of this file runs in the copy.


def _run_in_copy(program: Program) -> None:
    os.environ |= program.environment
    if program.descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (program.descriptors, program.descriptors))
    if program.before is not None:
        program.before()
    if program.file is not None:
        sys.argv = [str(program.file), *program.arguments]
        sys.path[0] = str(program.file.parent)
        os.chdir(program.file.parent)
        runpy.run_path(str(program.file), run_name="__main__")
        return
    sys.argv = ["maxsimd", *program.arguments]
    if program.module is not None:
        runpy.run_module(program.module, run_name="__main__", alter_sys=True)
        return
    from maxsimd.api.cli import main

    main()


def _run_code(code: str) -> None:
    sys.argv = ["-c"]
    exec(code, vars(sys.modules["__main__"]))


if __name__ == "__main__":
    # In place of `python -u -c CODE`, by which pytest-xdist starts a worker.
    from tests import forked

    sys.exit(forked.Forked(forked._run_code, sys.argv[-1], files=(0, 1, 2)).wait())
