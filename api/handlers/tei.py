"""The routes that only text-embeddings-inference has: vectors, similarities and decoding in its shapes, lists
without a frame; and SageMaker's /invocations, where the fields of a request tell what it wants."""

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np

from maxsimd.api import reading, wire
from maxsimd.api.answer import Answer, wire_answer
from maxsimd.api.handlers import embeddings
from maxsimd.api.handlers.classification import (
    CLASSIFY,
    PREDICT,
    PREDICTIONS,
    ClassifyResponse,
    LabelsResponse,
)
from maxsimd.api.handlers.rerank import PAIRED_FIELDS, RANK, RANKINGS, SCORE, ScoreResponse
from maxsimd.api.handlers.route import (
    Fields,
    Form,
    Group,
    Shown,
    answer_of,
    answered_as,
    model_of,
    no_texts,
    post,
    tei_headers,
)
from maxsimd.api.handlers.token_classification import (
    CLASSIFY_TOKENS,
    PREDICT_TOKENS,
    TOKEN_PREDICTIONS,
    TokenClassifyResponse,
)
from maxsimd.api.handlers.tokens import check_number_decoded, decoded
from maxsimd.api.models import Wanted
from maxsimd.api.state import ServerState
from maxsimd.api.wire import about
from maxsimd.engine import InvalidRequestError, RequestTooLargeError
from maxsimd.engine.device.facts import ModelFacts

# Bytes of a word in a sparse answer: an object and two numbers.
_BYTES_A_WORD = 120
_NUMBERED = re.compile(r"\binputs\[(\d+)\]")


class TeiTruncating(wire.RequestBody, kw_only=True):
    """Options for long texts, and for the prompt before a text."""

    truncate: wire.Truncate = None
    truncation_direction: wire.TruncationDirection = None
    prompt_name: wire.PromptName = None


class TeiEmbedAllRequest(TeiTruncating, kw_only=True):
    """Texts, or token ids."""

    model: wire.ModelField = None
    inputs: wire.Texts
    options: wire.Options = None


class TeiEmbedRequest(TeiEmbedAllRequest, kw_only=True):
    normalize: Annotated[bool | None, about("Scale vectors to length 1. Default: true.", True)] = None
    dimensions: wire.Dimensions = None


class TeiEmbedSparseRequest(TeiEmbedAllRequest, kw_only=True):
    input_type: wire.InputType = None


class SparseValue(msgspec.Struct):
    """The weight of a word."""

    index: Annotated[int, about("Token id of the word.", 2054)]
    value: Annotated[float, about("Weight of the word.", 1.3)]


class Sentences(msgspec.Struct, kw_only=True):
    source_sentence: Annotated[str, about("Text to compare with the others.", wire.QUERY)]
    sentences: Annotated[list[str], about("Texts to compare it with.", wire.DOCUMENTS)]


_Parameters = Annotated[TeiTruncating | None, about("How sentences are read.")]


class TeiSimilarityRequest(msgspec.Struct, kw_only=True):
    model: wire.ModelField = None
    inputs: Annotated[Sentences, about("A text, and those to compare it with.")]
    parameters: _Parameters = None
    options: wire.Options = None


class TeiVectorsRequest(TeiEmbedRequest, kw_only=True):
    """A request to `/` for vectors: texts as for /embed, or sentences as for /similarity."""

    parameters: _Parameters = None

    def unused_fields(self) -> frozenset[str]:
        if isinstance(self.inputs, dict):
            return frozenset({"normalize", "dimensions", "truncate", "truncation_direction", "prompt_name"})
        return frozenset({"parameters"})


class TeiDecodeRequest(msgspec.Struct, kw_only=True):
    model: wire.ModelField = None
    ids: Annotated[
        list[wire.NotNegative | list[wire.NotNegative]], about("Token ids, or lists of them.", [[2054, 2003]])
    ]
    skip_special_tokens: Annotated[bool | None, about("Leave special tokens out. Default: true.", True)] = (
        None
    )


