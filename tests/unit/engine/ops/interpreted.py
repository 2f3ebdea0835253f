"""Runs checks in a process in which Triton interprets its kernels. It decides so at import, which takes
longer than many a check, so one process runs all checks that a worker asks for, one after the other."""

import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import IO


def run_interpreted(check: Callable[..., None], *arguments: str) -> None:
    """Fails with the check's traceback if it fails there, or with the process's output if it dies of it."""
    interpreter = _interpreter()
    try:
        failure = interpreter.run(check, arguments)
    except EOFError:
        _interpreter.cache_clear()
        raise AssertionError(f"the process died:\n{interpreter.printed()[-4000:]}") from None
    assert failure is None, failure


class Interpreter:
    """The process. It ends when its input does, with the one that started it."""

    def __init__(self) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def run(self, check: Callable[..., None], arguments: tuple[str, ...]) -> str | None:
        """The traceback of a check that failed, or None. EOFError if the process died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"module": check.__module__, "name": check.__name__, "arguments": arguments}
        try:
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None
        answer = self._process.stdout.readline()
        if not answer:
            raise EOFError
        failure: str | None = json.loads(answer)["failure"]
        return failure

    def printed(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")


@functools.cache
def _interpreter() -> Interpreter:
    return Interpreter()


def _serve() -> None:
    """Runs what each line of the input asks for. What checks print goes to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            check = getattr(importlib.import_module(asked["module"]), asked["name"])
            check(*asked["arguments"])
            failure = None
        except BaseException:
            failure = traceback.format_exc()
        print(json.dumps({"failure": failure}), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
