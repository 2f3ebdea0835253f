"""Reranking in the shapes of mixedbread, llama.cpp, NVIDIA, DeepInfra and Infinity. None of them has a place
for documents without a score. Infinity's routes have a base URL of their own, /infinity, because requests to
its /rerank do not say whose they are. Its other paths answer there as they do without it."""

from typing import Annotated, ClassVar, Literal

import msgspec

from maxsimd.api.answer import Answer, json_page, new_id, now, usage_of, wire_answer
from maxsimd.api.handlers.operating import ModelCard, model_card
from maxsimd.api.handlers.rerank import (
    NOT_OF_TEI,
    OF_TEI,
    WINDOW_FIELDS,
    DocumentText,
    Ranked,
    RerankRequest,
    ReturnDocuments,
    TeiRanked,
    ToRank,
    ToScore,
    check_all_ranked,
    query_and_documents,
    ranked,
    rerank_as_tei,
    rerank_whole,
    scale_of,
    score_options,
    texts_to_rank,
    with_scale,
)
from maxsimd.api.handlers.route import Group, Shown, get, post_texts
from maxsimd.api.models import Wanted
from maxsimd.api.reading import as_items, check_count, truncation_words, warnings_of
from maxsimd.api.state import ServerState
from maxsimd.api.wire import (
    DOCUMENTS,
    QUERY,
    AlwaysList,
    Contents,
    Created,
    Documents,
    Id,
    Index,
    Model,
    Query,
    RankFields,
    RelevanceScore,
    Scoring,
    TopN,
    UsageField,
    Warned,
    Warnings,
    about,
)
from maxsimd.engine import InvalidRequestError, RerankResult, Truncation

INFINITY = "/infinity"
_INFINITY_BASES = (INFINITY, f"{INFINITY}/v1")

_OF_MIXEDBREAD = frozenset({"input", "return_input"})


class RerankingRequest(RerankRequest, kw_only=True):
    """mixedbread's with `input`, llama.cpp's with `documents`, and text-embeddings-inference's with `texts`,
    which llama.cpp takes too."""

    input: Annotated[Contents | None, about("mixedbread's name of `documents`.", DOCUMENTS)] = None
    return_input: Annotated[bool | None, about("mixedbread's `return_documents`. Default: false.", True)] = (
        None
    )

    def unused_fields(self) -> frozenset[str]:
        if self.input is not None:
            return OF_TEI | {"documents", "texts", "top_n", "return_documents", "cascade"}
        return _OF_MIXEDBREAD | {"cascade"} | (OF_TEI | {"top_k"} if self.texts is None else NOT_OF_TEI)


class MixedbreadRanked(msgspec.Struct, kw_only=True):
    index: Index
    score: RelevanceScore
    input: DocumentText = None
    object: Annotated[Literal["rank_result"], about("Always `rank_result`.", "rank_result")] = "rank_result"


class MixedbreadResponse(Warned, kw_only=True):
    object: AlwaysList = "list"
    data: Annotated[list[MixedbreadRanked], about("The documents, best first.")]
    model: Model
    usage: UsageField
    top_k: Annotated[int, about("Number of results.", 2)]
    return_input: Annotated[bool, about("Whether the results have texts.", True)]


class LlamaCppResponse(Warned, kw_only=True):
    """Documents have no text, unless the request asks for it."""

    model: Model
    object: AlwaysList = "list"
    usage: UsageField
    results: Annotated[list[Ranked], about("The documents, best first.")]


class NvidiaRequest(Scoring, kw_only=True):
    """The path may name the model; then `model` is not read."""

    query: Query
    passages: Annotated[Contents, about("Documents.", [{"text": text} for text in DOCUMENTS])]
    top_k: TopN = None
    TRUNCATES: ClassVar = ("END",)
    truncate: Annotated[
        Literal["NONE", "END"] | None,
        about("Truncate long texts at the end; NONE refuses them. Default: as the server is set.", "END"),
    ] = None

    def unused_fields(self) -> frozenset[str]:
        return frozenset() if self.truncate is None else WINDOW_FIELDS


class NvidiaRanked(msgspec.Struct):
    index: Index
    logit: RelevanceScore


class NvidiaResponse(Warned, kw_only=True):
    rankings: Annotated[list[NvidiaRanked], about("The passages, best first.")]
    usage: UsageField


class DeepInfraRequest(Scoring, kw_only=True):
    """Pairs of a query and a document, or one query for all documents. The path names the model."""

    queries: Annotated[Contents, about("A query, or one for each document.", [QUERY])]
    documents: Documents