async def _run(
    state: ServerState,
    options: TeiTruncating,
    inputs: reading.Inputs,
    method: Callable[..., Awaitable[Any]],
    **more: Any,
) -> tuple[Mapping[str, str], Any]:
    """The headers for the inputs, and the result of the engine's method."""
    reading.check_token_ids(inputs, state.config.accept_token_ids, "inputs")
    headers = tei_headers(state, inputs)
    truncation = reading.truncation_by_switch(
        options.truncate, options.truncation_direction, state.config.long_documents
    )
    with reading.with_request_field_names(input="inputs"):
        result = await method(
            inputs,
            input_type=embeddings.input_type_of(state, getattr(options, "input_type", None)),
            prompt_name=embeddings.prompt_name_of(state, options.prompt_name),
            truncation=truncation,
            tenant=state.tenant,
            timeout=state.timeout,
            **more,
        )
    return headers, result


async def embed(state: ServerState, body: TeiEmbedRequest, inputs: reading.Inputs) -> Answer:
    """A vector for each text, of length 1 unless `normalize` is false and the model does not normalize."""
    # Haystack's client always sends `normalize`, so this is no error.
    must_scale, vain = embeddings.scaling(state, body.normalize is not False, "normalize")
    embeddings.check_embeddings(state, len(inputs), body.dimensions)
    headers, result = await _run(state, body, inputs, state.engine.embed, dimensions=body.dimensions)

    def build(warnings: wire.Warnings) -> Any:
        rows = embeddings.in_unit_length(result.embeddings) if must_scale else result.embeddings
        return [embeddings.encode_rows(row) for row in rows]

    size = result.embeddings.size
    return await answer_of(state, body, result, build, size, tei=headers, more_warnings=vain)


async def embed_all(state: ServerState, body: TeiEmbedAllRequest, inputs: reading.Inputs) -> Answer:
    """A vector for each token."""
    more = {"max_tokens": embeddings.most_vectors(state, None), "return_tokens": False}
    headers, result = await _run(state, body, inputs, state.engine.embed_tokens, **more)

    def build(warnings: wire.Warnings) -> Any:
        return [embeddings.encode_rows(matrix) for matrix in result.embeddings]

    size = sum(matrix.size for matrix in result.embeddings)
    return await answer_of(state, body, result, build, size, tei=headers)


async def embed_sparse(state: ServerState, body: TeiEmbedAllRequest, inputs: reading.Inputs) -> Answer:
    """Weights of words, by the ids of their tokens."""
    if "sparse_embed" not in state.engine.facts.dims:
        raise InvalidRequestError("this model gives no sparse vectors; use /embed or /embed_all", "model")
    headers, result = await _run(state, body, inputs, state.engine.embed_sparse)
    num_words = sum(len(vector.indices) for vector in result.embeddings)
    most = state.bodies.most // _BYTES_A_WORD
    if num_words > most:
        raise RequestTooLargeError(
            f"the vectors have {num_words} words together, and an answer has room for {most}; send fewer "
            "texts at a time"
        )

    def build(warnings: wire.Warnings) -> Any:
        return [
            embeddings.encode_entries([*map(SparseValue, vector.indices.tolist(), vector.values.tolist())])
            for vector in result.embeddings
        ]

    return await answer_of(state, body, result, build, num_words, tei=headers)


async def similarity(state: ServerState, body: TeiSimilarityRequest, texts: reading.Inputs) -> Answer:
    """Cosines between one text and each of many."""
    options = body.parameters or TeiTruncating()
    try:
        headers, result = await _run(state, options, texts, state.engine.embed)
    except InvalidRequestError as error:
        raise InvalidRequestError(_NUMBERED.sub(_sentence_name, str(error)), error.param) from error

    def build(warnings: wire.Warnings) -> Any:
        rows = embeddings.in_unit_length(result.embeddings.astype(np.float64))
        return (rows[1:] @ rows[0]).tolist()

    return await answer_of(state, body, result, build, result.embeddings.size, tei=headers)


def _sentence_name(found: re.Match[str]) -> str:
    """The place in the request of a text: the engine counts the one to compare first."""
    place = int(found[1]) - 1
    return f"inputs.sentences[{place}]" if place >= 0 else "inputs.source_sentence"


