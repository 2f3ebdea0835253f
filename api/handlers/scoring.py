"""The routes that score and rank: /score, /rerank and their variants."""

import math
from typing import Any

import msgspec

from maxsimd.api import wire
from maxsimd.api.answer import Answer, new_id, now, usage_of, warnings_of, wire_answer
from maxsimd.api.handlers import reranks
from maxsimd.api.handlers.ranking import characters_of, in_words_of, rank, scale_of, score_options, with_scale
from maxsimd.api.handlers.route import post_texts
from maxsimd.api.reading import (
    Item,
    ToRank,
    names_of,
    texts_to_rank,
    texts_to_score,
    truncation_of,
)
from maxsimd.api.state import ServerState
from maxsimd.api.wire_reranks import TeiRanked, VoyageResponse
from maxsimd.engine import RankedDocument, RerankResult, ScoreResult


async def score(
    state: ServerState, body: wire.ScoreRequest, texts: tuple[list[Item], list[Item]], tenant: str
) -> Answer:
    model, scale = state.model_name, scale_of(state, body)
    with in_words_of(names_of(body)):
        truncation = truncation_of(body, state.config.long_documents)
        result = await state.engine.score(*texts, **score_options(state, body, truncation, tenant))
    warnings = warnings_of(result.truncated)
    least = -math.inf if body.score_threshold is None else body.score_threshold

    def build() -> wire.ScoreResponse:
        data = [wire.Score(i, score) for i, score in enumerate(result.scores) if score >= least]
        usage, rest = usage_of(result.usage), _completeness(body, result)
        return wire.ScoreResponse(
            new_id("score"), now(), model, data, usage, scale, warnings=warnings, **rest
        )

    answer = with_scale(await wire_answer(build, len(result.scores)), scale)
    return answer.with_timings(result.timings).with_warnings(warnings)


async def rerank(state: ServerState, body: wire.RerankRequest, texts: ToRank, tenant: str) -> Answer:
    if body.texts is not None:
        return await reranks.text_embeddings_inference(state, body, texts, tenant)
    if body.top_k is not None or body.truncation is not None:
        return await reranks.voyage(state, body, texts, tenant)
    model, scale = state.model_name, scale_of(state, body)
    truncation = truncation_of(body, state.config.long_documents)
    result = await rank(state, body, texts, truncation, tenant, top_n=body.top_n)

    with_text = body.return_documents is not False
    warnings = warnings_of(result.truncated)

    def build() -> wire.RerankResponse:
        results = [
            wire.Ranked(ranked.index, ranked.score, _document(ranked) if with_text else None)
            for ranked in result.results
        ]
        return wire.RerankResponse(
            new_id("rerank"),
            model,
            results,
            usage_of(result.usage),
            _cohere_meta(result, warnings),
            scale,
            warnings=warnings,
            **_completeness(body, result),
        )

    characters = characters_of(result) if with_text else 0
    answer = await wire_answer(build, len(result.results) + len(result.unscored), characters)
    return with_scale(answer, scale).with_timings(result.timings).with_warnings(warnings)


def _document(ranked: RankedDocument) -> wire.Document | None:
    """None for one that came as an embedding."""
    return None if ranked.text is None else wire.Document(ranked.text)


def _cohere_meta(result: RerankResult, warnings: list[str] | msgspec.UnsetType) -> dict[str, Any]:
    """What Cohere's clients read of an answer beside its results."""
    return {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": result.usage.prompt_tokens},
        **({"warnings": warnings} if warnings else {}),
    }


def _completeness(body: wire.Scoring, result: ScoreResult | RerankResult) -> dict[str, Any]:
    """What a request that asked for it is told of documents without a score."""
    reported: dict[str, Any] = {}
    if body.on_timeout == "partial":
        reported |= {"complete": not result.unscored, "unscored": result.unscored}
    if body.on_error == "report":
        reported["errors"] = [wire.DocumentError(i, error) for i, error in sorted(result.errors.items())]
    return reported


# The answers to requests with documents, with texts, and in Voyage's words.
RANKINGS = (wire.RerankResponse, list[TeiRanked], VoyageResponse)

ROUTES = (
    *(
        post_texts(path, wire.ScoreRequest, texts_to_score, score, wire.ScoreResponse)
        for path in ("/score", "/v1/score")
    ),
    *(
        post_texts(path, wire.RerankRequest, texts_to_rank, rerank, *RANKINGS)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    *reranks.ROUTES,
)
