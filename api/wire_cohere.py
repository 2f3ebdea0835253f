"""The wire types of Cohere's /v1/embed and /v2/embed, as msgspec structs. Its rerank is in `wire`."""

from typing import Any, Literal

import msgspec

from maxsimd.api.wire import Content, Name, Positive, Warned

EmbeddingType = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]


class CohereEmbedRequest(msgspec.Struct, kw_only=True):
    """`texts`, or `images`, or, in the second version, `inputs` of content parts."""

    model: Name | None = None
    texts: list[str] | None = None
    inputs: list[Content] | None = None
    images: list[str] | None = None
    input_type: Name | None = None
    embedding_types: list[EmbeddingType] | None = None
    output_dimension: Positive | None = None
    truncate: Literal["NONE", "START", "END"] | None = None


class CohereEmbedResponse(Warned, kw_only=True):
    """`embeddings` are lists of numbers, or such lists by their type."""

    id: str
    embeddings: Any
    texts: list[str]
    meta: dict[str, Any]
    response_type: Literal["embeddings_floats", "embeddings_by_type"]
