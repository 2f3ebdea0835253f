"""Reranking in the shapes of text-embeddings-inference, Voyage, mixedbread, llama.cpp, NVIDIA and DeepInfra.
None of them has a place for documents without a score."""

from maxsimd.api import wire, wire_reranks
from maxsimd.api.answer import Answer, new_id, usage_of, wire_answer
from maxsimd.api.handlers.ranking import (
    characters_of,
    check_all_ranked,
    rank,
    scale_of,
    score_options,
    with_scale,
)
from maxsimd.api.handlers.route import post_texts
from maxsimd.api.handlers.score_answers import ranked
from maxsimd.api.handlers.tei_headers import TeiHeaders
from maxsimd.api.models import Wanted
from maxsimd.api.reading import (
    ToRank,
    as_item,
    as_items,
    check_count,
    rank_places,
    tei_truncation_of,
    texts_to_rank,
    truncation_of,
)
from maxsimd.api.request_warnings import warnings_of
from maxsimd.api.state import ServerState
from maxsimd.engine import InvalidRequestError, Truncation
from maxsimd.engine.requests import Item


async def text_embeddings_inference(
    state: ServerState, body: wire.RerankRequest, texts: ToRank, tenant: str
) -> Answer:
    """`texts` in, a bare list out."""
    check_all_ranked(body)
    truncation = tei_truncation_of(body, state.config.long_documents)
    names, headers = ("query", "texts"), TeiHeaders(state, [texts[0], *texts[1]])
    scale = scale_of(state, body)
    result = await rank(state, body, texts, truncation, tenant, top_n=body.top_n, names=names)
    # The second as others call it.
    with_text = bool(body.return_documents if body.return_text is None else body.return_text)

    def build() -> list[wire_reranks.TeiRanked]:
        return [
            wire_reranks.TeiRanked(one.index, one.score, one.text if with_text else None)
            for one in result.results
        ]

    characters = characters_of(result) if with_text else 0
    answer = await wire_answer(build, len(result.results), characters)
    return with_scale(headers.added_to(answer, result), scale)


async def voyage(state: ServerState, body: wire.RerankRequest, texts: ToRank, tenant: str) -> Answer:
    """`data` in place of `results`, documents as strings, and only if they are asked for."""
    check_all_ranked(body)
    truncation = truncation_of(body, state.config.long_documents)
    model, scale = state.model_name, scale_of(state, body)
    top_n = body.top_n if body.top_k is None else body.top_k
    result = await rank(state, body, texts, truncation, tenant, top_n=top_n)
    warnings = warnings_of(result.truncated, state.field_warnings, body)

    def build() -> wire_reranks.VoyageResponse:
        data = [
            wire_reranks.VoyageRanked(one.index, one.score, one.text if body.return_documents else None)
            for one in result.results
        ]
        usage = usage_of(result.usage)
        return wire_reranks.VoyageResponse(data=data, model=model, usage=usage, warnings=warnings)

    characters = characters_of(result) if body.return_documents else 0
    answer = await wire_answer(build, len(result.results), characters)
    return with_scale(answer, scale).with_timings(result.timings).with_warnings(warnings)


async def reranking(
    state: ServerState, body: wire_reranks.RerankingRequest, texts: ToRank, tenant: str
) -> Answer:
    """Answers in the shape of the service whose field has the documents."""
    if body.input is not None:
        return await _mixedbread(state, body, texts, tenant)
    if body.texts is not None:
        return await text_embeddings_inference(state, body, texts, tenant)
    return await _llama_cpp(state, body, texts, tenant)


async def _llama_cpp(
    state: ServerState, body: wire_reranks.RerankingRequest, texts: ToRank, tenant: str
) -> Answer:
    check_all_ranked(body)
    truncation = truncation_of(body, state.config.long_documents)
    model, scale = state.model_name, scale_of(state, body)
    result = await rank(state, body, texts, truncation, tenant, top_n=body.top_n)
    warnings = warnings_of(result.truncated, state.field_warnings, body)
    with_text = bool(body.return_documents)

    def build() -> wire_reranks.LlamaCppResponse:
        results = [ranked(one, with_text) for one in result.results]
        usage = usage_of(result.usage)
        return wire_reranks.LlamaCppResponse(model=model, usage=usage, results=results, warnings=warnings)

    answer = await wire_answer(build, len(result.results), characters_of(result) if with_text else 0)
    return with_scale(answer, scale).with_timings(result.timings).with_warnings(warnings)


