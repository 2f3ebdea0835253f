"""Scores as they are ready: what `Engine.stream` gives."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeAlias

from maxsimd.engine.explanations import Explanation
from maxsimd.engine.requests import RankedDocument, ScoreResult
from maxsimd.engine.results.postprocess import aside
from maxsimd.engine.results.scores import ScoredPairs

# Called on the event loop with all that is there so far, whenever some of it is new.
Arrived: TypeAlias = Callable[[ScoredPairs], None]
# Explains those of the documents that have a score.
Why: TypeAlias = Callable[[ScoredPairs, Sequence[int]], Awaitable[Mapping[int, Explanation]]]

# What has come is looked through at most this often: it takes time with the number of documents.
_SECONDS_BETWEEN = 0.05


class ScoreStream:
    """The documents of one request as they are scored: each iteration gives those that are new, by their
    index. Use it as an async context manager; leaving it early cancels what is left. When the iteration has
    ended, `result` is there: what `Engine.score` would have returned. Errors are raised by the iteration."""

    def __init__(self, run: Callable[[Arrived], Coroutine[Any, Any, ScoredPairs]], why: Why) -> None:
        self._run = run
        self._why = why
        self._latest: ScoredPairs | None = None
        self._news = asyncio.Event()
        self._given: set[int] = set()
        self._looked = -math.inf
        self._task: asyncio.Task[ScoredPairs] | None = None
        self._result: ScoreResult | None = None

    @property
    def result(self) -> ScoreResult:
        """All scores. Raises RuntimeError while documents may still come."""
        if self._result is None:
            raise RuntimeError("the result is there when the iteration has ended")
        return self._result

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(self._arrived), name="maxsimd-stream")
        self._task.add_done_callback(lambda task: self._news.set())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        if not self._task.done():
            self._task.cancel()
            # What it fails with after that concerns nobody.
            with suppress(asyncio.CancelledError, Exception):
                await self._task
        elif not self._task.cancelled():
            self._task.exception()  # it has been raised, or nobody asked

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[RankedDocument]:
        if self._task is None:
            raise RuntimeError("use it as in: async with engine.stream(...) as stream")
        while self._result is None:
            await self._news.wait()
            rest = self._looked + _SECONDS_BETWEEN - time.monotonic()
            if rest > 0 and not self._task.done():
                await asyncio.wait({self._task}, timeout=rest)
            self._news.clear()
            self._looked = time.monotonic()
            if self._task.done():
                self._latest = self._task.result()
                self._result = await aside(self._latest.result, self._latest.work)
            if documents := await self._new_documents():
                return documents
        self._latest = None  # it holds all that was prepared
        raise StopAsyncIteration

    def _arrived(self, scored: ScoredPairs) -> None:
        self._latest = scored
        self._news.set()

    async def _new_documents(self) -> list[RankedDocument]:
        scored = self._latest
        if scored is None:
            return []
        scores = await aside(scored.scores, scored.work)
        new = [i for i, score in enumerate(scores) if not math.isnan(score) and i not in self._given]
        self._given.update(new)
        why = await self._why(scored, new)
        texts = scored.call.request.documents
        return [RankedDocument(i, scores[i], texts[i], why.get(i)) for i in new]