class DeepInfraStatus(msgspec.Struct, kw_only=True):
    status: Annotated[Literal["succeeded"], about("Always `succeeded`.", "succeeded")] = "succeeded"
    runtime_ms: Annotated[int, about("Time taken, in milliseconds.", 12)]
    cost: Annotated[float, about("Always 0.", 0.0)] = 0.0
    tokens_generated: Annotated[int, about("Always 0: nothing is generated.", 0)] = 0
    tokens_input: Annotated[int, about("Tokens of all inputs.", 27)]


class DeepInfraResponse(Warned, kw_only=True):
    scores: Annotated[list[float], about("Scores, in the order of the documents.", [2.1, 7.5])]
    input_tokens: Annotated[int, about("Tokens of all inputs.", 27)]
    request_id: Id
    inference_status: Annotated[DeepInfraStatus, about("Time and tokens.")]


class InfinityRequest(Scoring, kw_only=True):
    query: Query
    documents: Documents
    top_n: TopN = None
    return_documents: ReturnDocuments = None
    rank_fields: RankFields = None


class InfinityRanked(msgspec.Struct):
    relevance_score: RelevanceScore
    index: Index
    document: DocumentText


class InfinityResponse(Warned, kw_only=True):
    object: Annotated[Literal["rerank"], about("Always `rerank`.", "rerank")] = "rerank"
    id: Id
    model: Model
    results: Annotated[list[InfinityRanked], about("The documents, best first.")]
    usage: UsageField
    created: Created


class InfinityStats(msgspec.Struct):
    queue_absolute: Annotated[int, about("Sequences that wait.", 0)]
    results_pending: Annotated[int, about("Requests without an answer.", 0)]


class InfinityCard(ModelCard, kw_only=True):
    """A model, with its load."""

    backend: Annotated[str, about("Always `torch`.", "torch")]
    stats: Annotated[InfinityStats, about("Load of the model.")]


class InfinityModels(msgspec.Struct, kw_only=True):
    object: AlwaysList = "list"
    data: Annotated[list[InfinityCard], about("The models.")]


async def reranking(state: ServerState, body: RerankingRequest, texts: ToRank, tenant: str) -> Answer:
    """Answers in the shape of the service that has the request's field for documents."""
    if body.input is not None:
        return await _mixedbread(state, body, texts, tenant)
    if body.texts is not None:
        return await rerank_as_tei(state, body, texts, tenant)
    return await _llama_cpp(state, body, texts, tenant)


async def _llama_cpp(state: ServerState, body: RerankingRequest, texts: ToRank, tenant: str) -> Answer:
    with_text = bool(body.return_documents)

    def build(result: RerankResult, model: str, warnings: Warnings) -> LlamaCppResponse:
        results = [ranked(one, with_text) for one in result.results]
        return LlamaCppResponse(model=model, usage=usage_of(result.usage), results=results, warnings=warnings)

    return await rerank_whole(state, body, texts, tenant, build, top_n=body.top_n, with_text=with_text)


async def _mixedbread(state: ServerState, body: RerankingRequest, texts: ToRank, tenant: str) -> Answer:
    with_input = bool(body.return_input)

    def build(result: RerankResult, model: str, warnings: Warnings) -> MixedbreadResponse:
        data = [
            MixedbreadRanked(index=one.index, score=one.score, input=one.text if with_input else None)
            for one in result.results
        ]
        return MixedbreadResponse(
            data=data,
            model=model,
            usage=usage_of(result.usage),
            top_k=len(data),
            return_input=with_input,
            warnings=warnings,
        )

    return await rerank_whole(
        state, body, texts, tenant, build, top_n=body.top_k, with_text=with_input, documents="input"
    )


async def nvidia(state: ServerState, body: NvidiaRequest, texts: ToRank, tenant: str) -> Answer:
    """Gives a classifier's logits, unless the request wants something else."""
    if body.use_activation is None and body.raw_scores is None and not body.normalize:
        body.raw_scores = True
    truncation = None
    if body.truncate is not None:
        truncation = Truncation(
            max_tokens=-1 if body.truncate == "END" else None, words=truncation_words(body)
        )

    def build(result: RerankResult, model: str, warnings: Warnings) -> NvidiaResponse:
        rankings = [NvidiaRanked(one.index, one.score) for one in result.results]
        return NvidiaResponse(rankings=rankings, usage=usage_of(result.usage), warnings=warnings)

    return await rerank_whole(
        *(state, body, texts, tenant, build),
        top_n=body.top_k,
        with_text=False,
        documents="passages",
        truncation=truncation,
    )


