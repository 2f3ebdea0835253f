"""Reranking in stages, in one request: a model ranks all documents, the next the best of those, within one
deadline."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from maxsimd.api import wire
from maxsimd.api.answer import Answer, new_id, usage_of, wire_answer
from maxsimd.api.handlers.ranking import in_words_of, scale_of, score_options, with_scale
from maxsimd.api.handlers.score_answers import cohere_meta, least_score, ranked
from maxsimd.api.models import SeveralModels, Wanted, named, told_of
from maxsimd.api.reading import ToRank, instruction_of, truncation_of
from maxsimd.api.request_warnings import warnings_of
from maxsimd.api.state import ServerState
from maxsimd.engine import InvalidRequestError, RankedDocument, RerankResult, Usage
from maxsimd.engine.requests import Timings

_MOST_STAGES = 8
# The options of a request that hold for all its stages.
_FOR_ALL = ("truncation", "use_activation", "normalize", "cache", "priority", "tenant")


async def rerank(
    state: ServerState,
    body: wire.RerankRequest,
    stages: Sequence[wire.CascadeStage],
    texts: ToRank,
    tenant: str,
) -> Answer:
    """The answer has the documents that came to the last stage, each with the model that gave its score, and
    says of each stage how long it took."""
    models = _check(state, body, stages)
    names = [named(models, stage.model) for stage in stages]
    plan = [
        (name, stage.keep, stage.instruction or instruction_of(body))
        for name, stage in zip(names, stages, strict=True)
    ]
    # Whatever the stages are, a model that is not served now is told before any of them runs.
    last = [state.serving(name, Wanted.RANKING) for name in names][-1]
    scale, truncation = scale_of(last, body), truncation_of(body, state.config.long_documents)
    options: dict[str, Any] = {**score_options(last, body, truncation, tenant)}
    for_all = {name: value for name, value in options.items() if name in _FOR_ALL}
    with ExitStack() as reported, in_words_of(("query", "documents")):
        for name in names:
            reported.enter_context(told_of(models, name))
        result = await models.cascade(
            *texts,
            plan,
            deadline=body.timeout,
            **for_all,
        )
    best = [one for one in result.results if one.score >= least_score(body)][: body.top_n]
    rankings = [stage.ranking for stage in result.stages]
    done = [
        wire.StageDone(stage.model, stage.documents, round(stage.milliseconds, 3)) for stage in result.stages
    ]
    with_text = body.return_documents is not False
    warnings = warnings_of(sum(ranking.truncated for ranking in rankings), state.field_warnings, body)
    usage = _together([ranking.usage for ranking in rankings])

    def build() -> wire.RerankResponse:
        results = [
            ranked(RankedDocument(one.index, one.score, one.document), with_text, one.model) for one in best
        ]
        meta = cohere_meta(usage, warnings)
        return wire.RerankResponse(
            new_id("rerank"), names[-1], results, usage_of(usage), meta, scale, warnings=warnings, stages=done
        )

    characters = sum(len(one.document) for one in best if isinstance(one.document, str)) if with_text else 0
    answer = await wire_answer(build, len(best), characters)
    return with_scale(answer, scale).with_timings(_in_all(rankings)).with_warnings(warnings)


def _check(
    state: ServerState, body: wire.RerankRequest, stages: Sequence[wire.CascadeStage]
) -> SeveralModels:
    """Raises InvalidRequestError for what is no cascade, and for what a cascade's answer has no place for."""
    if state.models is None:
        raise InvalidRequestError(
            "cascade needs a server of several models, and this one serves one; leave it out, or start a "
            "server with all of them",
            "cascade",
        )
    if not 2 <= len(stages) <= _MOST_STAGES:
        raise InvalidRequestError(
            f"cascade must have 2 to {_MOST_STAGES} stages, not {len(stages)}; name a single model as model",
            "cascade",
        )
    for i, stage in enumerate(stages[:-1]):
        if stage.keep is None:
            raise InvalidRequestError(
                f"cascade[{i}] must say how many of its best documents go on to the next stage; set its keep",
                "cascade",
            )
    if stages[-1].keep is not None:
        raise InvalidRequestError(
            "the last stage of a cascade has no keep; leave it out, and set top_n for fewer results",
            "cascade",
        )
    for option, value in (
        *(("texts", body.texts), ("top_k", body.top_k), ("truncation", body.truncation)),
        *(("stream", body.stream or None), ("explain", body.explain or None)),
        ("on_timeout", None if body.on_timeout == "error" else body.on_timeout),
        ("on_error", None if body.on_error == "fail" else body.on_error),
    ):
        if value is not None:
            raise InvalidRequestError(f"{option} is not for a cascade; leave it or cascade out", option)
    return state.models


def _together(usages: Sequence[Usage]) -> Usage:
    """What all stages have used."""
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        cached_documents=sum(usage.cached_documents for usage in usages),
        query_tokens=sum(usage.query_tokens for usage in usages),
    )


def _in_all(rankings: Sequence[RerankResult]) -> Timings:
    """Where the time of all stages went."""
    each = [ranking.timings for ranking in rankings]
    return Timings(
        queue=sum(timings.queue for timings in each),
        tokenise=sum(timings.tokenise for timings in each),
        model=sum(timings.model for timings in each),
        score=sum(timings.score for timings in each),
    )
