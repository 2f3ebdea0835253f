"""Reranking in the shapes of mixedbread, llama.cpp, NVIDIA, DeepInfra and Infinity. None of them has a place
for documents without a score. Infinity's routes have a base URL of their own, /infinity, because requests to
its /rerank do not say whose they are. Its other paths answer there as they do without it."""

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from maxsimd.api import wire
from maxsimd.api.answer import Answer, json_page, new_id, now
from maxsimd.api.handlers import rerank
from maxsimd.api.handlers.operating import ModelCard, model_card
from maxsimd.api.handlers.route import Form, Group, Shown, answer_of, get, post
from maxsimd.api.models import Wanted
from maxsimd.api.reading import truncation_by_switch
from maxsimd.api.state import ServerState
from maxsimd.api.wire import about
from maxsimd.engine import InvalidRequestError, RerankResult

INFINITY = "/infinity"
_INFINITY_BASES = (INFINITY, f"{INFINITY}/v1")

_OF_MIXEDBREAD = frozenset({"input", "return_input"})


class RerankingRequest(rerank.RerankRequest, kw_only=True):
    """mixedbread's with `input`, llama.cpp's with `documents`, and text-embeddings-inference's with `texts`,
    which llama.cpp takes too."""

    input: Annotated[wire.Contents | None, about("mixedbread's name for `documents`.", wire.DOCUMENTS)] = None
    return_input: Annotated[bool | None, about("mixedbread's `return_documents`. Default: false.", True)] = (
        None
    )

    def unused_fields(self) -> frozenset[str]:
        if self.input is not None:
            return rerank.OF_TEI | {"documents", "texts", "top_n", "return_documents", "cascade"}
        return (
            _OF_MIXEDBREAD
            | {"cascade"}
            | (rerank.OF_TEI | {"top_k"} if self.texts is None else rerank.NOT_OF_TEI)
        )


class MixedbreadRanked(msgspec.Struct, kw_only=True):
    index: wire.Index
    score: wire.RelevanceScore
    input: rerank.DocumentText = None
    object: Annotated[Literal["rank_result"], about("Always `rank_result`.", "rank_result")] = "rank_result"


class MixedbreadResponse(wire.Warned, kw_only=True):
    object: wire.AlwaysList = "list"
    data: Annotated[list[MixedbreadRanked], about("The documents, best first.")]
    model: wire.Model
    usage: wire.UsageField
    top_k: Annotated[int, about("Number of results.", 2)]
    return_input: Annotated[bool, about("Whether the results have texts.", True)]


class LlamaCppResponse(wire.Warned, kw_only=True):
    """Documents have no text, unless the request asks for it."""

    model: wire.Model
    object: wire.AlwaysList = "list"
    usage: wire.UsageField
    results: Annotated[list[rerank.Ranked], about("The documents, best first.")]


class NvidiaRequest(wire.Scoring, kw_only=True):
    """The path may name the model; then `model` is not read."""

    query: wire.Query
    passages: Annotated[wire.Contents, about("Documents.", [{"text": text} for text in wire.DOCUMENTS])]
    top_k: wire.TopN = None
    TRUNCATES: ClassVar = ("END",)
    truncate: Annotated[
        Literal["NONE", "END"] | None,
        about("Truncate long texts at the end; NONE refuses them. Default: as the server is set.", "END"),
    ] = None

    def unused_fields(self) -> frozenset[str]:
        return frozenset() if self.truncate is None else rerank.WINDOW_FIELDS


class NvidiaRanked(msgspec.Struct):
    index: wire.Index
    logit: wire.RelevanceScore


class NvidiaResponse(wire.Warned, kw_only=True):
    rankings: Annotated[list[NvidiaRanked], about("The passages, best first.")]
    usage: wire.UsageField


class DeepInfraRequest(wire.Scoring, kw_only=True):
    """Pairs of a query and a document, or one query for all documents. The path names the model."""

    queries: Annotated[wire.Contents, about("A query, or one for each document.", [wire.QUERY])]
    documents: wire.Documents


