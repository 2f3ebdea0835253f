"""The routes that only text-embeddings-inference has: vectors, similarities and decoding in its shapes, lists
without a frame; and SageMaker's /invocations, where the fields of a request tell what it wants."""

import re
from typing import Annotated, Any

import msgspec
import numpy as np

from maxsimd.api.answer import Answer, wire_answer
from maxsimd.api.handlers.classification import (
    PREDICTIONS,
    ClassifyRequest,
    ClassifyResponse,
    LabelsResponse,
    PredictRequest,
    classified_inputs,
    classify,
    predict,
    sequences_of,
)
from maxsimd.api.handlers.embeddings import (
    NORMALIZES_ANYWAY,
    EmbeddingsRequest,
    EmbeddingsResponse,
    PoolingRequest,
    PoolingResponse,
    check_embeddings,
    embeddings,
    encode_entries,
    encode_rows,
    in_unit_length,
    input_type_of,
    most_vectors,
    pooling,
    read_inputs_or_chat,
    wanted_by_task,
)
from maxsimd.api.handlers.rerank import (
    PAIRED_FIELDS,
    RANKINGS,
    RerankRequest,
    ScoreRequest,
    ScoreResponse,
    rerank,
    score,
    texts_to_rank,
    texts_to_score,
)
from maxsimd.api.handlers.route import (
    Fields,
    Form,
    Group,
    Shown,
    TeiHeaders,
    answered_as,
    model_of,
    post,
    post_texts,
)
from maxsimd.api.handlers.tokens import check_number_decoded, decoded
from maxsimd.api.models import Wanted
from maxsimd.api.reading import (
    Inputs,
    as_inputs,
    check_count,
    check_token_ids,
    tei_truncation,
    with_request_field_names,
)
from maxsimd.api.state import ServerState
from maxsimd.api.wire import (
    DOCUMENTS,
    QUERY,
    InputType,
    ModelField,
    NotNegative,
    Options,
    Positive,
    PromptName,
    RequestBody,
    Texts,
    Truncate,
    TruncationDirection,
    about,
)
from maxsimd.engine import EmbedResult, InvalidRequestError, RequestTooLargeError, Truncation
from maxsimd.engine.config import ScoreType
from maxsimd.engine.device.facts import ModelFacts

# Bytes of a word in a sparse answer: an object and two numbers.
_BYTES_A_WORD = 120
_NUMBERED = re.compile(r"\binputs\[(\d+)\]")


class TeiTruncating(RequestBody, kw_only=True):
    """Options for long texts, and for the prompt before a text."""

    truncate: Truncate = None
    truncation_direction: TruncationDirection = None
    prompt_name: PromptName = None


class TeiEmbedAllRequest(TeiTruncating, kw_only=True):
    """Texts, or token ids."""

    model: ModelField = None
    inputs: Texts
    options: Options = None


class TeiEmbedRequest(TeiEmbedAllRequest, kw_only=True):
    normalize: Annotated[bool | None, about("Scale vectors to length 1. Default: true.", True)] = None
    dimensions: Annotated[Positive | None, about("Length of the vectors. Default: the model's.", 128)] = None


class TeiEmbedSparseRequest(TeiEmbedAllRequest, kw_only=True):
    input_type: InputType = None


class SparseValue(msgspec.Struct):
    """The weight of a word."""

    index: Annotated[int, about("Token id of the word.", 2054)]
    value: Annotated[float, about("Weight of the word.", 1.3)]


class Sentences(msgspec.Struct, kw_only=True):
    source_sentence: Annotated[str, about("Text to compare with the others.", QUERY)]
    sentences: Annotated[list[str], about("Texts to compare it with.", DOCUMENTS)]


_Parameters = Annotated[TeiTruncating | None, about("How sentences are read.")]


class TeiSimilarityRequest(msgspec.Struct, kw_only=True):
    model: ModelField = None
    inputs: Annotated[Sentences, about("A text, and those to compare it with.")]
    parameters: _Parameters = None
    options: Options = None


class TeiVectorsRequest(TeiEmbedRequest, kw_only=True):
    """A request to `/` for vectors: texts as for /embed, or sentences as for /similarity."""

    parameters: _Parameters = None

    def unused_fields(self) -> frozenset[str]:
        if isinstance(self.inputs, dict):
            return frozenset({"normalize", "dimensions", "truncate", "truncation_direction", "prompt_name"})
        return frozenset({"parameters"})


