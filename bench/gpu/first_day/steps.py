"""A step of a stage: a command in a process of its own, which may fail, hang or die without harm to
others."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO

from maxsimd.bench.gpu.first_day.found import Value, read

# Lines in which the engine says that it does not run as fast as it could.
_WARNINGS = ("is not used", "are not replayed", "runs padded", "runs its sequences one by one")


@dataclass(frozen=True, slots=True)
class Step:
    """A command that may take `seconds`, with variables added to the environment."""

    name: str
    command: tuple[str, ...]
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a step: the `status` that its process exited with, negative for a signal and None where it
    ran past its time; `found` by name, and `warnings`."""

    name: str
    status: int | None
    seconds: float
    found: Mapping[str, Value]
    warnings: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return self.status == 0

    @property
    def verdict(self) -> str:
        match self.status:
            case 0:
                return "passed"
            case None:
                return "OVER TIME"
            case _:
                return "FAILED"


def run(step: Step, seconds: float, log: IO[str]) -> Outcome:
    """Runs a step for at most `seconds`, and for at most its own. Its output is printed and logged as it
    comes. All processes that it started end with it."""
    started = time.monotonic()
    if seconds <= 0:
        return Outcome(step.name, None, 0.0, {}, ())
    process = subprocess.Popen(
        step.command,
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(step.environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    is_over = threading.Event()

    def end() -> None:
        is_over.set()
        _kill_group(process)

    timer = threading.Timer(min(seconds, step.seconds), end)
    timer.start()
    lines = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            for out in (sys.stdout, log):
                print(lines[-1], file=out, flush=True)
        status = process.wait()
    finally:
        timer.cancel()
        _kill_group(process)
    warnings = tuple(line for line in lines if any(words in line for words in _WARNINGS))
    taken = time.monotonic() - started
    return Outcome(step.name, None if is_over.is_set() else status, taken, read(lines), warnings)


def _kill_group(process: subprocess.Popen[str]) -> None:
    """Ends all processes of a step; its first one leads their group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
