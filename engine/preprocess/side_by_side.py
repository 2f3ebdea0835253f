"""Reads several pictures of a request at the same time, while the device has nothing to do until they are."""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Generic, TypeVar

from maxsimd.engine.preprocess.workers import start_helper

Item = TypeVar("Item")
T = TypeVar("T")


def called_on_each(function: Callable[[Item], T], items: Sequence[Item]) -> Generator[T]:
    """The results of a function for each item, in their order. A helper of this thread calls it for some of
    them, if there may be one. Raises what the function raises, where its result would come."""
    calls = _Calls(function, items)
    helper = start_helper(calls.run) if len(items) > 1 else None
    if helper is None:
        yield from map(function, items)
        return
    try:
        yield from calls.results()
    finally:
        calls.stop()
        helper.join()


class _Calls(Generic[Item, T]):
    """Calls of a function that two threads share. Each takes the next when it has done one."""

    def __init__(self, function: Callable[[Item], T], items: Sequence[Item]) -> None:
        self._function = function
        self._items = items
        self._results: dict[int, T | BaseException] = {}
        self._num_taken = 0
        self._is_stopped = False
        self._changed = threading.Condition()

    def run(self) -> None:
        """Calls the function as long as anything is left, or until one of its results is an error."""
        while not self._is_stopped and self._call_next():
            pass

    def results(self) -> Iterator[T]:
        for i in range(len(self._items)):
            while i not in self._results:
                if not self._call_next():
                    self._wait_for(i)
            result = self._results.pop(i)
            if isinstance(result, BaseException):
                raise result
            yield result

    def _wait_for(self, i: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: i in self._results)

    def stop(self) -> None:
        self._is_stopped = True

    def _call_next(self) -> bool:
        """Calls the function for the next item; says whether there was one."""
        with self._changed:
            i = self._num_taken
            if i == len(self._items):
                return False
            self._num_taken += 1
        try:
            result: T | BaseException = self._function(self._items[i])
        except BaseException as error:
            result = error
        with self._changed:
            self._results[i] = result
            self._changed.notify()
        return True