async def decode(state: ServerState, body: TeiDecodeRequest, nothing: None) -> Answer:
    """The texts of token ids, without special tokens unless the request wants them."""
    lists = await state.engine.in_thread(
        lambda: _id_lists(body.ids, state.config.max_documents), len(body.ids)
    )
    tokenizer, skip = state.engine.tokenizer, body.skip_special_tokens is not False
    texts = await state.engine.in_thread(
        lambda: [decoded(tokenizer, ids, "ids", skip) for ids in lists], sum(map(len, lists))
    )
    return await wire_answer(lambda: texts, len(texts), sum(map(len, texts)))


def _id_lists(ids: list[int | list[int]], most: int) -> list[list[int]]:
    lists = [each for each in ids if isinstance(each, list)]
    if not lists:
        lists = [[each for each in ids if isinstance(each, int)]]
    elif len(lists) < len(ids):
        raise InvalidRequestError("ids must be token ids or lists of those, not both", "ids")
    reading.check_count(lists, "ids", most)
    check_number_decoded(sum(map(len, lists)), "ids")
    return lists


_inputs_of = partial(embeddings.read_inputs, name="inputs")


def _sentences_of(request: TeiSimilarityRequest, most: int) -> reading.Inputs:
    """The text to compare, and then those to compare it with."""
    sentences = request.inputs.sentences
    reading.check_count(sentences, "inputs.sentences", most)
    if not sentences:
        raise InvalidRequestError("inputs.sentences is empty; give at least one text", "inputs")
    return [request.inputs.source_sentence, *sentences]


def inputs_or_sentences_of(
    request: TeiVectorsRequest, most: int
) -> tuple[reading.Inputs, TeiSimilarityRequest | None]:
    """The texts, and the request for similarities if it is one."""
    if not isinstance(request.inputs, dict):
        return _inputs_of(request, most), None
    whole = {"inputs": request.inputs, "parameters": request.parameters}
    compared = msgspec.convert(whole, type=TeiSimilarityRequest)
    return _sentences_of(compared, most), compared


async def embed_or_compare(
    state: ServerState,
    body: TeiVectorsRequest,
    found: tuple[reading.Inputs, TeiSimilarityRequest | None],
) -> Answer:
    inputs, compared = found
    if compared is not None:
        return await similarity(state, compared, inputs)
    if state.engine.facts.dims.keys() == {"sparse_embed"}:
        for name in ("normalize", "dimensions"):
            if getattr(body, name) not in (None, False):
                raise InvalidRequestError(
                    f"{name} is for dense vectors, and this model gives sparse ones", name
                )
        return await embed_sparse(state, body, inputs)
    return await embed(state, body, inputs)


VECTORS = Form(TeiVectorsRequest, inputs_or_sentences_of, embed_or_compare, Wanted.VECTORS)


# The meanings of `inputs` and of `input` for models that classify, by their task.
_FORMS_OF_INPUTS: dict[str, Form[Any, Any]] = {"classify": PREDICT, "token_classify": PREDICT_TOKENS}
_FORMS_OF_INPUT: dict[str, Form[Any, Any]] = {"classify": CLASSIFY, "token_classify": CLASSIFY_TOKENS}


def _form_for_model(model: ModelFacts) -> Form[Any, Any]:
    """The meaning of a request to `/` for this model."""
    if model.score_type.scores_together or (model.score_task == "classify" and len(model.labels) == 1):
        return RANK
    return _FORMS_OF_INPUTS.get(model.score_task) or VECTORS


def _wanted(state: ServerState, fields: Fields) -> Wanted:
    """The named model gives the request its meaning, or the first of several."""
    named = state.serving(model_of(fields), Wanted.ANYTHING)
    return _form_for_model(named.engine.facts).model_wanted(state, fields)


async def _answer_by_model(state: ServerState, fields: Fields, nothing: None) -> Answer:
    """text-embeddings-inference's `/`: embeds, reranks or predicts, whichever the model is for."""
    # Several models answer only cascades.
    form = RANK if state.models is not None else _form_for_model(state.engine.facts)
    return await answered_as(form, state, fields, "/")


