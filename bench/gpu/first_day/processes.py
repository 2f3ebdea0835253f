"""Processes of a day on a GPU: its steps, and numbered cases within a step. Each may fail, hang or die
without harm to others."""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

# A step reports a figure on a line that begins with this.
_MARK = "found: "
Value = str | float | None
# Lines in which the engine says that it does not run as fast as it could.
_WARNINGS = ("is not used", "are not replayed", "runs padded", "runs its sequences one by one")
# A process reports a case with its name and, if it is wrong, the reason.
RIGHT, WRONG = "right: ", "WRONG: "
# Seconds of a case with its compilation; the first also waits for torch to load.
_CASE_SECONDS = 90.0


def show(name: str, value: Value) -> None:
    """Prints a figure or a fact at once, so that nothing is lost if the process dies afterwards."""
    print(_MARK + json.dumps([name, value]), flush=True)


def show_all(figures: Mapping[str, object], prefix: str = "") -> None:
    """Prints figures; nested ones are named after the outer one."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            show_all(value, f"{prefix}{name}: ")
        else:
            assert value is None or isinstance(value, str | float | int)
            show(prefix + name, value)


def _shown(lines: Iterable[str]) -> dict[str, Value]:
    marked = (line.removeprefix(_MARK) for line in lines if line.startswith(_MARK))
    return dict(json.loads(text) for text in marked)


@dataclass(frozen=True, slots=True)
class Step:
    """A command that may take `seconds`, with variables added to the environment."""

    name: str
    command: tuple[str, ...]
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a step: the exit `status` of its process, negative for a signal and None if it ran past
    its time; the figures `found` by name, and `warnings`."""

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
        return {0: "passed", None: "OVER TIME"}.get(self.status, "FAILED")


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
    return Outcome(step.name, None if is_over.is_set() else status, taken, _shown(lines), warnings)


def _kill_group(process: subprocess.Popen[str]) -> None:
    """Ends all processes of a step, whose first one leads their group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@dataclass(frozen=True, slots=True)
class Result:
    """The failure of a case, or None."""

    index: int
    failure: str | None


def run_cases(
    command: Sequence[str], indices: Sequence[int], seconds: float = _CASE_SECONDS
) -> Iterator[Result]:
    """A result for each of `indices`, in this order. The command is given `--cases` with indices separated by
    commas, prints a line for each case, and is killed if none comes for `seconds`. Cases after one that
    breaks its process run in another: an illegal address ends a process's use of the GPU for good."""
    left = list(indices)
    while left:
        done = 0
        for result in _run_process([*command, "--cases", ",".join(map(str, left))], left, seconds):
            done += 1
            yield result
        left = left[done:]


def _run_process(command: Sequence[str], indices: Sequence[int], seconds: float) -> Iterator[Result]:
    """The results of cases up to the first that the process does not survive, which is at least one."""
    with subprocess.Popen(
        command,
        env=os.environ | {"CUDA_LAUNCH_BLOCKING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        printed: list[str] = []
        done = 0
        for line in _lines(process, seconds):
            if line.startswith((RIGHT, WRONG)) and done < len(indices):
                print(line, flush=True)
                yield Result(indices[done], None if line.startswith(RIGHT) else line.removeprefix(WRONG))
                done += 1
                printed.clear()
            else:
                printed.append(line)
        status = process.poll()
        process.kill()
        if done < len(indices):
            why = "it hung" if status is None else f"its process ended with {status}"
            yield Result(indices[done], " / ".join([why, *printed[-5:]]))


def _lines(process: "subprocess.Popen[str]", seconds: float) -> Iterator[str]:
    """Lines as they come, until the process ends or has printed none for `seconds`."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    text, last = "", time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() - last < seconds:
            if not selector.select(timeout=0.2):
                continue
            read = os.read(process.stdout.fileno(), 1 << 16).decode(errors="replace")
            if not read:
                process.wait()
                yield from text.splitlines()
                return
            last = time.monotonic()
            *whole, text = (text + read).split("\n")
            yield from whole