class TeiDecodeRequest(msgspec.Struct, kw_only=True):
    model: ModelField = None
    ids: Annotated[
        list[NotNegative | list[NotNegative]], about("Token ids, or lists of them.", [[2054, 2003]])
    ]
    skip_special_tokens: Annotated[bool | None, about("Leave special tokens out. Default: true.", True)] = (
        None
    )


def _truncation_of(state: ServerState, body: TeiTruncating) -> Truncation:
    return tei_truncation(
        body.truncate, body.truncation_direction, state.config.long_documents, may_window=False
    )


async def embed(state: ServerState, body: TeiEmbedRequest, inputs: Inputs, tenant: str) -> Answer:
    """A vector for each text, of length 1 unless `normalize` is false and the model does not normalize."""
    normalises = "embed" in state.engine.facts.normalized
    headers = TeiHeaders(state, inputs)
    check_embeddings(state, len(inputs), body.dimensions)
    result = await _embedded(state, body, inputs, tenant, dimensions=body.dimensions)
    stay_as_they_are = normalises or "embed" not in state.engine.facts.dims or body.normalize is False

    def build() -> Any:
        rows = result.embeddings if stay_as_they_are else in_unit_length(result.embeddings)
        return [encode_rows(row) for row in rows]

    answer = await wire_answer(build, result.embeddings.size)
    # Haystack's client always sends it, so this is no error.
    is_vain = normalises and body.normalize is False
    return headers.added_to(answer, result, *([NORMALIZES_ANYWAY.format("normalize")] if is_vain else []))


async def embed_all(state: ServerState, body: TeiEmbedAllRequest, inputs: Inputs, tenant: str) -> Answer:
    """A vector for each token."""
    check_token_ids(inputs, state.config.accept_token_ids, "inputs")
    headers = TeiHeaders(state, inputs)
    with with_request_field_names(input="inputs"):
        result = await state.engine.embed_tokens(
            inputs,
            prompt_name=body.prompt_name,
            truncation=_truncation_of(state, body),
            tenant=tenant,
            max_tokens=most_vectors(state, None),
            return_tokens=False,
        )
    answer = await wire_answer(
        lambda: [encode_rows(matrix) for matrix in result.embeddings],
        sum(matrix.size for matrix in result.embeddings),
    )
    return headers.added_to(answer, result)


async def embed_sparse(
    state: ServerState, body: TeiEmbedSparseRequest, inputs: Inputs, tenant: str
) -> Answer:
    """Weights of words, by the ids of their tokens."""
    if "sparse_embed" not in state.engine.facts.dims:
        raise InvalidRequestError("this model gives no sparse vectors; use /embed or /embed_all", "model")
    check_token_ids(inputs, state.config.accept_token_ids, "inputs")
    headers = TeiHeaders(state, inputs)
    with with_request_field_names(input="inputs"):
        result = await state.engine.embed_sparse(
            inputs,
            input_type=input_type_of(body.input_type),
            prompt_name=body.prompt_name,
            truncation=_truncation_of(state, body),
            tenant=tenant,
        )

    num_words = sum(len(vector.indices) for vector in result.embeddings)
    most = (state.config.max_bodies_mb << 20) // _BYTES_A_WORD
    if num_words > most:
        raise RequestTooLargeError(
            f"the vectors have {num_words} words together, and an answer has room for {most}; send fewer "
            "texts at a time"
        )

    def build() -> Any:
        return [
            encode_entries([*map(SparseValue, vector.indices.tolist(), vector.values.tolist())])
            for vector in result.embeddings
        ]

    answer = await wire_answer(build, num_words)
    return headers.added_to(answer, result)


async def similarity(state: ServerState, body: TeiSimilarityRequest, texts: Inputs, tenant: str) -> Answer:
    """Cosines between one text and each of many."""
    options = body.parameters or TeiTruncating()
    headers = TeiHeaders(state, texts)
    try:
        result = await _embedded(state, options, texts, tenant)
    except InvalidRequestError as error:
        raise InvalidRequestError(_NUMBERED.sub(_sentence_name, str(error)), error.param) from error

    def build() -> Any:
        rows = in_unit_length(result.embeddings.astype(np.float64))
        return (rows[1:] @ rows[0]).tolist()

    answer = await wire_answer(build, result.embeddings.size)
    return headers.added_to(answer, result)


def _sentence_name(found: re.Match[str]) -> str:
    """The place in the request of a text: the engine counts the one to compare first."""
    place = int(found[1]) - 1
    return f"inputs.sentences[{place}]" if place >= 0 else "inputs.source_sentence"