class DeepInfraStatus(msgspec.Struct, kw_only=True):
    status: Annotated[Literal["succeeded"], about("Always `succeeded`.", "succeeded")] = "succeeded"
    runtime_ms: Annotated[int, about("Time taken, in milliseconds.", 12)]
    cost: Annotated[float, about("Always 0.", 0.0)] = 0.0
    tokens_generated: Annotated[int, about("Always 0: nothing is generated.", 0)] = 0
    tokens_input: Annotated[int, about("Tokens of all inputs.", 27)]


class DeepInfraResponse(wire.Warned, kw_only=True):
    scores: Annotated[list[float], about("Scores, in the order of the documents.", [2.1, 7.5])]
    input_tokens: Annotated[int, about("Tokens of all inputs.", 27)]
    request_id: wire.Id
    inference_status: Annotated[DeepInfraStatus, about("Time and tokens.")]


class InfinityRequest(wire.Scoring, kw_only=True):
    query: wire.Query
    documents: wire.Documents
    top_n: wire.TopN = None
    return_documents: rerank.ReturnDocuments = None
    rank_fields: wire.RankFields = None


class InfinityRanked(msgspec.Struct):
    relevance_score: wire.RelevanceScore
    index: wire.Index
    document: rerank.DocumentText


class InfinityResponse(wire.Warned, kw_only=True):
    object: Annotated[Literal["rerank"], about("Always `rerank`.", "rerank")] = "rerank"
    id: wire.Id
    model: wire.Model
    results: Annotated[list[InfinityRanked], about("The documents, best first.")]
    usage: wire.UsageField
    created: wire.Created


class InfinityStats(msgspec.Struct):
    queue_absolute: Annotated[int, about("Sequences that wait.", 0)]
    results_pending: Annotated[int, about("Requests without an answer.", 0)]


class InfinityCard(ModelCard, kw_only=True):
    """A model, with its load."""

    backend: Annotated[str, about("Always `torch`.", "torch")]
    stats: Annotated[InfinityStats, about("Load of the model.")]


class InfinityModels(msgspec.Struct, kw_only=True):
    object: wire.AlwaysList = "list"
    data: Annotated[list[InfinityCard], about("The models.")]


async def reranking(state: ServerState, body: RerankingRequest, texts: rerank.ToRank) -> Answer:
    """Answers in the shape of the service that has the request's field for documents."""
    if body.input is None and body.texts is not None:
        return await rerank.rerank_as_tei(state, body, texts)
    with_text = bool(body.return_documents if body.input is None else body.return_input)

    def build_llama_cpp(result: RerankResult, **common: Any) -> LlamaCppResponse:
        return LlamaCppResponse(results=[rerank.ranked(one, with_text) for one in result.results], **common)

    def build_mixedbread(result: RerankResult, **common: Any) -> MixedbreadResponse:
        data = [
            MixedbreadRanked(index=one.index, score=one.score, input=one.text if with_text else None)
            for one in result.results
        ]
        return MixedbreadResponse(data=data, top_k=len(data), return_input=with_text, **common)

    options: dict[str, Any] = {"top_n": body.top_k, "documents": "input"}
    if body.input is None:
        options = {"top_n": body.top_n}
    build = build_llama_cpp if body.input is None else build_mixedbread
    return await rerank.rerank_in_shape(state, body, texts, build, with_text=with_text, **options)


async def nvidia(state: ServerState, body: NvidiaRequest, texts: rerank.ToRank) -> Answer:
    """Gives a classifier's logits, unless the request wants something else."""
    if body.use_activation is None and body.raw_scores is None and not body.normalize:
        body.raw_scores = True
    truncation = None
    if body.truncate is not None:
        truncation = truncation_by_switch(body.truncate == "END", None, state.config.long_documents, body)

    def build(result: RerankResult, model: str, **common: Any) -> NvidiaResponse:
        return NvidiaResponse(
            rankings=[NvidiaRanked(one.index, one.score) for one in result.results], **common
        )

    return await rerank.rerank_in_shape(
        *(state, body, texts, build),
        top_n=body.top_k,
        documents="passages",
        truncation=truncation,
    )


