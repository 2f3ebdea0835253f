"""The blocking engine's life: interrupted, closed by several threads, forked, and ended by the process."""

import asyncio
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from maxsimd.engine import EngineNotReadyError, RequestFailedError, SyncEngine
from maxsimd.engine import engine as engine_module
from maxsimd.engine.device import load as load_module
from maxsimd.integrations import Ranker
from tests.forked import Program
from tests.waiting import Pause, wait_for

TEXTS = [f"the text with the number {i}" for i in range(20)]


def new_engine(model: str) -> SyncEngine:
    return SyncEngine(model, dtype="float32", threads=1, progress=False)


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    """SIGINT interrupts, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_at(pause: Pause) -> threading.Thread:
    def press() -> None:
        pause.is_there.wait(600)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


def test_an_interrupted_start_can_be_repeated(bge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, before, pause = new_engine(bge), threading.active_count(), Pause()
    with monkeypatch.context() as slow:
        slow.setattr(load_module, "load_model", pause.before(load_module.load_model))
        pressing = interrupt_at(pause)
        with pytest.raises(KeyboardInterrupt):
            engine.start()
        pressing.join()
        pause.may_go_on.set()
    with pytest.raises(EngineNotReadyError, match="not running"):
        engine.score("query", TEXTS)
    with engine:
        assert len(engine.score("query", TEXTS).scores) == 20
    wait_for(lambda: threading.active_count() == before)


def test_an_interrupted_call_leaves_the_engine_to_others(bge: str) -> None:
    pause = Pause()
    with new_engine(bge) as engine:
        pressing = interrupt_at(pause)
        with pytest.raises(KeyboardInterrupt):
            engine.score("query", TEXTS, progress=pause.here)
        pressing.join()
        pause.may_go_on.set()
        assert len(engine.score("query", TEXTS).scores) == 20
        wait_for(lambda: engine.stats().requests == 0)


def test_several_threads_may_close_it_at_once(bge: str) -> None:
    for _ in range(3):
        engine = new_engine(bge).start()
        with ThreadPoolExecutor(8) as threads:
            scores = [threads.submit(engine.score, "query", TEXTS) for _ in range(3)]
            for close in [threads.submit(engine.close) for _ in range(5)]:
                close.result(600)
            for score in scores:  # it came in time, or is told why not
                error = score.exception(60)
                assert error is None or isinstance(error, EngineNotReadyError)
        with pytest.raises(EngineNotReadyError, match="not running"):
            engine.score("query", TEXTS)


def test_a_ranker_of_a_framework_starts_once_for_several_threads(bge: str) -> None:
    ranker = Ranker(None, bge, {"dtype": "float32", "threads": 1})
    with ThreadPoolExecutor(3) as threads:
        ranked = [threads.submit(ranker.rank, "query", TEXTS, 2, None, False) for _ in range(3)]
        assert [len(places.result(600)) for places in ranked] == [2, 2, 2]
    ranker.close()


def test_a_close_waits_for_results_that_are_being_made(bge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pause = Pause()

    async def make_slowly(size: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        await asyncio.to_thread(pause.here)
        return function(*arguments, **options)

    monkeypatch.setattr(engine_module, "run_in_thread_if_large", make_slowly)
    engine = new_engine(bge).start()
    with ThreadPoolExecutor(2) as threads:
        score = threads.submit(engine.score, "query", TEXTS)
        pause.is_there.wait(600)
        close = threads.submit(engine.close)
        wait_for(lambda: not engine._engine.is_healthy)
        assert not wait([close], 0.3).done
        pause.may_go_on.set()
        assert len(score.result(600).scores) == 20
        close.result(600)


def test_a_stream_may_be_left_after_a_close(bge: str) -> None:
    engine = new_engine(bge).start()
    with engine.stream("query", TEXTS) as stream:
        engine.close()
        with pytest.raises(EngineNotReadyError, match="not running"):
            next(stream)
    with pytest.raises(KeyError, match="the caller's own"), engine.start().stream("query", TEXTS):  # noqa: PT012
        engine.close()
        raise KeyError("the caller's own")


@pytest.mark.parametrize("call", ["score", "close", "start", "clear_cache"])
def test_a_call_from_its_own_progress_is_refused(bge: str, call: str) -> None:
    with new_engine(bge) as engine:
        arguments = {"score": ("query", TEXTS)}.get(call, ())
        with pytest.raises(RequestFailedError, match="would wait for itself") as failed:
            engine.score("query", TEXTS, progress=lambda *_: getattr(engine, call)(*arguments))
        assert isinstance(failed.value.__cause__, EngineNotReadyError)
        assert len(engine.score("query", TEXTS).scores) == 20


def test_a_close_waits_for_a_start_in_another_thread(bge: str) -> None:
    engine = new_engine(bge)
    with ThreadPoolExecutor(2) as threads:
        start = threads.submit(engine.start)
        wait_for(lambda: engine._thread is not None or start.done())
        engine.close()
        assert start.result(600) is engine
    with pytest.raises(EngineNotReadyError, match="not running"):
        engine.score("query", TEXTS)


FORKS = """
import atexit, os, sys, threading, warnings
from maxsimd import SyncEngine
from maxsimd.engine import EngineNotReadyError
warnings.simplefilter("ignore", DeprecationWarning)
def forked(function):
    child = os.fork()
    if not child:
        try:
            function()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