async def decode(state: ServerState, body: TeiDecodeRequest) -> Answer:
    """The texts of token ids, without special tokens unless the request wants them."""
    lists = await state.engine.in_thread(
        lambda: _id_lists(body.ids, state.config.max_documents), len(body.ids)
    )
    tokenizer, skip = state.engine.tokenizer, body.skip_special_tokens is not False
    texts = await state.engine.in_thread(
        lambda: [decoded(tokenizer, ids, "ids", skip) for ids in lists], sum(map(len, lists))
    )
    return await wire_answer(lambda: texts, len(texts), sum(map(len, texts)))


async def _embedded(
    state: ServerState, options: TeiTruncating, inputs: Inputs, tenant: str, **more: Any
) -> EmbedResult:
    check_token_ids(inputs, state.config.accept_token_ids, "inputs")
    with with_request_field_names(input="inputs"):
        return await state.engine.embed(
            inputs,
            prompt_name=options.prompt_name,
            truncation=_truncation_of(state, options),
            tenant=tenant,
            **more,
        )


def _id_lists(ids: list[int | list[int]], most: int) -> list[list[int]]:
    lists = [each for each in ids if isinstance(each, list)]
    if not lists:
        lists = [[each for each in ids if isinstance(each, int)]]
    elif len(lists) < len(ids):
        raise InvalidRequestError("ids must be token ids or lists of those, not both", "ids")
    check_count(lists, "ids", most)
    check_number_decoded(sum(map(len, lists)), "ids")
    return lists


def _inputs_of(request: TeiEmbedRequest | TeiEmbedAllRequest, most: int) -> Inputs:
    return as_inputs(request.inputs, most, "inputs")


def _sentences_of(request: TeiSimilarityRequest, most: int) -> Inputs:
    """The text to compare, and then those to compare it with."""
    sentences = request.inputs.sentences
    check_count(sentences, "inputs.sentences", most)
    if not sentences:
        raise InvalidRequestError("inputs.sentences is empty; give at least one text", "inputs")
    return [request.inputs.source_sentence, *sentences]


def inputs_or_sentences_of(
    request: TeiVectorsRequest, most: int
) -> tuple[Inputs, TeiSimilarityRequest | None]:
    """The texts, and the request for similarities if it is one."""
    if not isinstance(request.inputs, dict):
        return _inputs_of(request, most), None
    whole = {"inputs": request.inputs, "parameters": request.parameters}
    compared = msgspec.convert(whole, type=TeiSimilarityRequest)
    return _sentences_of(compared, most), compared


async def embed_or_compare(
    state: ServerState,
    body: TeiVectorsRequest,
    found: tuple[Inputs, TeiSimilarityRequest | None],
    tenant: str,
) -> Answer:
    inputs, compared = found
    if compared is not None:
        return await similarity(state, compared, inputs, tenant)
    if state.engine.facts.dims.keys() == {"sparse_embed"}:
        for name in ("normalize", "dimensions"):
            if getattr(body, name) not in (None, False):
                raise InvalidRequestError(
                    f"{name} is for dense vectors, and this model gives sparse ones", name
                )
        return await embed_sparse(state, _sparse_request(body), inputs, tenant)
    return await embed(state, body, inputs, tenant)


def _sparse_request(request: TeiEmbedRequest) -> TeiEmbedSparseRequest:
    """The same request for weights of words."""
    return TeiEmbedSparseRequest(
        inputs=request.inputs,
        truncate=request.truncate,
        truncation_direction=request.truncation_direction,
        prompt_name=request.prompt_name,
    )


RANK = Form(RerankRequest, texts_to_rank, rerank)
PREDICT = Form(PredictRequest, sequences_of, predict)
VECTORS = Form(TeiVectorsRequest, inputs_or_sentences_of, embed_or_compare)


def _form_for_model(model: ModelFacts) -> Form:
    """The meaning of a request to `/` for this model."""
    if model.score_type is ScoreType.LISTWISE or (model.score_task == "classify" and len(model.labels) == 1):
        return RANK
    return PREDICT if model.score_task == "classify" else VECTORS


def _wanted(state: ServerState, fields: Fields) -> Wanted:
    """The named model gives the request its meaning, or the first of several."""
    form = _form_for_model(state.serving(model_of(fields), Wanted.ANYTHING).engine.facts)
    if form is RANK:
        return Wanted.RANKING if fields.get("cascade") is None else Wanted.CASCADE
    return Wanted.CLASSES if form is PREDICT else Wanted.VECTORS


async def _answer_by_model(state: ServerState, fields: Fields, nothing: None, tenant: str) -> Answer:
    """text-embeddings-inference's `/`: embeds, reranks or predicts, whichever the model is for."""
    # Several models answer only cascades.
    form = RANK if state.models is not None else _form_for_model(state.engine.facts)
    return await answered_as(form, state, fields, tenant, "/")


