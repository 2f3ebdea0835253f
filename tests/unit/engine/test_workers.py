"""The pool's threads: small work goes first, large work rests, and shared calls come in order."""

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import closing
from typing import Any, TypeVar

import pytest

from maxsimd.engine import workers
from maxsimd.engine.workers import WithdrawnError, Work, WorkerPool, called_on_each, yield_to_smaller
from tests.waiting import wait_for

SMALL, LARGE = 10, 1_000_000
SMALLEST_HUGE = 524_288
PATIENCE = 20


class Blocked:
    def __init__(self, pool: WorkerPool, size: int, then: Callable[[], Any] = lambda: None) -> None:
        self.go_on, self._begun, self._then = threading.Event(), threading.Event(), then
        self.work: Work[Any] = pool.submit(self._run, size)

    def _run(self) -> Any:
        self._begun.set()
        assert self.go_on.wait(PATIENCE)
        return self._then()

    def wait_until_begun(self) -> "Blocked":
        assert self._begun.wait(PATIENCE)
        return self


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with closing(WorkerPool(1)) as pool:
        yield pool


@pytest.mark.parametrize(
    ("sizes", "done"),
    [
        pytest.param([LARGE, SMALL, 1000, SMALL], [1, 3, 0, 2], id="small work first"),
        pytest.param([LARGE, *[SMALL] * 10, 1000], [1, 2, 0, *range(3, 12)], id="every fourth is the oldest"),
        pytest.param([SMALL, LARGE, *[SMALL] * 3], [0, 2, 1, 3, 4], id="which came first of all sizes"),
        # As those do whose sizes differ by less than four times, within the same bounds.
        pytest.param([1024, 2047, 512], [0, 1, 2], id="nearly the same size"),
    ],
)
def test_works_are_done_by_size_and_age(pool: WorkerPool, sizes: list[int], done: list[int]) -> None:
    found: list[int] = []
    first = Blocked(pool, SMALL).wait_until_begun()
    works = [pool.submit(lambda i=i: found.append(i), size) for i, size in enumerate(sizes)]
    first.go_on.set()
    for work in works:
        work.future.result(PATIENCE)
    assert found == done


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (SMALL, ["other 0", "large", "other 1", "large", "large"]),  # one each time
        (LARGE // 8, ["other 0", "large", "other 1", "large", "large"]),
        (LARGE, ["large", "large", "large", "other 0", "other 1"]),
        (4 * LARGE, ["large", "large", "large", "other 0", "other 1"]),
    ],
)
def test_only_smaller_work_runs_within_large_work(pool: WorkerPool, size: int, expected: list[str]) -> None:
    events: list[str] = []

    def large() -> str:
        for _ in range(3):
            yield_to_smaller()
            events.append("large")
        return "result"

    blocked = Blocked(pool, LARGE, large).wait_until_begun()
    others = [pool.submit(lambda i=i: events.append(f"other {i}"), size) for i in range(2)]
    blocked.go_on.set()
    assert blocked.work.future.result(PATIENCE) == "result"
    for other in others:
        other.future.result(PATIENCE)
    assert events == expected


@pytest.mark.parametrize(("threads", "size"), [(2, LARGE), (3, SMALLEST_HUGE)])
def test_all_threads_but_one_do_huge_work(threads: int, size: int) -> None:
    pool = WorkerPool(threads)
    begun = [Blocked(pool, size).wait_until_begun() for _ in range(threads - 1)]
    waiting = [Blocked(pool, size) for _ in range(3)]
    while waiting:
        for _ in range(5):
            assert pool.submit(lambda: "small", SMALLEST_HUGE - 1).future.result(PATIENCE) == "small"
        assert not any(blocked.work.future.running() for blocked in waiting)
        begun[0].go_on.set()
        begun = [*begun[1:], waiting.pop(0).wait_until_begun()]
    for blocked in begun:
        blocked.go_on.set()
        blocked.work.future.result(PATIENCE)
    pool.close()


def test_work_that_is_withdrawn_or_fails_harms_no_other(pool: WorkerPool) -> None:
    begun = []
    first = Blocked(pool, SMALL).wait_until_begun()
    pool.submit(lambda: begun.append(True), SMALL).withdraw()
    first.go_on.set()
    assert pool.submit(lambda: "next", SMALL).future.result(PATIENCE) == "next"
    assert not begun
    with pytest.raises(SystemExit, match="broken"):
        pool.submit(lambda: sys.exit("broken"), SMALL).future.result(PATIENCE)
    with pytest.raises(RuntimeError, match="StopIteration"):
        pool.submit(lambda: next(iter(())), SMALL).future.result(PATIENCE)
    assert pool.submit(lambda: "next", SMALL).future.result(PATIENCE) == "next"


def test_an_idle_thread_holds_no_result(pool: WorkerPool) -> None:
    result = weakref.ref(pool.submit(threading.Event, SMALL).future.result(PATIENCE))
    wait_for(lambda: result() is None)


