"""Runs maxsimd's command with a model that can be made to fail: `python -m tests.chaos.server serve ...`.

A thread answers commands, one a line, on the Unix socket that CHAOS_SOCKET names."""

import asyncio
import ctypes
import json
import os
import random
import socket
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from maxsimd.api.process import let_waiting_threads_sleep

let_waiting_threads_sleep()  # before torch is imported, as in the command itself

from maxsimd.api.cli import main
from maxsimd.engine.actors.runner import RunnerActor
from maxsimd.engine.engine import Engine
from maxsimd.scheduler import Step
from tests.chaos.traffic import POISON

_BEAT_SECONDS = 0.005
_STALL_SECONDS = 0.05


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, see mallinfo(3)."""

    _NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES.split()]


def malloc_bytes() -> int | None:
    """Bytes in use in the C library's heaps and mappings; None without glibc 2.33."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _Mallinfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


class Stalls:
    """Notes when the event loop stood still, how much of that it was computing, and where it stood."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._beat, self._cpu = time.monotonic(), time.thread_time()
        self._stack = ""
        self.seen: list[dict[str, Any]] = []
        loop.call_later(_BEAT_SECONDS, self._note_beat)
        threading.Thread(target=self._watch, daemon=True).start()

    def _note_beat(self) -> None:
        now, cpu = time.monotonic(), time.thread_time()
        late = now - self._beat - _BEAT_SECONDS
        if late > _STALL_SECONDS:
            self.seen.append({"seconds": late, "cpu_seconds": cpu - self._cpu, "stack": self._stack})
        self._beat, self._cpu, self._stack = now, cpu, ""
        self._loop.call_later(_BEAT_SECONDS, self._note_beat)

    def _watch(self) -> None:
        while True:
            time.sleep(_BEAT_SECONDS)
            if time.monotonic() - self._beat > _STALL_SECONDS / 2 and not self._stack:
                frame = sys._current_frames().get(self._thread)
                self._stack = "".join(traceback.format_stack(frame)[-6:])


class Hooks:
    def __init__(self) -> None:
        # How likely it is that a step of several sequences fails, and that it lacks memory.
        self.failing = 0.0
        self.out_of_memory = 0.0
        self.failed = 0
        self._draw = random.Random(0)
        self._engine: Any = None
        self._loop: Any = None
        self._poison = -1
        self._stalls: Any = None

    def watch(self, engine: Engine) -> None:
        self._engine, self._loop = engine, asyncio.get_running_loop()
        [tokens] = engine.tokenizer.encode([POISON], "texts")
        assert len(tokens) == 1, "the poison must be one token"
        self._poison = int(tokens[0])

    def check(self, step: Step) -> None:
        error: Exception
        if any(self._poison in chunk.sequence.tokens.ids for chunk in step.chunks):
            error = RuntimeError("a poisoned sequence")
        elif len(step.chunks) > 1 and self._draw.random() < self.failing:
            error = RuntimeError("a step that fails at random")
        elif len(step.chunks) > 1 and self._draw.random() < self.out_of_memory:
            error = MemoryError("a step that lacks memory at random")
        else:
            return
        self.failed += 1
        raise error

    def _obey(self, do: str, **values: float) -> Any:
        match do:
            case "set":
                vars(self).update(values)
            case "failed":
                return self.failed
            case "stats":
                stats = asdict(self._engine.stats())
                return {
                    "held": {name: value for name, value in (stats | stats.pop("device")).items() if value},
                    "tasks": len(asyncio.all_tasks(self._loop)),
                    "malloc_bytes": malloc_bytes(),
                    "blocks": sys.getallocatedblocks(),
                }
            case "watch stalls":
                self._stalls = Stalls(self._loop)
            case "stalls":
                seen, self._stalls.seen = self._stalls.seen, []
                return seen
        return None

    def serve(self, listening: socket.socket) -> None:
        connection, _ = listening.accept()
        for line in connection.makefile("rb"):
            future: Future[Any] = Future()
            assert self._loop is not None, "ask once the server is ready"
            self._loop.call_soon_threadsafe(self._obey_into, future, json.loads(line))
            connection.sendall(json.dumps(future.result()).encode() + b"\n")

    def _obey_into(self, future: "Future[Any]", command: dict[str, Any]) -> None:
        try:
            future.set_result(self._obey(**command))
        except Exception as error:
            future.set_exception(error)


class Failing:
    """A `ModelRunner` that asks the hooks before each pass."""

    def __init__(self, runner: Any, hooks: Hooks) -> None:
        self._runner = runner
        self._hooks = hooks

    def forward(self, step: Step) -> Any:
        self._hooks.check(step)
        return self._runner.forward(step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def install(hooks: Hooks) -> None:
    start: Any = Engine.start
    init: Any = RunnerActor.__init__

    async def start_and_watch(engine: Engine) -> None:
        await start(engine)
        hooks.watch(engine)

    def init_failing(actor: RunnerActor, mailbox: Any, runner: Any, *others: Any, **options: Any) -> None:
        init(actor, mailbox, Failing(runner, hooks), *others, **options)

    changed: Any = (Engine, RunnerActor)
    changed[0].start, changed[1].__init__ = start_and_watch, init_failing


if __name__ == "__main__":
    hooks = Hooks()
    install(hooks)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(os.environ["CHAOS_SOCKET"])
    listening.listen()
    threading.Thread(target=hooks.serve, args=(listening,), daemon=True).start()
    main()
