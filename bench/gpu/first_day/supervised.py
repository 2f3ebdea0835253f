"""Runs numbered cases in a process, and those that are left in a new one after a case that broke it: an
illegal address ends a process's use of the GPU for good, and a kernel may hang.
"""

import os
import selectors
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# How a process reports a case, with its name and, where it is wrong, why.
RIGHT, WRONG = "right: ", "WRONG: "

# How long a case may take, its compilation included; the first also waits for torch to load.
_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case: None, or the failure."""

    index: int
    failure: str | None


def run_cases(command: Sequence[str], indices: Sequence[int], seconds: float = _SECONDS) -> Iterator[Result]:
    """A result for each of `indices`, in this order. The command is given `--cases` with indices separated by
    commas; it prints a line for each case, and is ended where none comes for `seconds`."""
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
