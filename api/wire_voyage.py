"""The wire types of Voyage's /v1/multimodalembeddings, as msgspec structs."""

from typing import Any, Literal

import msgspec

from maxsimd.api.wire import Content, Name, Usage, Warned


class MultimodalRequest(msgspec.Struct, kw_only=True):
    """Inputs of parts: texts and pictures."""

    inputs: list[Content]
    model: Name | None = None
    input_type: Name | None = None
    truncation: bool | None = None
    output_encoding: Literal["base64"] | None = None


class MultimodalEmbedding(msgspec.Struct, kw_only=True):
    """A list of numbers, or base64 of float32."""

    embedding: Any
    index: int
    object: Literal["embedding"] = "embedding"


class MultimodalResponse(Warned, kw_only=True):
    data: list[MultimodalEmbedding]
    model: str
    usage: Usage
    object: Literal["list"] = "list"
