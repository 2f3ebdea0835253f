"""The engine for scripts and notebooks: the same methods, blocking, with a progress bar on long lists."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from tqdm.auto import tqdm

from maxsimd.engine.config import EngineConfig
from maxsimd.engine.engine import Engine
from maxsimd.engine.postprocess import rank
from maxsimd.engine.requests import (
    CUT_LONG,
    EmbedResult,
    RerankResult,
    ScoreResult,
    TokenEmbedResult,
    Usage,
)
from maxsimd.engine.validation import as_texts, pair_up

T = TypeVar("T")

# A longer list is sent in pieces of this size, two at a time, so that progress can be shown.
PIECE = 256


class SyncEngine:
    """As `Engine`, without async: every method blocks until its result is there.

    Use it as a context manager; it runs an event loop in a thread of its own. With `progress` a bar is
    shown for lists longer than one piece. Keyword arguments are those of `Engine`.
    """

    def __init__(self, config: EngineConfig | None = None, *, progress: bool = True) -> None:
        self._engine = Engine(config)
        self._progress = progress
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="maxsimd-sync", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._wait(self._engine.start())
        except BaseException:
            self._close_loop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._wait(self._engine.stop())
        finally:
            self._close_loop()

    def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], **options: Any
    ) -> ScoreResult:
        one_side, other_side = pair_up(queries, documents)

        def piece(start: int, stop: int) -> Coroutine[Any, Any, ScoreResult]:
            part = one_side if len(one_side) == 1 else one_side[start:stop]
            return self._engine.score(part, other_side[start:stop], **options)

        # A listwise model compares the documents of one call with each other.
        together = self._engine.model.listwise is not None
        parts = self._in_pieces(len(other_side), piece, len(other_side) if together else PIECE)
        scores = [score for part in parts for score in part.scores]
        return ScoreResult(scores, _sum_usage(parts), sum(part.truncated for part in parts))

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, **options: Any
    ) -> RerankResult:
        texts = as_texts(documents, "documents")
        scored = self.score(query, texts, **{"truncation": CUT_LONG, **options})
        return RerankResult(rank(scored.scores, texts, top_n), scored.usage, scored.truncated)

    def embed(self, texts: str | Sequence[str], **options: Any) -> EmbedResult:
        given = as_texts(texts, "input")
        parts = self._in_pieces(
            len(given), lambda start, stop: self._engine.embed(given[start:stop], **options)
        )
        return EmbedResult(np.concatenate([part.embeddings for part in parts]), _sum_usage(parts))

    def embed_tokens(self, texts: str | Sequence[str], **options: Any) -> TokenEmbedResult:
        given = as_texts(texts, "input")
        parts = self._in_pieces(
            len(given), lambda start, stop: self._engine.embed_tokens(given[start:stop], **options)
        )
        return TokenEmbedResult([matrix for part in parts for matrix in part.embeddings], _sum_usage(parts))

    def _in_pieces(self, total: int, piece: "Any", size: int = PIECE) -> list[Any]:
        return self._wait(self._run_pieces(total, piece, size))

    async def _run_pieces(self, total: int, piece: "Any", size: int) -> list[Any]:
        starts = range(0, total, size)
        two_at_a_time = asyncio.Semaphore(2)
        with tqdm(total=total, unit="text", disable=not self._progress or len(starts) < 2) as bar:

            async def run(start: int) -> Any:
                stop = min(total, start + size)
                async with two_at_a_time:
                    result = await piece(start, stop)
                bar.update(stop - start)
                return result

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run(start)) for start in starts]
        return [task.result() for task in tasks]

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    def _close_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _sum_usage(parts: Sequence[Any]) -> Usage:
    return Usage(sum(part.usage.prompt_tokens for part in parts))
