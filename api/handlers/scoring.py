"""The routes that score and rank: /score, /rerank and their variants."""

from maxsimd.api import wire
from maxsimd.api.answer import Answer, wire_answer
from maxsimd.api.handlers import cascade, reranks, streaming
from maxsimd.api.handlers.ranking import (
    characters_of,
    in_words_of,
    num_matches,
    rank,
    scale_of,
    score_options,
    with_scale,
)
from maxsimd.api.handlers.route import post_texts
from maxsimd.api.handlers.score_answers import rerank_response, score_response
from maxsimd.api.models import Wanted
from maxsimd.api.reading import (
    ToRank,
    names_of,
    texts_to_rank,
    texts_to_score,
    truncation_of,
)
from maxsimd.api.request_warnings import warnings_of
from maxsimd.api.state import ServerState
from maxsimd.api.wire_reranks import TeiRanked, VoyageResponse
from maxsimd.engine.requests import Item


async def score(
    state: ServerState, body: wire.ScoreRequest, texts: tuple[list[Item], list[Item]], tenant: str
) -> Answer:
    model, scale = state.model_name, scale_of(state, body)
    with in_words_of(names_of(body)):
        if body.stream:
            return await streaming.score(state, body, texts, tenant)
        truncation = truncation_of(body, state.config.long_documents)
        result = await state.engine.score(*texts, **score_options(state, body, truncation, tenant))
    items = len(result.scores) + num_matches(result.explanations.values())
    warnings = warnings_of(result.truncated, state.field_warnings, body)
    answer = await wire_answer(lambda: score_response(body, model, scale, result, warnings), items)
    return with_scale(answer, scale).with_timings(result.timings).with_warnings(warnings)


async def rerank(state: ServerState, body: wire.RerankRequest, texts: ToRank, tenant: str) -> Answer:
    if body.cascade is not None:
        return await cascade.rerank(state, body, body.cascade, texts, tenant)
    if body.texts is not None:
        return await reranks.text_embeddings_inference(state, body, texts, tenant)
    if body.top_k is not None or body.truncation is not None:
        return await reranks.voyage(state, body, texts, tenant)
    if body.stream:
        with in_words_of(("query", "documents")):
            return await streaming.rerank(state, body, texts, tenant)
    model, scale = state.model_name, scale_of(state, body)
    truncation = truncation_of(body, state.config.long_documents)
    result = await rank(state, body, texts, truncation, tenant, top_n=body.top_n)
    with_text = body.return_documents is not False
    items = len(result.results) + len(result.unscored)
    items += num_matches(document.explanation for document in result.results)
    warnings = warnings_of(result.truncated, state.field_warnings, body)
    answer = await wire_answer(
        lambda: rerank_response(body, model, scale, result, warnings, with_text),
        items,
        characters_of(result) if with_text else 0,
    )
    return with_scale(answer, scale).with_timings(result.timings).with_warnings(warnings)


def wanted_ranking(state: ServerState, body: wire.RerankRequest) -> Wanted:
    return Wanted.RANKING if body.cascade is None else Wanted.CASCADE


# The answers to requests with documents, with texts, in Voyage's words, and line by line.
RANKINGS = (wire.RerankResponse, list[TeiRanked], VoyageResponse, streaming.MEDIA_TYPE)

ROUTES = (
    *(
        post_texts(
            path,
            wire.ScoreRequest,
            texts_to_score,
            score,
            wire.ScoreResponse,
            streaming.MEDIA_TYPE,
            wanted=Wanted.RANKING,
        )
        for path in ("/score", "/v1/score")
    ),
    *(
        post_texts(path, wire.RerankRequest, texts_to_rank, rerank, *RANKINGS, wanted=wanted_ranking)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    *reranks.ROUTES,
)