async def deepinfra(state: ServerState, body: DeepInfraRequest, texts: ToScore, tenant: str) -> Answer:
    """A list of scores, one for each pair."""
    check_all_ranked(body)
    if body.score_threshold is not None:
        raise InvalidRequestError(
            "score_threshold cannot leave out scores here, which have no index; leave it out, or use /score",
            "score_threshold",
        )
    scale = scale_of(state, body)
    result = await state.engine.score(*texts, **score_options(state, body, tenant))
    warnings = warnings_of(result.truncated, state.field_warnings, body)
    timings, tokens = result.timings, result.usage.prompt_tokens
    status = DeepInfraStatus(
        runtime_ms=round((timings.queue + timings.tokenise + timings.model) * 1e3), tokens_input=tokens
    )

    def build() -> DeepInfraResponse:
        return DeepInfraResponse(
            scores=[*result.scores],
            input_tokens=tokens,
            request_id=new_id("score"),
            inference_status=status,
            warnings=warnings,
        )

    answer = await wire_answer(build, len(result.scores))
    return with_scale(answer, scale).with_timings(timings).with_warnings(warnings)


async def infinity(state: ServerState, body: InfinityRequest, texts: ToRank, tenant: str) -> Answer:
    """Documents are strings, and only if they are asked for."""
    with_text = bool(body.return_documents)

    def build(result: RerankResult, model: str, warnings: Warnings) -> InfinityResponse:
        results = [
            InfinityRanked(one.score, one.index, one.text if with_text else None) for one in result.results
        ]
        return InfinityResponse(
            id=new_id("rerank"),
            model=model,
            results=results,
            usage=usage_of(result.usage),
            created=now(),
            warnings=warnings,
        )

    return await rerank_whole(state, body, texts, tenant, build, top_n=body.top_n, with_text=with_text)


async def infinity_models(state: ServerState) -> Answer:
    return json_page(InfinityModels(data=[_infinity_card(state, name) for name in state.model_names]))


def _infinity_card(state: ServerState, name: str) -> InfinityCard:
    """Infinity's client takes no other owner, and shows the load."""
    load = state.serving(name, Wanted.ANYTHING).engine.stats()
    about_model = msgspec.structs.asdict(model_card(state, name)) | {"owned_by": "infinity"}
    stats = InfinityStats(load.waiting_sequences, load.open_requests)
    return InfinityCard(**about_model, backend="torch", stats=stats)


def _reranking_to_rank(request: RerankingRequest, most: int) -> ToRank:
    if request.input is None:
        return texts_to_rank(request, most)
    return query_and_documents(request.query, request.input, "input", most, request.rank_fields)


def _pairs_to_score(request: DeepInfraRequest, most: int) -> ToScore:
    check_count(request.documents, "documents", most)
    check_count(request.queries, "queries", most)
    return as_items(request.queries, "queries"), as_items(request.documents, "documents")


_QUERY_AND_DOCUMENTS = {"query": QUERY, "documents": DOCUMENTS}
_PASSAGES = {"query": {"text": QUERY}, "passages": [{"text": text} for text in DOCUMENTS]}

ROUTES = (
    *(
        post_texts(
            path,
            RerankingRequest,
            _reranking_to_rank,
            reranking,
            *(MixedbreadResponse, LlamaCppResponse, list[TeiRanked]),
            wanted=Wanted.RANKING,
            shown=Shown(
                Group.OTHERS, "llama.cpp and mixedbread: rank documents, best first", _QUERY_AND_DOCUMENTS
            ),
        )
        for path in ("/reranking", "/v1/reranking")
    ),
    *(
        post_texts(
            path,
            NvidiaRequest,
            lambda request, most: query_and_documents(request.query, request.passages, "passages", most),
            nvidia,
            NvidiaResponse,
            wanted=Wanted.RANKING,
            shown=Shown(Group.OTHERS, "NVIDIA: rank passages, best first", _PASSAGES),
        )
        for path in ("/v1/ranking", "/v1/retrieval/{name}/reranking")
    ),
    post_texts(
        "/v1/inference/{name}",
        DeepInfraRequest,
        _pairs_to_score,
        deepinfra,
        DeepInfraResponse,
        wanted=Wanted.RANKING,
        shown=Shown(
            Group.OTHERS,
            "DeepInfra: score documents, in their order",
            {"queries": [QUERY], "documents": DOCUMENTS},
        ),
    ),
)

INFINITY_ROUTES = (
    *(
        post_texts(
            f"{base}/rerank",
            InfinityRequest,
            lambda request, most: query_and_documents(
                request.query, request.documents, "documents", most, request.rank_fields
            ),
            infinity,
            InfinityResponse,
            wanted=Wanted.RANKING,
            shown=Shown(Group.OTHERS, "Infinity: rank documents, best first", _QUERY_AND_DOCUMENTS),
        )
        for base in _INFINITY_BASES
    ),
    *(
        get(
            f"{base}/models",
            infinity_models,
            InfinityModels,
            shown=Shown(Group.OTHERS, "Infinity: list the models"),
        )
        for base in _INFINITY_BASES
    ),
)
