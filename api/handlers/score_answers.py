"""The answers of /score, and of /rerank in Jina's and Cohere's shape, from the engine's results."""

import math
from typing import Any

import msgspec

from maxsimd.api import wire
from maxsimd.api.answer import new_id, now, usage_of
from maxsimd.api.wire_explanations import on_wire
from maxsimd.engine import RankedDocument, RerankResult, ScoreResult, Usage


def least_score(body: wire.Scoring) -> float:
    """Documents with a lower score are left out."""
    return -math.inf if body.score_threshold is None else body.score_threshold


def scored(index: int, score: float, result: ScoreResult) -> wire.Score:
    why = result.explanations.get(index)
    return wire.Score(index, score, explanation=msgspec.UNSET if why is None else on_wire(why))


def score_response(
    body: wire.ScoreRequest,
    model: str,
    scale: wire.ScoreScale,
    result: ScoreResult,
    warnings: list[str] | msgspec.UnsetType,
) -> wire.ScoreResponse:
    least = least_score(body)
    data = [scored(i, score, result) for i, score in enumerate(result.scores) if score >= least]
    usage, rest = usage_of(result.usage), _completeness(body, result)
    return wire.ScoreResponse(new_id("score"), now(), model, data, usage, scale, warnings=warnings, **rest)


def ranked(document: RankedDocument, with_text: bool, model: str | None = None) -> wire.Ranked:
    """A document that came as an embedding has no text. `model` is there where several ranked."""
    text = None if document.text is None or not with_text else wire.Document(document.text)
    why = document.explanation
    explanation = None if why is None else on_wire(why)
    return wire.Ranked(document.index, document.score, text, explanation, model)


def rerank_response(
    body: wire.RerankRequest,
    model: str,
    scale: wire.ScoreScale,
    result: RerankResult,
    warnings: list[str] | msgspec.UnsetType,
    with_text: bool,
) -> wire.RerankResponse:
    return wire.RerankResponse(
        new_id("rerank"),
        model,
        [ranked(document, with_text) for document in result.results],
        usage_of(result.usage),
        cohere_meta(result.usage, warnings),
        scale,
        warnings=warnings,
        **_completeness(body, result),
    )


def cohere_meta(usage: Usage, warnings: list[str] | msgspec.UnsetType) -> dict[str, Any]:
    """What Cohere's clients read of an answer beside its results."""
    return {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": usage.prompt_tokens},
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
