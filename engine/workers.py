"""The threads for work that blocks: preparing requests, reading large bodies, writing large answers.

Small work goes first. Large work calls `yield_to_smaller` as it goes along. While the device has enough to
do, large work goes slowly, because it takes processor time and Python's lock from the device's threads.
"""

import asyncio
import ctypes
import os
import platform
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

from maxsimd.engine.at_exit import close_at_exit, note_closed

Item = TypeVar("Item")
T = TypeVar("T")
P = ParamSpec("P")

# Every fourth piece of work is the one that has waited longest, so that large work is not starved.
_OLDEST_EVERY = 4
# Work from these classes on is large (32,768 characters) and huge (524,288).
_LARGE, _HUGE = 8, 10
# While the device has enough to do, large work rests this many times as long as it has worked, at most 0.05 s
# at a time.
_REST, _LONGEST_NAP = 4, 0.05
# About this many results may wait to be read: their reader may stop because a request has too many.
_MOST_UNREAD = 8
# Results of more values would keep the event loop busy for milliseconds.
_MANY_VALUES = 500


class WithdrawnError(Exception):
    """Raised in work by `yield_to_smaller` when nobody waits for its result any more."""


class Work(Generic[T]):
    """A function for a pool's threads, and the `future` of its result. Each `size_class` covers sizes up to
    four times those of the class before."""

    def __init__(self, pool: "WorkerPool", function: Callable[[], T], size: int, number: int) -> None:
        self.pool = pool
        self.function = function
        self.size_class = size.bit_length() // 2
        self.is_huge = self.size_class >= _HUGE
        self.number = number
        self.future: Future[T] = Future()
        self.is_withdrawn = False

    def withdraw(self) -> None:
        """Cancels the work: it does not start, or ends when it next yields."""
        self.is_withdrawn = True
        self.future.cancel()

    def run(self) -> None:
        """Calls the function on this thread, unless it was withdrawn."""
        if not self.future.set_running_or_notify_cancel():
            return
        outer = _running.work, _running.resumed
        _running.work, _running.resumed = self, time.perf_counter()
        try:
            _call(self.function, self.future)
        finally:
            _running.work, _running.resumed = outer


def _call(function: Callable[[], T], future: Future[T]) -> None:
    """Puts a function's result or error into the future. An error's frames hold what the function has read,
    perhaps a large request body, so they are cleared here rather than by the garbage collector."""
    try:
        future.set_result(_without_stop(function))
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        future.set_exception(error)
    finally:
        del function, future


def _without_stop(function: Callable[[], T]) -> T:
    """Calls a function. StopIteration becomes RuntimeError: whoever awaits a thread with it never wakes."""
    try:
        return function()
    except StopIteration as error:
        raise RuntimeError("a thread's function raised StopIteration") from error


class _Running(threading.local):
    """The work of this thread, None outside of pools, and when it started or last resumed (perf_counter)."""

    work: Work[Any] | None = None
    resumed = 0.0


_running = _Running()


def yield_to_smaller() -> None:
    """Runs one piece of smaller waiting work on this thread. Work calls it about every millisecond. Raises
    WithdrawnError once nobody waits for the result. Does nothing outside of a pool's threads."""
    work = _running.work
    if work is None:
        return
    if work.is_withdrawn:
        raise WithdrawnError
    work.pool.run_smaller(work.size_class)
    if work.size_class >= _LARGE:
        work.pool.rest()


async def run_in_thread_if_large(
    num_values: int, function: Callable[P, T], *args: P.args, **options: P.kwargs
) -> T:
    """Calls a function, in a thread if its result has many values. It needs no engine."""
    if num_values > _MANY_VALUES:
        return await asyncio.to_thread(_without_stop, partial(function, *args, **options))
    return function(*args, **options)