def runs():
    with engine:
        assert len(engine.score("query", ["a", "b"]).scores) == 2
def is_refused():
    for use in (lambda: engine.score("query", ["a"]), engine.start):
        try:
            use()
        except EngineNotReadyError as error:
            assert "forked from" in str(error)
        else:
            raise AssertionError("it was used")
        engine.close()
engine = SyncEngine(MODEL, dtype="float32", threads=1, progress=False)
forked(runs)  # it was made before the fork, and not started
runs()
engine.start()
forked(is_refused)
assert len(engine.score("query", ["a", "b"]).scores) == 2
threading._shutdown()
atexit._run_exitfuncs()
"""


def test_an_engine_made_before_a_fork_runs_and_one_started_is_refused(bge: str, tmp_path: Path) -> None:
    # The end is an interpreter's, which copies of a process that has imported everything do not have.
    program = tmp_path / "forks.py"
    program.write_text(FORKS.replace("MODEL", repr(bge)))
    done = Program([], program).run()
    assert (done.stdout, done.stderr) == ("", "")


ENDS = """
import threading
from maxsimd import SyncEngine
engine = SyncEngine(MODEL, dtype="float32", threads=1, progress=False).start()
called = threading.Semaphore(0)
def score():
    while True:
        engine.score("query", ["word " * 400] * 50, cache="bypass", progress=lambda *_: called.release())
for _ in range(4):
    threading.Thread(target=score, daemon=True).start()
for _ in range(20):
    called.acquire()
"""

GIVES_UP = """
import os, signal, threading, time
from maxsimd import SyncEngine
from maxsimd.engine.device import load as load_module
load_model = load_module.load_model
def interrupt_and_load(*arguments):
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    time.sleep(1)
    os.write(1, b"a load that was given up goes on")
    return load_model(*arguments)
signal.signal(signal.SIGINT, signal.default_int_handler)
load_module.load_model = interrupt_and_load
try:
    SyncEngine(MODEL, dtype="float32", threads=1, progress=False).start()
except KeyboardInterrupt:
    pass
"""

LEFT = """
from maxsimd import EngineConfig, SyncEngine
from maxsimd.api.cluster.data import ScoreRows
rows = ScoreRows(EngineConfig(model=MODEL, dtype="float32"))
rows.score([{"query": "a", "documents": [f"b {i}" for i in range(300)]}])
SyncEngine(MODEL, dtype="float32", threads=1, progress=False).start()
"""

UNSTOPPED = """
import asyncio, atexit, threading
atexit.register(lambda: print(end="".join(each.name for each in threading.enumerate()[1:])))
from maxsimd import Engine
async def score():
    engine = Engine(MODEL, dtype="float32", threads=1)
    await engine.start()
    await engine.rerank("a", [f"b {i}" for i in range(300)])
asyncio.run(score())
"""

UNFINISHED = r"(stopping with \d requests unfinished when the grace is over\n)?"


@pytest.mark.parametrize(("code", "said"), [(ENDS, UNFINISHED), (GIVES_UP, ""), (LEFT, ""), (UNSTOPPED, "")])
def test_a_process_ends_beside_daemons_and_loads(bge: str, code: str, said: str) -> None:
    command = [sys.executable, "-c", code.replace("MODEL", repr(bge))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert re.fullmatch(said, done.stderr)