_VECTORS_OF_TEXTS = list[list[float]]
_WEIGHTS = list[list[SparseValue]]
_BY_KIND = (_VECTORS_OF_TEXTS, _WEIGHTS, list[float], *RANKINGS, *PREDICTIONS)

_INPUTS = {"inputs": DOCUMENTS}
_SENTENCES = {"inputs": {"source_sentence": QUERY, "sentences": DOCUMENTS}}

ROUTES = (
    post_texts(
        "/embed",
        TeiEmbedRequest,
        _inputs_of,
        embed,
        _VECTORS_OF_TEXTS,
        wanted=Wanted.VECTORS,
        shown=Shown(Group.TEI, "Embed texts, one vector each", _INPUTS),
    ),
    post_texts(
        "/embed_all",
        TeiEmbedAllRequest,
        _inputs_of,
        embed_all,
        list[list[list[float]]],
        wanted=Wanted.TOKEN_VECTORS,
        shown=Shown(Group.TEI, "Embed texts, one vector per token", _INPUTS),
    ),
    post_texts(
        "/embed_sparse",
        TeiEmbedSparseRequest,
        _inputs_of,
        embed_sparse,
        _WEIGHTS,
        wanted=Wanted.SPARSE_VECTORS,
        shown=Shown(Group.TEI, "Weigh the words of texts", _INPUTS),
    ),
    post_texts(
        "/similarity",
        TeiSimilarityRequest,
        _sentences_of,
        similarity,
        list[float],
        wanted=Wanted.VECTORS,
        shown=Shown(Group.TEI, "Compare a text with others, by cosine", _SENTENCES),
    ),
    post(
        "/decode",
        TeiDecodeRequest,
        decode,
        list[str],
        shown=Shown(Group.TEI, "Join tokens to texts", {"ids": [[2054, 2003]]}),
    ),
    post_texts(
        "/",
        Fields,
        lambda fields, most: None,
        _answer_by_model,
        *_BY_KIND,
        wanted=_wanted,
        kinds=(TeiVectorsRequest, RerankRequest, PredictRequest),
        shown=Shown(Group.TEI, "Embed, rank or classify, as the model does", _INPUTS),
    ),
)


_SCORE = Form(ScoreRequest, texts_to_score, score)
_POOL = Form(PoolingRequest, read_inputs_or_chat, pooling)
_CLASSIFY = Form(ClassifyRequest, classified_inputs, classify)
_EMBED = Form(EmbeddingsRequest, read_inputs_or_chat, embeddings)


async def invocations(state: ServerState, body: Fields, nothing: None, tenant: str) -> Answer:
    return await answered_as(_form_by_fields(state, body), state, body, tenant, "/invocations")


def _form_by_fields(state: ServerState, fields: Fields) -> Form:
    """Decides as vLLM and text-embeddings-inference do."""
    if "query" in fields:
        return RANK
    if PAIRED_FIELDS & fields.keys():
        return _SCORE
    classifies = state.engine.facts.score_task == "classify"
    if "inputs" in fields:
        return PREDICT if classifies else VECTORS
    if "input" in fields or "messages" in fields:
        if "task" in fields:
            return _POOL
        return _CLASSIFY if classifies and "input" in fields else _EMBED
    raise InvalidRequestError(
        "send query and documents to rank, queries and documents to score, inputs or input to embed or "
        "classify"
    )


def wanted_by_fields(state: ServerState, fields: Fields) -> Wanted:
    if "query" in fields:
        return Wanted.RANKING if fields.get("cascade") is None else Wanted.CASCADE
    if PAIRED_FIELDS & fields.keys():
        return Wanted.RANKING
    if "inputs" in fields:
        return Wanted.VECTORS
    return wanted_by_task(fields.get("task"), fields.get("encoding"))


INVOCATION_ROUTES = (
    post_texts(
        "/invocations",
        Fields,
        lambda body, most: None,
        invocations,
        *(ScoreResponse, EmbeddingsResponse, PoolingResponse, ClassifyResponse, LabelsResponse, *_BY_KIND),
        wanted=wanted_by_fields,
        kinds=(
            *(RerankRequest, ScoreRequest, EmbeddingsRequest, PoolingRequest, ClassifyRequest),
            *(TeiVectorsRequest, PredictRequest),
        ),
        shown=Shown(
            Group.OTHERS,
            "SageMaker: rank, score, embed or classify, by the fields",
            {"query": QUERY, "documents": DOCUMENTS},
        ),
    ),
)
