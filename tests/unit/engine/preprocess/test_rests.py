"""The pool's large work goes slowly while the device has enough to do, and small work never does."""

import threading
import time
from collections.abc import Callable

import pytest

from maxsimd.engine.preprocess import workers
from maxsimd.engine.preprocess.workers import Work, WorkerPool, yield_to_smaller

SMALL, LARGE = 10, 1_000_000
PATIENCE = 20


class Clock:
    """Time that passes only where a test says so, and in naps, which are noted."""

    def __init__(self) -> None:
        self.now = 0.0
        self.naps: list[float | None] = []

    def perf_counter(self) -> float:
        return self.now

    def pool(self, has_enough: Callable[[], bool] | None) -> WorkerPool:
        """A pool whose threads, of which none is started, would nap by this clock."""

        class Condition(threading.Condition):
            def wait(condition, timeout: float | None = None) -> bool:
                self.naps.append(timeout)
                self.now += timeout or 0
                return True

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(threading, "Condition", Condition)
            return WorkerPool(1, lambda: None, *([] if has_enough is None else [has_enough]))


@pytest.mark.parametrize(
    ("worked", "rested"),
    [
        ([0.0005], []),
        ([0.001], [0.004]),
        ([0.0005, 0.0005], [0.004]),  # short work adds up
        ([0.01, 0.0005, 0.002], [0.04, 0.01]),  # what was rested for does not
        ([0.0125, 1.0], [0.05, 0.05]),
    ],
)
def test_large_work_rests_four_times_as_long_as_it_worked(
    monkeypatch: pytest.MonkeyPatch, worked: list[float], rested: list[float]
) -> None:
    clock = Clock()
    monkeypatch.setattr(workers, "time", clock)
    for has_enough, expected in ((lambda: True, rested), (lambda: False, []), (None, [])):
        clock.now, clock.naps = 0.0, []
        pool = clock.pool(has_enough)

        def large() -> None:
            for seconds in worked:
                clock.now += seconds
                yield_to_smaller()

        Work(pool, large, LARGE, 1).run()
        assert clock.naps == pytest.approx(expected)


@pytest.mark.parametrize(("size", "rested"), [(32_767, []), (32_768, [0.04])])
def test_work_of_32_768_characters_is_large(
    monkeypatch: pytest.MonkeyPatch, size: int, rested: list[float]
) -> None:
    clock = Clock()
    monkeypatch.setattr(workers, "time", clock)

    def work() -> None:
        clock.now += 0.01
        yield_to_smaller()

    Work(clock.pool(lambda: True), work, size, 1).run()
    assert clock.naps == pytest.approx(rested)


def test_work_without_a_rest_rests_for_what_it_did_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(workers, "time", clock)
    answers = iter([False, True])
    pool = clock.pool(lambda: next(answers))

    def large() -> None:
        for seconds in (0.008, 0.002):
            clock.now += seconds
            yield_to_smaller()

    Work(pool, large, LARGE, 1).run()
    assert clock.naps == pytest.approx([0.008])


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