async def deepinfra(state: ServerState, body: DeepInfraRequest, texts: rerank.ToScore) -> Answer:
    """A list of scores, one for each pair."""
    rerank.check_all_ranked(body)
    if body.score_threshold is not None:
        raise InvalidRequestError(
            "score_threshold cannot leave out scores here, which have no index; leave it out, or use /score",
            "score_threshold",
        )
    scale = rerank.scale_of(state, body)
    with rerank.with_fields_of(body, "queries"):
        result = await state.engine.score(*texts, **rerank.score_options(state, body))
    tokens = result.usage.prompt_tokens
    status = DeepInfraStatus(runtime_ms=round(result.timings.whole * 1e3), tokens_input=tokens)

    def build(warnings: wire.Warnings) -> DeepInfraResponse:
        return DeepInfraResponse(
            scores=[*result.scores],
            input_tokens=tokens,
            request_id=new_id("score"),
            inference_status=status,
            warnings=warnings,
        )

    return rerank.with_scale(await answer_of(state, body, result, build, len(result.scores)), scale)


async def infinity(state: ServerState, body: InfinityRequest, texts: rerank.ToRank) -> Answer:
    """Documents are strings, given on request."""
    with_text = bool(body.return_documents)

    def build(result: RerankResult, **common: Any) -> InfinityResponse:
        results = [
            InfinityRanked(one.score, one.index, one.text if with_text else None) for one in result.results
        ]
        return InfinityResponse(id=new_id("rerank"), results=results, created=now(), **common)

    return await rerank.rerank_in_shape(state, body, texts, build, top_n=body.top_n, with_text=with_text)


async def infinity_models(state: ServerState) -> Answer:
    return json_page(InfinityModels(data=[_infinity_card(state, name) for name in state.model_names]))


def _infinity_card(state: ServerState, name: str) -> InfinityCard:
    """Infinity's client takes no other owner, and shows the load."""
    load = state.serving(name, Wanted.ANYTHING).engine.stats()
    about_model = msgspec.structs.asdict(model_card(state, name)) | {"owned_by": "infinity"}
    stats = InfinityStats(load.waiting_sequences, load.open_requests)
    return InfinityCard(**about_model, backend="torch", stats=stats)


def _reranking_to_rank(request: RerankingRequest, most: int) -> rerank.ToRank:
    if request.input is None:
        return rerank.texts_to_rank(request, most)
    return rerank.query_and_documents(request, most, "input")


_QUERY_AND_DOCUMENTS = {"query": wire.QUERY, "documents": wire.DOCUMENTS}
_PASSAGES = {"query": {"text": wire.QUERY}, "passages": [{"text": text} for text in wire.DOCUMENTS]}

ROUTES = (
    *post(
        ("/reranking", "/v1/reranking"),
        Form(RerankingRequest, _reranking_to_rank, reranking, Wanted.RANKING),
        Shown(Group.OTHERS, "llama.cpp and mixedbread: rank documents, best first", _QUERY_AND_DOCUMENTS),
        *(MixedbreadResponse, LlamaCppResponse, list[rerank.TeiRanked]),
    ),
    *post(
        ("/v1/ranking", "/v1/retrieval/{name}/reranking"),
        Form(
            NvidiaRequest,
            partial(rerank.query_and_documents, name="passages"),
            nvidia,
            Wanted.RANKING,
        ),
        Shown(Group.OTHERS, "NVIDIA: rank passages, best first", _PASSAGES),
        NvidiaResponse,
    ),
    *post(
        ("/v1/inference/{name}",),
        Form(DeepInfraRequest, rerank.read_pairs, deepinfra, Wanted.RANKING),
        Shown(
            Group.OTHERS,
            "DeepInfra: score documents, in their order",
            {"queries": [wire.QUERY], "documents": wire.DOCUMENTS},
        ),
        DeepInfraResponse,
    ),
)

INFINITY_ROUTES = (
    *post(
        [f"{base}/rerank" for base in _INFINITY_BASES],
        Form(InfinityRequest, rerank.query_and_documents, infinity, Wanted.RANKING),
        Shown(Group.OTHERS, "Infinity: rank documents, best first", _QUERY_AND_DOCUMENTS),
        InfinityResponse,
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
