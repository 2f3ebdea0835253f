"""The wire types of reranking as others shape it, as msgspec structs: text-embeddings-inference, Voyage,
mixedbread, llama.cpp, NVIDIA, DeepInfra and Infinity."""

from typing import Literal

import msgspec

from maxsimd.api.wire import Content, Contents, NotNegative, Ranked, RerankRequest, Scoring, Usage, Warned


class TeiRanked(msgspec.Struct, omit_defaults=True):
    index: int
    score: float
    text: str | None = None


class VoyageRanked(msgspec.Struct, omit_defaults=True):
    index: int
    relevance_score: float
    document: str | None = None


class VoyageResponse(Warned, kw_only=True):
    object: Literal["list"] = "list"
    data: list[VoyageRanked]
    model: str
    usage: Usage


class RerankingRequest(RerankRequest, kw_only=True):
    """mixedbread's with `input`, llama.cpp's with `documents`, and text-embeddings-inference's with `texts`,
    which llama.cpp takes too."""

    input: Contents | None = None
    return_input: bool | None = None


class MixedbreadRanked(msgspec.Struct, kw_only=True):
    index: int
    score: float
    input: str | None = None
    object: Literal["rank_result"] = "rank_result"


class MixedbreadResponse(Warned, kw_only=True):
    object: Literal["list"] = "list"
    data: list[MixedbreadRanked]
    model: str
    usage: Usage
    top_k: int
    return_input: bool


class LlamaCppResponse(Warned, kw_only=True):
    """Documents have no text, unless the request asks for it."""

    model: str
    object: Literal["list"] = "list"
    usage: Usage
    results: list[Ranked]


class NvidiaRequest(Scoring, kw_only=True):
    """The path may name the model; then `model` is not read."""

    query: Content
    passages: Contents
    top_k: NotNegative | None = None
    truncate: Literal["NONE", "END"] | None = None


class NvidiaRanked(msgspec.Struct):
    index: int
    logit: float


class NvidiaResponse(Warned, kw_only=True):
    rankings: list[NvidiaRanked]
    usage: Usage


class DeepInfraRequest(Scoring, kw_only=True):
    """Pairs of a query and a document, or one query for all documents. The path names the model."""

    queries: Contents
    documents: Contents


class DeepInfraStatus(msgspec.Struct, kw_only=True):
    status: Literal["succeeded"] = "succeeded"
    runtime_ms: int
    cost: float = 0.0
    tokens_generated: int = 0
    tokens_input: int


class DeepInfraResponse(Warned, kw_only=True):
    """`scores` are in the order of the documents."""

    scores: list[float]
    input_tokens: int
    request_id: str
    inference_status: DeepInfraStatus


class InfinityRequest(Scoring, kw_only=True):
    query: Content
    documents: Contents
    top_n: NotNegative | None = None
    return_documents: bool | None = None
    rank_fields: list[str] | None = None


class InfinityRanked(msgspec.Struct):
    relevance_score: float
    index: int
    document: str | None


class InfinityResponse(Warned, kw_only=True):
    object: Literal["rerank"] = "rerank"
    id: str
    model: str
    results: list[InfinityRanked]
    usage: Usage
    created: int
