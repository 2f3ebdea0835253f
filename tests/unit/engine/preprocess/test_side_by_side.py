"""Calls that a thread of the pool shares with a helper: in order, with errors, and ended early."""

import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine.preprocess.side_by_side import called_on_each
from maxsimd.engine.preprocess.workers import WithdrawnError, WorkerPool, yield_to_smaller

T = TypeVar("T")


def in_pool(function: Callable[[], T], threads: int = 2, has_enough: bool = False) -> T:
    pool = WorkerPool(threads, lambda: None, lambda: has_enough)
    try:
        return pool.submit(function, 1).future.result(60)
    finally:
        pool.close()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.004]), max_size=20))
def test_results_come_in_order_however_long_each_takes(seconds: list[float]) -> None:
    def call(item: tuple[int, float]) -> int:
        time.sleep(item[1])
        return item[0]

    found = in_pool(lambda: [*called_on_each(call, [*enumerate(seconds)])])
    assert found == [*range(len(seconds))]


def threads_of(threads: int, has_enough: bool) -> int:
    """How many threads call, where each waits for another that calls at the same time, but not for ever."""
    together = threading.Barrier(2)

    def call(item: int) -> int:
        with suppress(threading.BrokenBarrierError):
            together.wait(0.5)
        return threading.get_ident()

    return len(set(in_pool(lambda: [*called_on_each(call, range(2))], threads, has_enough)))


def test_a_helper_calls_while_the_device_lacks_work() -> None:
    assert threads_of(2, has_enough=False) == 2
    assert threads_of(1, has_enough=False) == 1
    assert threads_of(2, has_enough=True) == 1


def test_outside_of_a_pool_one_thread_calls() -> None:
    assert set(called_on_each(lambda item: threading.get_ident(), range(5))) == {threading.get_ident()}


def test_the_first_error_is_raised_in_order_and_ends_the_rest() -> None:
    called = []

    def call(item: int) -> int:
        called.append(item)
        if item >= 3:
            raise ValueError(item)
        return item

    found = []

    def read() -> None:
        with closing(called_on_each(call, range(1000))) as results:
            for result in results:
                found.append(result)

    with pytest.raises(ValueError, match=r"^3$"):
        in_pool(read)
    assert found == [0, 1, 2]
    alive = [thread.name for thread in threading.enumerate() if thread.name == "maxsimd-pool-helper"]
    assert alive == []


def test_a_reader_that_stops_ends_and_frees_the_helper() -> None:
    def read() -> tuple[int, int]:
        with closing(called_on_each(lambda item: item, range(1000))) as results:
            first = next(results)
        return first, len({*called_on_each(lambda item: item, range(10))})

    assert in_pool(read) == (0, 10)


def test_work_that_is_withdrawn_ends_in_both_threads() -> None:
    begun = threading.Event()

    def call(item: int) -> None:
        begun.set()
        while True:
            yield_to_smaller()
            time.sleep(0.001)

    pool = WorkerPool(2, lambda: None)
    work = pool.submit(lambda: [*called_on_each(call, range(2))], 1)
    assert begun.wait(60)
    work.withdraw()
    with pytest.raises(WithdrawnError):
        work.future.result(60)
    pool.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "maxsimd-pool-helper"]
