"""Processes that start with everything imported: children of one that has done nothing else.

Python imports 4,000 modules before a server starts, which takes ten times as long as the start itself."""

import multiprocessing
import os
import resource
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory

_PARENT: ForkServerContext = multiprocessing.get_context("forkserver")
_PARENT.set_forkserver_preload(["tests.imported"])


def import_now() -> None:
    """Starts the parent of these processes, which otherwise starts with the first of them. It keeps the
    environment that it starts with."""
    forkserver.ensure_running()


class Forked:
    """A process of this kind, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self._process = _PARENT.Process(target=target, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


@dataclass(frozen=True, slots=True)
class Program:
    """A program for such a process: `maxsimd` with these arguments, or a Python file or module in its place.
    `before` runs first; it must be a function of a module."""

    arguments: Sequence[str]
    file: Path | None = None
    module: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    descriptors: int | None = None
    before: Callable[[], None] | None = None

    def start(self, out: Path, error: Path | None = None, given: Path | None = None) -> Forked:
        """Starts it with what it prints in files, which may be one."""
        return Forked(_run_in_child, self, out, error or out, given)

    def run(self, stdin: bytes = b"", status: int = 0) -> "subprocess.CompletedProcess[str]":
        """Runs it to its end, which must have this status."""
        with TemporaryDirectory() as temporary:
            out, error, given = (Path(temporary, name) for name in ("out", "error", "given"))
            given.write_bytes(stdin)
            ended = self.start(out, error, given).wait(300)
            found = [file.read_text("utf-8") if file.exists() else "" for file in (out, error)]
        assert ended == status, found[1]
        return subprocess.CompletedProcess([*self.arguments], ended, *found)


def run_command(*arguments: str, stdin: bytes = b"", status: int = 0) -> "subprocess.CompletedProcess[str]":
    """Runs `maxsimd` with these arguments; it must end with this status."""
    return Program(arguments).run(stdin, status)


# What follows runs in the child.


def _redirect(out: Path, error: Path, given: Path | None) -> None:
    for number, path, flags in (
        (0, given or os.devnull, os.O_RDONLY),
        (1, out, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, error, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    # Made anew, because those of a regular file ask where in it they are, which a terminal does not know.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _run_in_child(program: Program, out: Path, error: Path, given: Path | None) -> None:
    _redirect(out, error, given)
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
