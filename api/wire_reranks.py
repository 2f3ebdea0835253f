"""The wire types of reranking as others shape it, as msgspec structs: text-embeddings-inference, Voyage,
mixedbread, NVIDIA and Infinity."""

from typing import Literal

import msgspec

from maxsimd.api.wire import Content, Contents, NotNegative, Scoring, Usage, Warned


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


class MixedbreadRequest(Scoring, kw_only=True):
    query: Content
    input: Contents
    top_k: NotNegative | None = None
    return_input: bool | None = None
    rank_fields: list[str] | None = None


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


class NvidiaRequest(Scoring, kw_only=True):
    query: Content
    passages: Contents
    truncate: Literal["NONE", "END"] | None = None


class NvidiaRanked(msgspec.Struct):
    index: int
    logit: float


class NvidiaResponse(Warned, kw_only=True):
    rankings: list[NvidiaRanked]
    usage: Usage


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