def test_a_thread_that_cannot_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, start = WorkerPool(2), threading.Thread.start
    fails = iter([True, False, True, False])

    def starting(thread: threading.Thread) -> None:
        if next(fails):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        pool.submit(lambda: "lost", SMALL)
    for _ in range(3):
        assert pool.submit(lambda: "done", SMALL).future.result(PATIENCE) == "done"
    assert len(pool._threads) == 2
    pool.close()


def test_closing_ends_all_work_and_all_threads() -> None:
    pool, begun = WorkerPool(2), threading.Event()

    def endless() -> None:
        begun.set()
        while True:
            yield_to_smaller()

    running = pool.submit(endless, LARGE)
    assert begun.wait(PATIENCE)
    waiting = pool.submit(endless, LARGE)
    pool.close()
    assert running.future.done()
    with pytest.raises(WithdrawnError):
        running.future.result()
    assert waiting.future.cancelled()
    with pytest.raises(CancelledError):
        pool.submit(lambda: None, SMALL).future.result(PATIENCE)
    assert {thread.name for thread in pool._threads} == {"maxsimd-pool_0", "maxsimd-pool_1"}
    assert all(thread.daemon for thread in pool._threads), "a process that does not close its pool can end"
    assert not any(thread.is_alive() for thread in pool._threads)


class Clock:
    """Time that passes only where a test says so, and in naps, which are noted."""

    def __init__(self) -> None:
        self.now = 0.0
        self.naps: list[float | None] = []

    def perf_counter(self) -> float:
        return self.now

    def pool(self, has_enough: Callable[[], bool] | None) -> WorkerPool:
        class Condition(threading.Condition):
            def wait(condition, timeout: float | None = None) -> bool:
                self.naps.append(timeout)
                self.now += timeout or 0
                return True

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(threading, "Condition", Condition)
            return WorkerPool(1, *([] if has_enough is None else [has_enough]))


@pytest.mark.parametrize(
    ("size", "worked", "rested"),
    [
        (LARGE, [0.0005], []),
        (LARGE, [0.001], [0.004]),  # four times as long
        (LARGE, [0.0005, 0.0005], [0.004]),  # short work adds up
        (LARGE, [0.01, 0.0005, 0.002], [0.04, 0.01]),  # what was rested for does not
        (LARGE, [0.0125, 1.0], [0.05, 0.05]),  # but not for long
        (32_767, [0.01], []),
        (32_768, [0.01], [0.04]),
    ],
)
def test_large_work_rests_while_the_device_has_enough_to_do(
    monkeypatch: pytest.MonkeyPatch, size: int, worked: list[float], rested: list[float]
) -> None:
    clock = Clock()
    monkeypatch.setattr(workers, "time", clock)
    for has_enough, expected in ((lambda: True, rested), (lambda: False, []), (None, [])):
        clock.now, clock.naps = 0.0, []

        def work() -> None:
            for seconds in worked:
                clock.now += seconds
                yield_to_smaller()

        Work(clock.pool(has_enough), work, size, 1).run()
        assert clock.naps == pytest.approx(expected)


T = TypeVar("T")


def in_pool(function: Callable[[], T], threads: int = 2, has_enough: bool = False) -> T:
    with closing(WorkerPool(threads, lambda: has_enough)) as pool:
        return pool.submit(function, 1).future.result(600)


def test_results_and_the_first_error_come_in_order() -> None:
    call = lambda item: time.sleep((0.0, 0.004, 0.001)[item % 3]) or item  # noqa: E731
    assert in_pool(lambda: [*called_on_each(call, range(50))]) == [*range(50)]

    def failing(item: int) -> int:
        if item >= 3:
            raise ValueError(item)
        return item

    found = []

    def read() -> None:
        with closing(called_on_each(lambda item: item, range(1000))) as results:
            assert next(results) == 0, "a reader that stops frees the helper"
        with closing(called_on_each(failing, range(1000))) as results:
            for result in results:
                found.append(result)

    with pytest.raises(ValueError, match=r"^3$"):
        in_pool(read)
    assert (found, helpers()) == ([0, 1, 2], [])


@pytest.mark.parametrize(("threads", "has_enough", "calling"), [(2, False, 2), (1, False, 1), (2, True, 1)])
def test_a_helper_calls_while_the_device_lacks_work(threads: int, has_enough: bool, calling: int) -> None:
    together = threading.Barrier(calling)

    def call(item: int) -> int:
        together.wait(PATIENCE)
        return threading.get_ident()

    assert len(set(in_pool(lambda: [*called_on_each(call, range(2))], threads, has_enough))) == calling


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "maxsimd-pool-helper"]


def test_work_that_is_withdrawn_ends_in_both_threads() -> None:
    begun = threading.Event()

    def call(item: int) -> None:
        begun.set()
        while True:
            yield_to_smaller()
            time.sleep(0.001)

    with closing(WorkerPool(2)) as pool:
        work = pool.submit(lambda: [*called_on_each(call, range(2))], 1)
        assert begun.wait(600)
        work.withdraw()
        with pytest.raises(WithdrawnError):
            work.future.result(600)
    assert helpers() == []