class WorkerPool:
    """A pool of threads, which start when work comes. At most all but one do huge work at once, or the only
    one. `has_enough` says whether the device has enough to do."""

    def __init__(self, threads: int, has_enough: Callable[[], bool] = lambda: False) -> None:
        self.has_enough = has_enough
        self._num_threads = threads
        self._helpers = threading.Semaphore(threads - 1)
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._waiting: dict[int, deque[Work[Any]]] = {}
        self._at_work: set[Work[Any]] = set()
        self._num_submitted = 0
        self._num_taken = 0
        self._num_huge = 0
        self._is_closed = False
        close_at_exit(self)

    def submit(self, function: Callable[[], T], size: int) -> Work[T]:
        """Queues a function before larger work. `size` is the approximate number of characters that it reads
        or writes. In a closed pool the future is cancelled at once. Raises RuntimeError if the pool has no
        thread and the system has none to give."""
        with self._changed:
            self._num_submitted += 1
            work = Work(self, function, size, self._num_submitted)
            if self._is_closed:
                work.withdraw()
                return work
            if len(self._threads) < self._num_threads:
                self._start_thread()
            self._waiting.setdefault(work.size_class, deque()).append(work)
            # All: resting and idle threads wait for the same condition.
            self._changed.notify_all()
        return work

    def _start_thread(self) -> None:
        name = f"maxsimd-pool_{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread to give; the next work tries again
            if not self._threads:
                raise
            return
        self._threads.append(thread)

    def run_smaller(self, size_class: int) -> None:
        """Runs one piece of waiting work of a lower class, if there is one."""
        if not self._waiting:
            return
        with self._changed:
            smaller = [each for each in self._waiting if each < size_class]
            work = self._take(min(smaller)) if smaller else None
        if work is not None:
            self._run(work)

    def rest(self) -> None:
        """Pauses large work, for a while or until other work comes, if the device has enough to do."""
        worked = time.perf_counter() - _running.resumed
        if worked < 0.001:
            return
        if self.has_enough():
            with self._changed:
                self._changed.wait(min(_REST * worked, _LONGEST_NAP))
        _running.resumed = time.perf_counter()

    def start_helper(self, work: Work[Any], function: Callable[[], object]) -> threading.Thread | None:
        """A new thread that calls a function as part of some work, if one more is allowed."""
        if self.has_enough() or not self._helpers.acquire(blocking=False):
            return None

        def help_with() -> None:
            _running.work, _running.resumed = work, time.perf_counter()
            try:
                function()
            finally:
                self._helpers.release()

        thread = threading.Thread(target=help_with, name="maxsimd-pool-helper", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread to give
            self._helpers.release()
            return None
        return thread

    def close(self, seconds: float | None = None) -> None:
        """Cancels waiting work, withdraws running work, and waits for each thread, for at most `seconds`."""
        note_closed(self)
        with self._changed:
            self._is_closed = True
            stopped = [*self._at_work, *(work for queue in self._waiting.values() for work in queue)]
            self._waiting.clear()
            self._changed.notify_all()
        for work in stopped:
            work.withdraw()
        for thread in self._threads:
            thread.join(seconds)

    def _work(self) -> None:
        take_short_slices()
        while (work := self._next()) is not None:
            self._run(work)
            del work  # its result may be large, and the next work may come late

    def _run(self, work: Work[Any]) -> None:
        try:
            work.run()
        finally:
            with self._changed:
                self._at_work.discard(work)
                if work.is_huge:
                    self._num_huge -= 1
                    self._changed.notify_all()

    def _next(self) -> Work[Any] | None:
        """Waits for the next work; None once the pool is closed."""
        with self._changed:
            while not self._is_closed:
                may_be_huge = self._num_huge < max(1, self._num_threads - 1)
                classes = [each for each in self._waiting if may_be_huge or each < _HUGE]
                if not classes:
                    self._changed.wait()
                    continue
                self._num_taken += 1
                if self._num_taken % _OLDEST_EVERY:
                    return self._take(min(classes))
                return self._take(min(classes, key=lambda each: self._waiting[each][0].number))
            return None

    def _take(self, size_class: int) -> Work[Any]:
        queue = self._waiting[size_class]
        work = queue.popleft()
        if not queue:
            del self._waiting[size_class]
        self._at_work.add(work)
        self._num_huge += work.is_huge
        return work


def called_on_each(function: Callable[[Item], T], items: Sequence[Item]) -> Generator[T]:
    """The results of a function for each item, in order. A helper thread calls it for some items, if allowed.
    An error is raised in place of its result."""
    work, helper = _running.work, None
    if work is not None and len(items) > 1:
        calls = _SharedCalls(function, items, work.pool.has_enough)
        helper = work.pool.start_helper(work, calls.help)
    if helper is None:
        yield from map(function, items)
        return
    try:
        yield from calls.results()
    finally:
        calls.stop(helper)


class _SharedCalls(Generic[Item, T]):
    """Calls of a function by two threads, which take one item after the other, until a call fails."""

    def __init__(
        self, function: Callable[[Item], T], items: Sequence[Item], has_enough: Callable[[], bool]
    ) -> None:
        self._function = function
        self._items = items
        self._has_enough = has_enough
        self._results: dict[int, T | BaseException] = {}
        self._num_taken = 0
        self._num_read = 0
        self._is_stopped = False
        self._changed = threading.Condition()

    def help(self) -> None:
        """Calls the function while the device does not have enough to do and few results are unread."""
        while not self._has_enough():
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_stopped or self._num_taken - self._num_read <= _MOST_UNREAD
                )
            if not self._call_next():
                return

    def results(self) -> Iterator[T]:
        for i in range(len(self._items)):
            while i not in self._results and self._call_next():
                pass
            with self._changed:
                self._changed.wait_for(partial(self._results.__contains__, i))
                result = self._results.pop(i)
                self._num_read = i + 1
                self._changed.notify()
            if isinstance(result, BaseException):
                raise result
            yield result

    def stop(self, helper: threading.Thread) -> None:
        """Waits for the helper's last call, and clears the frames of errors that nobody has read."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        helper.join()
        for result in self._results.values():
            if isinstance(result, BaseException):
                traceback.clear_frames(result.__traceback__)

    def _call_next(self) -> bool:
        """Calls the function for the next item. Returns whether there was one."""
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


# The numbers of the system calls sched_setattr and sched_getattr, and their structure: size, policy, flags,
# niceness, priority, then a runtime, a deadline and a period in nanoseconds, and two clamps (man 2
# sched_setattr).
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")
_POLICY, _RUNTIME = 1, 5
_NANOSECONDS = 100_000


def take_short_slices() -> bool:
    """Asks for short time slices for the calling thread and those that it starts later. Returns whether that
    worked.

    The event loop needs the core for a moment, but at once. From Linux 6.12 on, a thread that wakes up then
    does not wait for another's long slice, and goes before processes with longer slices. Older kernels change
    nothing. The share of the cores stays the same, which a higher niceness of busy threads would halve."""
    calls = _CALLS.get(platform.machine())
    if sys.platform != "linux" or calls is None:
        return False
    set_attributes, get_attributes = calls
    call = ctypes.CDLL(None).syscall
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if call(get_attributes, 0, buffer, _ATTRIBUTES.size, 0):
        return False
    attributes = list(_ATTRIBUTES.unpack(buffer.raw))
    if attributes[_POLICY] != os.SCHED_OTHER:  # another policy has slices of its own
        return False
    attributes[_RUNTIME] = _NANOSECONDS
    return not call(set_attributes, 0, _ATTRIBUTES.pack(*attributes), 0)


def give_back_memory() -> None:
    """Returns the C library's free memory to the system (glibc only). Takes milliseconds, without the GIL."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