async def _mixedbread(
    state: ServerState, body: wire_reranks.RerankingRequest, texts: ToRank, tenant: str
) -> Answer:
    check_all_ranked(body)
    truncation = truncation_of(body, state.config.long_documents)
    model, scale = state.model_name, scale_of(state, body)
    names = ("query", "input")
    result = await rank(state, body, texts, truncation, tenant, top_n=body.top_k, names=names)
    warnings = warnings_of(result.truncated, state.field_warnings, body)
    with_input = bool(body.return_input)

    def build() -> wire_reranks.MixedbreadResponse:
        data = [
            wire_reranks.MixedbreadRanked(
                index=one.index, score=one.score, input=one.text if with_input else None
            )
            for one in result.results
        ]
        return wire_reranks.MixedbreadResponse(
            data=data,
            model=model,
            usage=usage_of(result.usage),
            top_k=len(data),
            return_input=with_input,
            warnings=warnings,
        )

    answer = await wire_answer(build, len(result.results), characters_of(result) if with_input else 0)
    return with_scale(answer, scale).with_timings(result.timings).with_warnings(warnings)


async def nvidia(state: ServerState, body: wire_reranks.NvidiaRequest, texts: ToRank, tenant: str) -> Answer:
    """Logits, where the model is a classifier, unless the request wants something else."""
    check_all_ranked(body)
    if body.use_activation is None and body.raw_scores is None and not body.normalize:
        body.raw_scores = True
    truncation, scale = truncation_of(body, state.config.long_documents), scale_of(state, body)
    if body.truncate is not None:
        truncation = Truncation(max_tokens=-1 if body.truncate == "END" else None)
    names = ("query", "passages")
    result = await rank(state, body, texts, truncation, tenant, top_n=body.top_k, names=names)
    warnings = warnings_of(result.truncated, state.field_warnings, body)

    def build() -> wire_reranks.NvidiaResponse:
        rankings = [wire_reranks.NvidiaRanked(one.index, one.score) for one in result.results]
        return wire_reranks.NvidiaResponse(rankings=rankings, usage=usage_of(result.usage), warnings=warnings)

    answer = await wire_answer(build, len(result.results))
    return with_scale(answer, scale).with_timings(result.timings).with_warnings(warnings)


async def deepinfra(
    state: ServerState,
    body: wire_reranks.DeepInfraRequest,
    texts: tuple[list[Item], list[Item]],
    tenant: str,
) -> Answer:
    """A bare list of scores, one for each pair."""
    check_all_ranked(body)
    if body.score_threshold is not None:
        raise InvalidRequestError(
            "score_threshold cannot leave out scores here, which have no index; leave it out, or use /score",
            "score_threshold",
        )
    truncation, scale = truncation_of(body, state.config.long_documents), scale_of(state, body)
    result = await state.engine.score(*texts, **score_options(state, body, truncation, tenant))
    warnings = warnings_of(result.truncated, state.field_warnings, body)
    timings, tokens = result.timings, result.usage.prompt_tokens
    status = wire_reranks.DeepInfraStatus(
        runtime_ms=round((timings.queue + timings.tokenise + timings.model) * 1e3), tokens_input=tokens
    )

    def build() -> wire_reranks.DeepInfraResponse:
        return wire_reranks.DeepInfraResponse(
            scores=[*result.scores],
            input_tokens=tokens,
            request_id=new_id("score"),
            inference_status=status,
            warnings=warnings,
        )

    answer = await wire_answer(build, len(result.scores))
    return with_scale(answer, scale).with_timings(timings).with_warnings(warnings)


def _reranking_to_rank(request: wire_reranks.RerankingRequest, most: int) -> ToRank:
    if request.input is None:
        return texts_to_rank(request, most)
    query = as_item(request.query, "query", "query")
    check_count(request.input, "input", most)
    return query, as_items(request.input, "input", rank_places(request.rank_fields))


def _passages_to_rank(request: wire_reranks.NvidiaRequest, most: int) -> ToRank:
    query = as_item(request.query, "query", "query")
    check_count(request.passages, "passages", most)
    return query, as_items(request.passages, "passages")


def _pairs_to_score(request: wire_reranks.DeepInfraRequest, most: int) -> tuple[list[Item], list[Item]]:
    check_count(request.documents, "documents", most)
    check_count(request.queries, "queries", most)
    return as_items(request.queries, "queries"), as_items(request.documents, "documents")


ROUTES = (
    *(
        post_texts(
            path,
            wire_reranks.RerankingRequest,
            _reranking_to_rank,
            reranking,
            wire_reranks.MixedbreadResponse,
            wire_reranks.LlamaCppResponse,
            list[wire_reranks.TeiRanked],
            wanted=Wanted.RANKING,
        )
        for path in ("/reranking", "/v1/reranking")
    ),
    *(
        post_texts(
            path,
            wire_reranks.NvidiaRequest,
            _passages_to_rank,
            nvidia,
            wire_reranks.NvidiaResponse,
            wanted=Wanted.RANKING,
        )
        for path in ("/v1/ranking", "/v1/retrieval/{name}/reranking")
    ),
    post_texts(
        "/v1/inference/{name}",
        wire_reranks.DeepInfraRequest,
        _pairs_to_score,
        deepinfra,
        wire_reranks.DeepInfraResponse,
        wanted=Wanted.RANKING,
    ),
)