_VECTORS_OF_TEXTS = list[list[float]]
_WEIGHTS = list[list[SparseValue]]
_BY_KIND = (_VECTORS_OF_TEXTS, _WEIGHTS, list[float], *RANKINGS, *PREDICTIONS, *TOKEN_PREDICTIONS)

_INPUTS = {"inputs": wire.DOCUMENTS}
_SENTENCES = {"inputs": {"source_sentence": wire.QUERY, "sentences": wire.DOCUMENTS}}

ROUTES = (
    *post(
        ("/embed",),
        Form(TeiEmbedRequest, _inputs_of, embed, Wanted.VECTORS),
        Shown(Group.TEI, "Embed texts, one vector each", _INPUTS),
        _VECTORS_OF_TEXTS,
    ),
    *post(
        ("/embed_all",),
        Form(TeiEmbedAllRequest, _inputs_of, embed_all, Wanted.TOKEN_VECTORS),
        Shown(Group.TEI, "Embed texts, one vector per token", _INPUTS),
        list[list[list[float]]],
    ),
    *post(
        ("/embed_sparse",),
        Form(TeiEmbedSparseRequest, _inputs_of, embed_sparse, Wanted.SPARSE_VECTORS),
        Shown(Group.TEI, "Weigh the words of texts", _INPUTS),
        _WEIGHTS,
    ),
    *post(
        ("/similarity",),
        Form(TeiSimilarityRequest, _sentences_of, similarity, Wanted.VECTORS),
        Shown(Group.TEI, "Compare a text with others, by cosine", _SENTENCES),
        list[float],
    ),
    *post(
        ("/decode",),
        Form(TeiDecodeRequest, no_texts, decode, Wanted.ANYTHING),
        Shown(Group.TEI, "Join tokens to texts", {"ids": [[2054, 2003]]}),
        list[str],
    ),
    *post(
        ("/",),
        Form(Fields, no_texts, _answer_by_model, _wanted),
        Shown(Group.TEI, "Embed, rank or classify, as the model does", _INPUTS),
        *_BY_KIND,
        kinds=(VECTORS.kind, RANK.kind, PREDICT.kind, PREDICT_TOKENS.kind),
    ),
)


async def invocations(state: ServerState, body: Fields, nothing: None) -> Answer:
    form = _form_by_fields(body, state.engine.facts.score_task)
    if form is None:
        raise InvalidRequestError(
            "send query and documents to rank, queries and documents to score, inputs or input to embed or "
            "classify"
        )
    return await answered_as(form, state, body, "/invocations")


def _form_by_fields(fields: Fields, task: str) -> Form[Any, Any] | None:
    """Decides as vLLM and text-embeddings-inference do, for a model of this task."""
    if "query" in fields:
        return RANK
    if PAIRED_FIELDS & fields.keys():
        return SCORE
    if "inputs" in fields:
        return _FORMS_OF_INPUTS.get(task) or VECTORS
    if "input" in fields or "messages" in fields:
        if "task" in fields:
            return embeddings.POOL
        return (_FORMS_OF_INPUT.get(task) if "input" in fields else None) or embeddings.EMBED
    return None


def wanted_by_fields(state: ServerState, fields: Fields) -> Wanted:
    form = _form_by_fields(fields, "embed")
    return Wanted.VECTORS if form is None else form.model_wanted(state, fields)


INVOCATION_ROUTES = post(
    ("/invocations",),
    Form(Fields, no_texts, invocations, wanted_by_fields),
    Shown(
        Group.OTHERS,
        "SageMaker: rank, score, embed or classify, by the fields",
        {"query": wire.QUERY, "documents": wire.DOCUMENTS},
    ),
    *(
        ScoreResponse,
        embeddings.EmbeddingsResponse,
        embeddings.PoolingResponse,
        ClassifyResponse,
        LabelsResponse,
        TokenClassifyResponse,
        *_BY_KIND,
    ),
    kinds=tuple(
        form.kind
        for form in (
            *(RANK, SCORE, embeddings.EMBED, embeddings.POOL, CLASSIFY, CLASSIFY_TOKENS),
            *(VECTORS, PREDICT, PREDICT_TOKENS),
        )
    ),
)
