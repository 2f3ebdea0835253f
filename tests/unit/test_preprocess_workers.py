"""The pool's threads: small work goes first, also between the parts of large work."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from maxsimd.engine.preprocess import workers
from maxsimd.engine.preprocess.workers import WithdrawnError, Work, WorkerPool, yield_to_smaller

SMALL, LARGE = 10, 1_000_000
PATIENCE = 20


class Blocked:
    """Work that has begun and goes on when it is told to, with `then` if it is given."""

    def __init__(self, pool: WorkerPool, size: int, then: Callable[[], Any] = lambda: None) -> None:
        self.go_on = threading.Event()
        self._begun = threading.Event()
        self._then = then
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
    """A pool of one thread."""
    pool = WorkerPool(1, lambda: None)
    yield pool
    pool.close()


def in_order(pool: WorkerPool, sizes: list[int]) -> list[int]:
    """The numbers of works of these sizes in the order in which one thread does them."""
    done: list[int] = []
    first = Blocked(pool, SMALL).wait_until_begun()
    works = [pool.submit(lambda i=i: done.append(i), size) for i, size in enumerate(sizes)]
    first.go_on.set()
    for work in works:
        work.future.result(PATIENCE)
    return done


def test_small_work_goes_first_and_works_of_a_size_in_order(pool: WorkerPool) -> None:
    assert in_order(pool, [LARGE, SMALL, 1000, SMALL])[:3] == [1, 3, 0]


def test_every_fourth_work_is_the_oldest(pool: WorkerPool) -> None:
    assert in_order(pool, [LARGE, *[SMALL] * 10, 1000]) == [1, 2, 0, 3, 4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("size", "passes"), [(SMALL, True), (LARGE // 8, True), (LARGE, False), (4 * LARGE, False)]
)
def test_only_smaller_work_runs_within_large_work(pool: WorkerPool, size: int, passes: bool) -> None:
    events: list[str] = []

    def large() -> str:
        yield_to_smaller()
        events.append("large")
        return "result"

    blocked = Blocked(pool, LARGE, large).wait_until_begun()
    other = pool.submit(lambda: events.append("other"), size)
    blocked.go_on.set()
    assert blocked.work.future.result(PATIENCE) == "result"
    other.future.result(PATIENCE)
    assert events == (["other", "large"] if passes else ["large", "other"])


def test_one_smaller_work_runs_each_time(pool: WorkerPool) -> None:
    events: list[str] = []

    def large() -> None:
        for _ in range(3):
            yield_to_smaller()
            events.append("large")

    blocked = Blocked(pool, LARGE, large).wait_until_begun()
    for name in ("a", "b"):
        pool.submit(lambda name=name: events.append(name), SMALL)
    blocked.go_on.set()
    blocked.work.future.result(PATIENCE)
    assert events == ["a", "large", "b", "large", "large"]


def test_all_threads_but_one_do_large_work() -> None:
    pool = WorkerPool(2, lambda: None)
    first = Blocked(pool, LARGE).wait_until_begun()
    second = Blocked(pool, LARGE)
    for _ in range(5):
        assert pool.submit(lambda: "small", SMALL).future.result(PATIENCE) == "small"
    assert not second.work.future.running()
    first.go_on.set()
    second.wait_until_begun().go_on.set()
    second.work.future.result(PATIENCE)
    pool.close()


def test_withdrawn_work_is_not_begun(pool: WorkerPool) -> None:
    begun = []
    first = Blocked(pool, SMALL).wait_until_begun()
    work = pool.submit(lambda: begun.append(True), SMALL)
    work.withdraw()
    first.go_on.set()
    assert pool.submit(lambda: "next", SMALL).future.result(PATIENCE) == "next"
    assert not begun
    assert work.future.cancelled()


def test_withdrawn_work_ends_where_it_yields_and_no_other_does(pool: WorkerPool) -> None:
    went_on = []

    def large() -> None:
        yield_to_smaller()  # to the small work, which withdraws this one
        yield_to_smaller()
        went_on.append("large")

    def small() -> None:
        blocked.work.withdraw()
        yield_to_smaller()
        went_on.append("small")

    blocked = Blocked(pool, LARGE, large).wait_until_begun()
    work = pool.submit(small, SMALL)
    blocked.go_on.set()
    with pytest.raises(WithdrawnError):
        blocked.work.future.result(PATIENCE)
    work.future.result(PATIENCE)
    assert went_on == ["small"]


def test_what_work_raises_is_its_result_and_harms_no_other(pool: WorkerPool) -> None:
    def broken() -> None:
        raise SystemExit("broken")

    with pytest.raises(SystemExit, match="broken"):
        pool.submit(broken, SMALL).future.result(PATIENCE)
    assert pool.submit(lambda: "next", SMALL).future.result(PATIENCE) == "next"


def test_outside_of_a_pool_nobody_yields() -> None:
    yield_to_smaller()


def test_closing_ends_all_work_and_all_threads() -> None:
    started = []
    pool = WorkerPool(2, lambda: started.append(threading.current_thread()))
    begun = threading.Event()

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
    assert len(started) == 2
    assert not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize("has_enough", [True, False])
def test_large_work_rests_while_the_device_has_enough_to_do(
    monkeypatch: pytest.MonkeyPatch, has_enough: bool
) -> None:
    monkeypatch.setattr(workers, "_REST", 1e9)
    monkeypatch.setattr(workers, "_LONGEST_NAP", 1e6)
    pool = WorkerPool(1, lambda: None, lambda: has_enough)
    worked = threading.Event()

    def large() -> str:
        time.sleep(0.01)
        worked.set()
        yield_to_smaller()
        return "went on"

    work = pool.submit(large, LARGE)
    assert worked.wait(PATIENCE)
    if has_enough:
        with pytest.raises(TimeoutError):
            work.future.result(0.2)
        while not work.future.done():  # until one comes after the rest has begun
            pool.submit(lambda: None, SMALL)
            time.sleep(0.01)
    assert work.future.result(PATIENCE) == "went on"
    pool.close()


def test_small_work_does_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_REST", 1e9)
    monkeypatch.setattr(workers, "_LONGEST_NAP", 1e6)
    pool = WorkerPool(1, lambda: None, lambda: True)

    def small() -> str:
        time.sleep(0.01)
        yield_to_smaller()
        return "went on"

    assert pool.submit(small, SMALL).future.result(PATIENCE) == "went on"
    pool.close()
