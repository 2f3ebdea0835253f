"""The engine for scripts and notebooks: the same methods, blocking, with a progress bar on long lists."""

import atexit
import inspect
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sized
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

with warnings.catch_warnings():
    # Notebooks without ipywidgets get a bar of text.
    warnings.filterwarnings("ignore", "IProgress not found")
    from tqdm.auto import tqdm

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.thread import DeviceThread
from maxsimd.engine.engine import Engine, ScoreStream
from maxsimd.engine.errors import EngineNotReadyError, EngineRunningError
from maxsimd.engine.metrics import EngineStats
from maxsimd.engine.parameters import complete_docstring
from maxsimd.engine.requests import RankedDocument, Scored, ScoreOptions, ScoreResult
from maxsimd.engine.tenants import Tenant

P = ParamSpec("P")
T = TypeVar("T")

# Shorter lists are done before a progress bar could be read.
SHORTEST_WITH_BAR = 256
# Seconds for the last calls' results after an engine has stopped.
_RESULT_SECONDS = 60.0


class _LoopThread(DeviceThread):
    """An event loop on a thread of its own, which in the end cancels what still runs there."""

    @property
    def is_current(self) -> bool:
        return self._thread is threading.current_thread()

    def request_end(self) -> None:
        with suppress(RuntimeError):  # it is closed
            super().request_end()

    def _run(self) -> None:
        # When the interpreter ends, it may be too late to start the thread that ends the others.
        with suppress(RuntimeError):
            super()._run()


def _end_if_there(engine: "weakref.ref[SyncEngine]") -> None:
    if (there := engine()) is not None:
        there._end_at_exit()


async def _stop(engine: Engine, thread: _LoopThread) -> None:
    try:
        await engine.stop(grace=0)
    finally:
        thread.request_end()


def _join(stopped: "Future[None]", thread: _LoopThread, process: int | None) -> None:
    """Waits at exit: a thread inside torch may abort the process. A fork has no such thread."""
    if process == os.getpid():
        wait([stopped])
        thread.close()


