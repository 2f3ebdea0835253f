"""An engine for rows that come in batches, from several threads at a time: each row is a request of its own,
so that one that fails leaves the others alone."""

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from maxsimd.api.cluster.rows import RowScores, ScoreRow
from maxsimd.api.process import waiting_threads_sleep
from maxsimd.engine import (
    EngineConfig,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    RequestTimeoutError,
    RequestTooLargeError,
)
from maxsimd.engine.config import ScoreType

T = TypeVar("T")

# An embedding, float32 [dim] or [tokens, dim], or why there is none, and the text's tokens.
Embedded: TypeAlias = tuple[NDArray[np.float32] | None, str | None, int]

# What is wrong with one row alone.
ROW_ERRORS = (InvalidRequestError, RequestFailedError, RequestTimeoutError, RequestTooLargeError)
# Rows are given to the engine while those that it has are of fewer characters than this; each text counts as
# some more. That fills many steps, and stays far below what the engine would refuse.
_CHARACTERS, _TEXT = 2_000_000, 64
# With this status a process of Ray ends whose engine has died.
_DEAD = 70


class RowEngine:
    """Owns an engine and the thread of its event loop. Its methods block, and may be called from any thread:
    the rows of several calls fill steps together."""

    def __init__(self, config: EngineConfig) -> None:
        """Loads the model. Raises ModelLoadError."""
        waiting_threads_sleep()
        import uvloop

        from maxsimd.engine import Engine

        self._engine = Engine(config)
        self._loop = uvloop.new_event_loop()
        self._room = _Room(_CHARACTERS)
        self._thread = threading.Thread(target=self._loop.run_forever, name="maxsimd-rows", daemon=True)
        self._thread.start()
        self._wait(self._engine.start())

    def close(self) -> None:
        """Frees everything. To be called once."""
        self._wait(self._engine.stop(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def check(self, method: str, options: dict[str, Any]) -> None:
        """Tries the options of `score`, `embed` or `embed_tokens`. Raises InvalidRequestError for those that
        the model does not take, so that not every row has the same error."""
        texts = ("query", "document") if method == "score" else ("text",)
        self._wait(getattr(self._engine, method)(*texts, **options))

    def score(self, rows: Sequence[ScoreRow], options: dict[str, Any]) -> list[RowScores]:
        """One result a row, in their order, with the `options` of `Engine.score`. Raises EngineDeadError,
        except in an actor of Ray, which it ends: Ray then starts another one."""
        with _leaving_when_dead():
            return self._wait(_gather(self._score(row, options) for row in rows))

    def embed(self, texts: Sequence[Any], method: str, options: dict[str, Any]) -> list[Embedded]:
        """One result a text, by `Engine.embed` or `embed_tokens`, in their order. Raises as `score` does."""
        with _leaving_when_dead():
            return self._wait(_gather(self._embed(text, method, options) for text in texts))

    async def _score(self, row: ScoreRow, options: dict[str, Any]) -> RowScores:
        if (refusal := row.refusal) is not None:
            return RowScores.refused(row, refusal)
        texts, errors = row.texts, row.not_texts
        if not texts:
            return RowScores.of(row, {}, errors, 0)
        indexes = list(texts)
        # A listwise model scores documents by each other: of these it has all or none.
        is_listwise = self._engine.model.score_type is ScoreType.LISTWISE
        reported: dict[str, Any] = {} if is_listwise else {"on_error": "report"}

        async def ask() -> Any:
            given = list(texts.values())
            return await self._engine.score(row.query, given, priority="batch", **reported, **options)

        size = len(row.query) + sum(map(len, texts.values())) + _TEXT * len(texts)
        try:
            result = await self._admitted(size, ask)
        except ROW_ERRORS as error:
            return RowScores.refused(row, str(error))
        errors |= {indexes[i]: reason for i, reason in result.errors.items()}
        scores = {indexes[i]: score for i, score in enumerate(result.scores) if i not in result.errors}
        return RowScores.of(row, scores, errors, result.usage.prompt_tokens)

    async def _embed(self, text: Any, method: str, options: dict[str, Any]) -> Embedded:
        if not isinstance(text, str):
            return None, f"text is no text but {type(text).__name__}", 0

        async def ask() -> Any:
            return await getattr(self._engine, method)([text], priority="batch", **options)

        try:
            result = await self._admitted(len(text) + _TEXT, ask)
        except ROW_ERRORS as error:
            return None, str(error), 0
        return result.embeddings[0], None, result.usage.prompt_tokens

    async def _admitted(self, size: int, ask: Callable[[], Awaitable[T]]) -> T:
        """Asks the engine once there is room for `size` characters, and again for as long as it is full."""
        await self._room.enter(size)
        try:
            while True:
                try:
                    return await ask()
                except QueueFullError as error:
                    await asyncio.sleep(error.retry_after)
        finally:
            self._room.leave(size)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class _Room:
    """Lets in, first come first served, while those inside have fewer characters than the room; the last one
    may be of any size. Used on one event loop."""

    def __init__(self, characters: int) -> None:
        self._free = characters
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def enter(self, characters: int) -> None:
        if not self._waiting and self._free > 0:
            self._free -= characters
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, characters))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.leave(characters)
            raise

    def leave(self, characters: int) -> None:
        self._free += characters
        while self._waiting and self._free > 0:
            turn, waiting = self._waiting.popleft()
            if not turn.done():
                self._free -= waiting
                turn.set_result(None)


async def _gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in their order; where one raises, the others are cancelled."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in work]
    return [task.result() for task in tasks]


@contextmanager
def _leaving_when_dead() -> Iterator[None]:
    """Ends the process of an actor whose engine has died, since a device that has failed cannot be used again
    in it. Anywhere else the error is raised."""
    try:
        yield
    except ExceptionGroup as errors:
        dead = errors.subgroup(EngineDeadError)
        error = (dead or errors).exceptions[0]
        if dead and _is_actor():
            print(f"maxsimd: {error}; the actor ends", file=sys.stderr, flush=True)
            os._exit(_DEAD)
        raise error from None


def _is_actor() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
