"""Reads several pictures of a request at the same time, while the device has not enough to do."""

import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Generic, TypeVar

from maxsimd.engine.preprocess.workers import has_enough, start_helper

Item = TypeVar("Item")
T = TypeVar("T")

# Results that may wait to be read, give or take a few: their reader may stop because a request has too many.
_MOST_UNREAD = 8


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
        calls.forget_errors()


class _Calls(Generic[Item, T]):
    """Calls of a function that two threads share. Each takes the next when it has done one, until one
    fails."""

    def __init__(self, function: Callable[[Item], T], items: Sequence[Item]) -> None:
        self._function = function
        self._items = items
        self._results: dict[int, T | BaseException] = {}
        self._num_taken = 0
        self._num_read = 0
        self._is_stopped = False
        self._changed = threading.Condition()

    def run(self) -> None:
        """What the helper does, as long as the device has not enough to do."""
        while not has_enough() and self._may_go_on() and self._call_next():
            pass

    def results(self) -> Iterator[T]:
        for i in range(len(self._items)):
            while i not in self._results:
                if not self._call_next():
                    self._wait_for(i)
            result = self._results.pop(i)
            if isinstance(result, BaseException):
                raise result
            with self._changed:
                self._num_read = i + 1
                self._changed.notify()
            yield result

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def forget_errors(self) -> None:
        """Lets go of what is held by errors that nobody has read."""
        for result in self._results.values():
            if isinstance(result, BaseException):
                traceback.clear_frames(result.__traceback__)

    def _may_go_on(self) -> bool:
        """Waits until no more than some results are there that nobody has read."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_stopped or self._num_taken - self._num_read <= _MOST_UNREAD
            )
            return not self._is_stopped

    def _wait_for(self, i: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: i in self._results)

    def _call_next(self) -> bool:
        """Calls the function for the next item; says whether there was one."""
        with self._changed:
            i = self._num_taken
            if i == len(self._items) or self._is_stopped:
                return False
            self._num_taken += 1
        result = self._called(i)
        with self._changed:
            self._results[i] = result
            self._is_stopped |= isinstance(result, BaseException)
            self._changed.notify()
        return True

    def _called(self, i: int) -> T | BaseException:
        try:
            return self._function(self._items[i])
        except BaseException as error:
            return error
