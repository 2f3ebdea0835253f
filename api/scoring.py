"""The routes that score and rank: /score, /rerank and their variants."""

from aiohttp import web

from maxsimd.api import wire
from maxsimd.api.reading import (
    as_text,
    documents_to_rank,
    texts_to_score,
    truncation_of,
    wants_activation,
)
from maxsimd.api.state import STATE, ServerState, new_id, now
from maxsimd.engine import RerankResult, Truncation, Usage

routes = web.RouteTableDef()


@routes.post("/score")
@routes.post("/v1/score")
async def score(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = await state.read(request, wire.ScoreRequest)
    queries, documents = texts_to_score(body)
    state.check_count(len(documents), "documents")
    state.check_count(len(queries), "queries")
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
    return await state.answer(response, len(data))


@routes.post("/rerank")
@routes.post("/v1/rerank")
@routes.post("/v2/rerank")
async def rerank(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = await state.read(request, wire.RerankRequest)
    if body.texts is not None:
        return await _rerank_texts(state, body, body.texts)
    documents = documents_to_rank(body)
    truncation = truncation_of(body, state.config.long_documents)
    result = await _rank(state, body, documents, truncation)
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
    return await state.answer(response, len(results))


async def _rerank_texts(state: ServerState, body: wire.RerankRequest, texts: list[str]) -> web.Response:
    """text-embeddings-inference's rerank: `texts` in, a bare list out."""
    truncation = tei_truncation(state, body.truncate, body.truncation_direction)
    result = await _rank(state, body, texts, truncation)
    ranked = [
        wire.TeiRanked(ranked.index, ranked.score, ranked.document if body.return_text else None)
        for ranked in result.results
    ]
    return await state.answer(ranked, len(ranked))


async def _rank(
    state: ServerState, body: wire.RerankRequest, documents: list[str], truncation: Truncation
) -> RerankResult:
    state.check_count(len(documents), "documents")
    return await state.engine.rerank(
        as_text(body.query, "query", "query"),
        documents,
        top_n=body.top_n,
        truncation=truncation,
        use_activation=wants_activation(body),
        instruction=body.instruction,
        cache=body.cache or "use",
        priority=body.priority or 0,
        timeout=body.timeout,
    )


def tei_truncation(state: ServerState, truncate: bool | None, direction: wire.Direction | None) -> Truncation:
    """Truncation in text-embeddings-inference's words, the server's where the request says nothing."""
    cut = truncate if truncate is not None else state.config.long_documents != "error"
    windows = truncate is None and state.config.long_documents == "window"
    side = (direction or "right").lower()
    return Truncation(
        max_tokens=-1 if cut else None, side="left" if side == "left" else "right", windows=windows
    )


def usage_of(usage: Usage) -> wire.Usage:
    details = None
    if usage.cached_tokens:
        details = wire.TokensDetails(usage.cached_tokens, usage.cached_documents)
    return wire.Usage(usage.prompt_tokens, usage.prompt_tokens, details)
