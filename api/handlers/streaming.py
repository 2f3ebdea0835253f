"""Answers line by line: /score and /rerank with `stream`. A line is a result, as soon as it is there; the
last line is the answer that there would be without `stream`, but for texts and explanations."""

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from maxsimd.api import wire
from maxsimd.api.answer import Answer
from maxsimd.api.handlers.ranking import num_matches, scale_of, score_options, with_scale
from maxsimd.api.handlers.score_answers import least_score, ranked, rerank_response, score_response
from maxsimd.api.reading import ToRank, truncation_of
from maxsimd.api.request_warnings import warnings_of
from maxsimd.api.state import ServedStream, ServerState
from maxsimd.api.wire_explanations import on_wire
from maxsimd.engine import RankedDocument, RerankResult, ScoreResult
from maxsimd.engine.requests import Item, rank
from maxsimd.engine.workers import run_in_thread_if_large

MEDIA_TYPE = "application/x-ndjson"
_HEADERS = {"Content-Type": MEDIA_TYPE}


async def score(
    state: ServerState, body: wire.ScoreRequest, texts: tuple[list[Item], list[Item]], tenant: str
) -> Answer:
    model, scale = state.model_name, scale_of(state, body)

    def line(document: RankedDocument) -> wire.Score:
        why = document.explanation
        explanation = msgspec.UNSET if why is None else on_wire(why)
        return wire.Score(document.index, document.score, explanation=explanation)

    return await _streamed(
        _stream(state, body, texts, tenant),
        least_score(body),
        line,
        lambda result: score_response(body, model, scale, result, _warnings(state, body, result)),
        scale,
    )


async def rerank(state: ServerState, body: wire.RerankRequest, texts: ToRank, tenant: str) -> Answer:
    model, scale = state.model_name, scale_of(state, body)
    query, documents = texts
    with_text = body.return_documents is not False

    def last(result: ScoreResult) -> wire.RerankResponse:
        best = rank(result.scores, documents, body.top_n, body.score_threshold, by=result.ranking_scores)
        reranked = RerankResult(best, result.usage, result.truncated, result.unscored, result.errors)
        warnings = _warnings(state, body, result)
        return rerank_response(body, model, scale, reranked, warnings, with_text=False)

    return await _streamed(
        _stream(state, body, ([query], documents), tenant),
        least_score(body),
        lambda document: ranked(document, with_text),
        last,
        scale,
    )


def _warnings(state: ServerState, body: wire.Scoring, result: ScoreResult) -> list[str] | msgspec.UnsetType:
    return warnings_of(result.truncated, state.field_warnings, body)


def _stream(
    state: ServerState, body: wire.Scoring, texts: tuple[list[Item], list[Item]], tenant: str
) -> ServedStream:
    truncation = truncation_of(body, state.config.long_documents)
    return state.engine.stream(*texts, **score_options(state, body, truncation, tenant))


async def _streamed(
    stream: ServedStream,
    least: float,
    line: Callable[[RankedDocument], Any],
    last: Callable[[ScoreResult], Any],
    scale: wire.ScoreScale,
) -> Answer:
    """Returns when the first line is there: what is wrong with the request is raised before."""
    parts = _parts(stream, least, line, last)
    answer = Answer(200, _HEADERS, lines=_Lines(await anext(parts), parts))
    return with_scale(answer, scale)


async def _parts(
    stream: ServedStream,
    least: float,
    line: Callable[[RankedDocument], Any],
    last: Callable[[ScoreResult], Any],
) -> AsyncGenerator[bytes]:
    """One or more lines at a time."""

    def encoded(documents: Sequence[RankedDocument]) -> bytes:
        return b"".join(msgspec.json.encode(line(document)) + b"\n" for document in documents)

    async with stream:
        async for new in stream:
            documents = [document for document in new if document.score >= least]
            if documents:
                matches = num_matches(document.explanation for document in documents)
                yield await run_in_thread_if_large(len(documents) + matches, encoded, documents)
        result = stream.result
        size = len(result.scores)
        yield await run_in_thread_if_large(size, lambda: msgspec.json.encode(last(result)) + b"\n")


class _Lines:
    """The first part and the rest."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes]) -> None:
        self._first: bytes | None = first
        self._rest = rest

    def __aiter__(self) -> "_Lines":
        return self

    async def __anext__(self) -> bytes:
        if self._first is None:
            return await anext(self._rest)
        first, self._first = self._first, None
        return first

    async def aclose(self) -> None:
        """Cancels what is left. A generator that has not begun would not."""
        await self._rest.aclose()