def _blocking(
    method: Callable[Concatenate[Engine, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["SyncEngine", P], T]:
    """The same method, which waits for its result and shows a bar for long lists of documents or texts."""
    takes_progress = "progress" in inspect.signature(method).parameters

    @wraps(method)
    def call(self: "SyncEngine", /, *args: P.args, **options: P.kwargs) -> T:
        counted = options.get("documents", options.get("texts", args[-1] if args else None))
        total = 1 if isinstance(counted, str) or not isinstance(counted, Sized) else len(counted)
        own: Callable[..., Coroutine[Any, Any, T]] = getattr(self._engine, method.__name__)
        run = partial(own, *args, **options)
        shown = takes_progress and self._progress and "progress" not in options
        if not shown or total < SHORTEST_WITH_BAR:
            return self._wait(run())
        with tqdm(total=total, unit="text") as bar:

            def show(there: int, in_all: int) -> None:
                # Windows, equal texts and passes of many texts come to another number of values.
                bar.update(there * total // in_all - bar.n)

            result = self._wait(run(progress=show))
            if not getattr(result, "unscored", ()):  # without values, nothing has moved it
                bar.update(total - bar.n)
            return result

    return call


class SyncEngine:
    """`Engine` without async: every method blocks until its result is there.

    Use it as a context manager, or `start` it and `close` it in the end; it runs an event loop in a thread
    of its own. With `progress` a bar is shown for long lists, unless a call brings a `progress` of its own.
    Other arguments are those of `Engine`.

    All methods may be called from any thread, but not from a call's own `progress`. A forked process has to
    start an engine of its own, which may be one that was made, and not started, before the fork.
    """

    def __init__(
        self, config: EngineConfig | str | None = None, *, progress: bool = True, **options: Any
    ) -> None:
        """Takes a configuration, or a model's folder or hub id and the options of an `EngineConfig`. Without
        `progress` no bar is shown."""
        self._engine = Engine(config, **options)
        self._progress = progress
        # Process id of the last start.
        self._process: int | None = None
        self._thread: _LoopThread | None = None
        self._is_exiting = False
        # Held while it is started or closed, and while a call is handed to its thread.
        self._change, self._handover = threading.RLock(), threading.Lock()
        # Calls that are not done.
        self._futures: set[Future[Any]] = set()
        # The interpreter holds it until its own end.
        self._at_exit = partial(_end_if_there, weakref.ref(self))

    def __del__(self) -> None:
        """Frees an engine that was not closed, such as one whose cell of a notebook runs again."""
        thread = getattr(self, "_thread", None)  # the constructor may have failed
        if thread is not None and thread.is_alive and not self._is_forked:
            atexit.unregister(self._at_exit)
            atexit.register(_join, thread.run(_stop(self._engine, thread)), thread, self._process)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> Self:
        """Loads the model. Raises ModelLoadError, and EngineRunningError where it runs already. It can be
        started again after an error and after Ctrl-C."""
        self._check_caller()
        with self._change:
            if self._thread is not None:
                raise EngineRunningError("the engine is running; close it first")
            self._process = os.getpid()
            atexit.register(self._at_exit)
            try:
                self._thread = _LoopThread("sync")
                self._wait(self._engine.start())
            except BaseException:
                self._end_thread()
                raise
        return self

    def close(self) -> None:
        """Frees everything once all calls are done. May be called more than once, and from any thread. An
        open stream gets EngineNotReadyError from then on, but may be left as usual. In a process that was
        forked from the engine's, this does nothing."""
        if self._is_forked:
            return
        self._check_caller()
        with self._change:
            if self._thread is None:
                return
            try:
                self._wait(self._engine.stop())
                # Their values are there, but their results may not be made yet.
                wait(self._futures.copy(), _RESULT_SECONDS)
            finally:
                self._end_thread()

    def _end_at_exit(self) -> None:
        """Ends the threads of an engine that nobody closed. A thread inside torch may abort the process while
        the interpreter goes away."""
        if self._is_forked or self._thread is None:
            return
        self._is_exiting = True
        with suppress(Exception):
            self._wait(self._engine.stop(grace=0))
        self._end_thread()

    def _end_thread(self) -> None:
        """Ends the event loop with what still runs there. Calls get EngineNotReadyError from now on."""
        atexit.unregister(self._at_exit)
        with self._handover:
            thread, self._thread, self._process = self._thread, None, None
        if thread is not None:
            thread.close()

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def model(self) -> LoadedModel:
        """The loaded model's description."""
        return self._engine.model

    @property
    def max_tokens(self) -> int:
        """The longest sequence that can be run, special tokens included."""
        return self._engine.max_tokens

    def stats(self) -> EngineStats:
        """The engine's queue, queries and caches."""
        return self._engine.stats()

    def clear_cache(self) -> None:
        """Clears the cache, on disk as well."""
        self._wait(self._engine.clear_cache())

    score = _blocking(Engine.score)
    rerank = _blocking(Engine.rerank)
    add_documents = _blocking(Engine.add_documents)
    encode_query = _blocking(Engine.encode_query)
    embed = _blocking(Engine.embed)
    embed_tokens = _blocking(Engine.embed_tokens)
    embed_sparse = _blocking(Engine.embed_sparse)
    classify = _blocking(Engine.classify)
    label_scores = _blocking(Engine.label_scores)
    token_classify = _blocking(Engine.token_classify)
    tokenize = _blocking(Engine.tokenize)

    @wraps(Engine.stream, assigned=())
    def stream(self, queries: Scored, documents: Scored, **options: Unpack[ScoreOptions]) -> "SyncStream":
        """Scores documents as `score` does, and yields them as they are ready::

            with engine.stream(query, documents) as stream:
                for new in stream:  # RankedDocuments, by their index
                    ...
            stream.result  # what `score` would have returned

        Leaving it early cancels the rest."""
        return SyncStream(lambda: self._engine.stream(queries, documents, **options), self._wait)

    @wraps(Engine.set_tenants)
    def set_tenants(self, tenants: Mapping[str, Tenant]) -> None:
        async def set_them() -> None:
            self._engine.set_tenants(tenants)

        with self._handover:
            if self._thread is None:  # not started yet, or closed
                self._engine.set_tenants(tenants)
                return
        self._wait(set_them())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            future = self._hand_over(work)
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise
        except CancelledError:
            raise EngineNotReadyError("the engine was closed before this call was done") from None
        finally:
            if self._is_exiting and threading.current_thread().daemon:
                # The interpreter goes away. It aborts if a thread is printing an error by then.
                threading.Event().wait()

    def _hand_over(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        self._check_caller()
        with self._handover:
            if self._thread is None or not self._thread.is_alive:
                raise EngineNotReadyError(
                    "the engine is not running; use it as in: with SyncEngine() as engine, or call start()"
                )
            future = self._thread.run(work)
            self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    @property
    def _is_forked(self) -> bool:
        """Whether it was started in another process, which this one was forked from."""
        return self._process not in (None, os.getpid())

    def _check_caller(self) -> None:
        """Raises EngineNotReadyError where no answer would ever come."""
        if self._is_forked:
            raise EngineNotReadyError(
                "the engine was started in the process that this one was forked from; start one in each, and "
                'have processes started anew: multiprocessing.set_start_method("spawn")'
            )
        if self._thread is not None and self._thread.is_current:
            raise EngineNotReadyError(
                "a call from `progress` would wait for itself, since `progress` runs on the engine's thread; "
                "return from it first and call the engine once this call is done, or use Engine"
            )


complete_docstring(SyncEngine.stream)


class SyncStream:
    """`ScoreStream` without async."""

    def __init__(
        self, stream: Callable[[], ScoreStream], wait: Callable[[Coroutine[Any, Any, T]], T]
    ) -> None:
        self._make = stream
        self._wait: Callable[[Coroutine[Any, Any, Any]], Any] = wait
        self._stream: ScoreStream | None = None

    def __enter__(self) -> Self:
        async def enter() -> ScoreStream:
            # An event loop must be running where it is made.
            return await self._make().__aenter__()

        self._stream = self._wait(enter())
        return self

    def __exit__(self, *error: object) -> None:
        assert self._stream is not None
        with suppress(EngineNotReadyError):  # the engine was closed, which has ended the stream
            self._wait(self._stream.__aexit__(*error))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[RankedDocument]:
        new: list[RankedDocument] | None = self._wait(self._next())
        if new is None:
            raise StopIteration
        return new

    async def _next(self) -> list[RankedDocument] | None:
        """None at the end: an error that ends an iteration cannot leave a coroutine."""
        assert self._stream is not None
        async for new in self._stream:
            return new
        return None

    @property
    def result(self) -> ScoreResult:
        """All scores, when the iteration has ended."""
        assert self._stream is not None
        return self._stream.result
