"""The wire types that are text-embeddings-inference's alone, as msgspec structs. Its /rerank and /predict are
in `wire`."""

import msgspec

from maxsimd.api.wire import Direction, HubOptions, Name, NotNegative, Positive
from maxsimd.api.wire_texts import Texts


class TeiTruncating(msgspec.Struct, kw_only=True):
    """What its requests say of texts that are too long, and of the prompt in front of them."""

    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: Name | None = None


class TeiEmbedAllRequest(TeiTruncating, kw_only=True):
    """Texts, or token ids. Of several models `model` says which answers; text-embeddings-inference, which
    serves one, has no such field."""

    model: Name | None = None
    inputs: Texts
    options: HubOptions | None = None


class TeiEmbedRequest(TeiEmbedAllRequest, kw_only=True):
    normalize: bool | None = None
    dimensions: Positive | None = None


class TeiEmbedSparseRequest(TeiEmbedAllRequest, kw_only=True):
    """With `input_type`, which is ours alone, for models that read queries otherwise than documents."""

    input_type: Name | None = None


def sparse_request_of(request: TeiEmbedRequest) -> TeiEmbedSparseRequest:
    """The same request for weights of words."""
    return TeiEmbedSparseRequest(
        inputs=request.inputs,
        truncate=request.truncate,
        truncation_direction=request.truncation_direction,
        prompt_name=request.prompt_name,
    )


class SparseValue(msgspec.Struct):
    """The weight of a word, by the id of its token."""

    index: int
    value: float


class Sentences(msgspec.Struct, kw_only=True):
    source_sentence: str
    sentences: list[str]


class TeiSimilarityRequest(msgspec.Struct, kw_only=True):
    model: Name | None = None
    inputs: Sentences
    parameters: TeiTruncating | None = None
    options: HubOptions | None = None


class TeiVectorsRequest(TeiEmbedRequest, kw_only=True):
    """Of `/` where the model gives vectors: texts as for /embed, or sentences as for /similarity."""

    parameters: TeiTruncating | None = None


class TeiDecodeRequest(msgspec.Struct, kw_only=True):
    model: Name | None = None
    ids: list[NotNegative | list[NotNegative]]
    skip_special_tokens: bool | None = None


class TeiToken(msgspec.Struct):
    """A token and the characters that it stands for; special ones stand for none."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None
