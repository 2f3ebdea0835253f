"""Runs checks, one after the other, in a process in which Triton interprets its kernels."""

import functools
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import IO, Any

import torch

from maxsimd.engine.ops.triton import launch
from tests.forked import Forked


def run_interpreted(check: Callable[..., None], *arguments: str) -> None:
    """Fails with the check's traceback if it fails there, or with the process's output if it dies of it."""
    interpreter = _interpreter()
    try:
        failure = interpreter.run(check, arguments)
    except EOFError:
        _interpreter.cache_clear()
        raise AssertionError(f"the process died:\n{interpreter.printed()[-4000:]}") from None
    assert failure is None, failure


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Makes a test run there."""

    @functools.wraps(test)
    def run(**arguments: str) -> None:
        run_interpreted(test, *arguments.values())

    return run


class Interpreter:
    """The process. It ends when its input does, with the one that started it."""

    def __init__(self) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        (given, asked), (answers, answered) = os.pipe(), os.pipe()
        self._process = Forked(_serve, files=(given, answered, self._log.fileno()))
        os.close(given)
        os.close(answered)
        self._asked, self._answers = os.fdopen(asked, "w"), os.fdopen(answers)

    def run(self, check: Callable[..., None], arguments: tuple[str, ...]) -> str | None:
        """The traceback of a check that failed, or None. EOFError if the process died."""
        asked = {"module": check.__module__, "name": check.__name__, "arguments": arguments}
        try:
            print(json.dumps(asked), file=self._asked, flush=True)
        except BrokenPipeError:
            raise EOFError from None
        answer = self._answers.readline()
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
    _interpret()
    torch.set_num_threads(1)
    asked, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in asked:
        call = json.loads(line)
        try:
            check = getattr(importlib.import_module(call["module"]), call["name"])
            getattr(check, "__wrapped__", check)(*call["arguments"])
            failure = None
        except BaseException:
            failure = traceback.format_exc()
        print(json.dumps({"failure": failure}), file=answers, flush=True)


def _interpret() -> None:
    """Imports Triton anew, as an interpreter that replaces functions of its language once for each module."""
    os.environ["TRITON_INTERPRET"] = "1"
    launch.INTERPRETED = True
    for name in list(sys.modules):
        if name.partition(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    from triton.runtime import interpreter

    replace: Callable[[Any], Any] = interpreter._patch_lang
    scopes: dict[int, Any] = {}

    def replace_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module not in scopes:
            scopes[module] = replace(function)
            scopes[module]._changes.clear()  # so that nothing is put back
        return scopes[module]

    interpreter._patch_lang = replace_once
