"""Scores as the engines of a fleet have them."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from maxsimd.api.fleet.scoring import NewScores, ScoreJob
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.requests import RankedDocument, ScoreResult


class FleetStream:
    """What `ScoreStream` is for an engine in this process: used as an async context manager, each iteration
    gives the documents that are new, and `result` is there at the end. A document that was scored again,
    because an engine died, is given once."""

    def __init__(
        self, prepare: Callable[[], ScoreJob], run: Callable[[ScoreJob, NewScores], Awaitable[ScoreResult]]
    ) -> None:
        self._prepare = prepare
        self._run = run
        self._new: list[RankedDocument] = []
        self._given: set[int] = set()
        self._news = asyncio.Event()
        self._scored: ScoreJob | None = None
        self._task: asyncio.Task[ScoreResult] | None = None
        self._result: ScoreResult | None = None

    @property
    def result(self) -> ScoreResult:
        """All scores. Raises RuntimeError while documents may still come."""
        if self._result is None:
            raise RuntimeError("the result is there when the iteration has ended")
        return self._result

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._all(), name="maxsimd-stream")
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
        assert self._task is not None
        while self._result is None:
            if self._task.done():
                result = self._task.result()
                self._arrived(*_left(result, self._given))
                self._result = result
            else:
                await self._news.wait()
                self._news.clear()
            if self._new:
                new, self._new = self._new, []
                return new
        raise StopAsyncIteration

    async def _all(self) -> ScoreResult:
        self._scored = self._prepare()
        return await self._run(self._scored, self._arrived)

    def _arrived(self, indices: list[int], scores: list[float], why: Mapping[int, Explanation]) -> None:
        assert self._scored is not None
        documents = self._scored.documents
        for index, score in zip(indices, scores, strict=True):
            if index not in self._given:
                self._given.add(index)
                self._new.append(RankedDocument(index, score, documents[index], why.get(index)))
        self._news.set()


def _left(result: ScoreResult, given: set[int]) -> tuple[list[int], list[float], Mapping[int, Explanation]]:
    """The documents with a score that were not given yet."""
    without = {*result.unscored, *result.errors, *given}
    left = [i for i in range(len(result.scores)) if i not in without]
    return left, [result.scores[i] for i in left], result.explanations
