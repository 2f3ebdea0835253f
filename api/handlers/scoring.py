"""The routes that score and rank: /score, /rerank and their variants."""

from maxsimd.api import wire
from maxsimd.api.answer import Answer, new_id, now, usage_of, wire_answer
from maxsimd.api.handlers.route import post_texts
from maxsimd.api.reading import (
    tei_truncation_of,
    texts_to_rank,
    texts_to_score,
    truncation_of,
    wants_activation,
)
from maxsimd.api.state import ServerState
from maxsimd.engine import RerankResult, Truncation


async def score(state: ServerState, body: wire.ScoreRequest, texts: tuple[list[str], list[str]]) -> Answer:
    queries, documents = texts
    result = await state.engine.score(
        queries,
        documents,
        truncation=truncation_of(body),
        use_activation=wants_activation(body),
        instruction=body.instruction,
        cache=body.cache or "use",
        priority=body.priority or 0,
        timeout=body.timeout,
    )
    data = [wire.Score(i, score) for i, score in enumerate(result.scores)]
    response = wire.ScoreResponse(new_id("score"), now(), state.model_name, data, usage_of(result.usage))
    return await wire_answer(state.engine, response, len(data))


async def rerank(state: ServerState, body: wire.RerankRequest, texts: tuple[str, list[str]]) -> Answer:
    if body.texts is not None:
        return await _rerank_texts(state, body, texts)
    truncation = truncation_of(body, state.config.long_documents)
    result = await _rank(state, body, texts, truncation)
    with_text = body.return_documents is not False
    results = [
        wire.Ranked(ranked.index, ranked.score, wire.Document(ranked.document) if with_text else None)
        for ranked in result.results
    ]
    warnings = (
        [f"{result.truncated} of the inputs were too long and have been cut"] if result.truncated else []
    )
    meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    response = wire.RerankResponse(
        new_id("rerank"), state.model_name, results, usage_of(result.usage), meta, warnings
    )
    return await wire_answer(state.engine, response, len(results))


async def _rerank_texts(state: ServerState, body: wire.RerankRequest, texts: tuple[str, list[str]]) -> Answer:
    """text-embeddings-inference's rerank: `texts` in, a bare list out."""
    truncation = tei_truncation_of(body, state.config.long_documents)
    result = await _rank(state, body, texts, truncation)
    ranked = [
        wire.TeiRanked(ranked.index, ranked.score, ranked.document if body.return_text else None)
        for ranked in result.results
    ]
    return await wire_answer(state.engine, ranked, len(ranked))


async def _rank(
    state: ServerState, body: wire.RerankRequest, texts: tuple[str, list[str]], truncation: Truncation
) -> RerankResult:
    return await state.engine.rerank(
        *texts,
        top_n=body.top_n,
        truncation=truncation,
        use_activation=wants_activation(body),
        instruction=body.instruction,
        cache=body.cache or "use",
        priority=body.priority or 0,
        timeout=body.timeout,
    )


ROUTES = (
    *(post_texts(path, wire.ScoreRequest, texts_to_score, score) for path in ("/score", "/v1/score")),
    *(
        post_texts(path, wire.RerankRequest, texts_to_rank, rerank)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
)
