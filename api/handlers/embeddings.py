"""The routes that give vectors, /v1/embeddings, /v1/multi-vector and /pooling: their wire types, and the
vectors as numbers of 32 bits down to one, in JSON, in base64, or as a file of safetensors."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args

import msgspec
import numpy as np
import torch
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray
from safetensors.torch import save

from maxsimd.api import reading, wire
from maxsimd.api.answer import Answer, new_id, now, quoted, usage_of, wire_answer
from maxsimd.api.handlers.route import Fields, Form, Group, Shown, field_of, post
from maxsimd.api.models import Wanted
from maxsimd.api.state import ServerState
from maxsimd.api.wire import about
from maxsimd.engine import (
    ClassifyResult,
    EmbedResult,
    InvalidRequestError,
    Muvera,
    RequestTooLargeError,
    TokenClassifyResult,
    TokenEmbedResult,
)
from maxsimd.engine.processors.token_classification import probabilities
from maxsimd.engine.requests import InputType as EngineInputType
from maxsimd.engine.workers import run_in_thread_if_large

# Bytes of a number in an answer, as text and while it is made; and of a label.
_BYTES_A_NUMBER, _BYTES_A_LABEL = 24, 160
_SHORTEST = 1e-12
_SAFETENSORS = "application/vnd.safetensors"
# binary packs eight bits, 1 for numbers above 0, in a signed byte; ubinary in an unsigned one.
Numbers = Literal["float32", "float16", "bfloat16", "int8", "binary", "ubinary"]
NUMBERS: tuple[Numbers, ...] = get_args(Numbers)
Array = NDArray[np.float32]

_FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_MOST_INT8 = 127

_Result = ClassifyResult | TokenClassifyResult | EmbedResult | TokenEmbedResult
# The tasks that give labels.
_CLASSIFYING = ("classify", "token_classify")
# The exponential of a number beyond this is not a float32.
_STEEP = 80.0

# Fields of chats alone, with values that change nothing.
_OF_CHAT = {
    "add_generation_prompt": False,
    "continue_final_message": False,
    "add_special_tokens": True,
    "chat_template": None,
    "chat_template_kwargs": None,
}
# By clients' names; some of Cohere's and Jina's are neither a query nor a document.
_INPUT_TYPES: Mapping[str | None, EngineInputType | None] = {
    **dict.fromkeys(("query", "search_query", "retrieval.query", "code.query", "search"), "query"),
    **dict.fromkeys(
        ("document", "passage", "search_document", "retrieval.passage", "code.passage", "ingest"), "document"
    ),
    **dict.fromkeys(("classification", "clustering", "separation", "text-matching"), None),
}


class Message(msgspec.Struct, kw_only=True):
    """A message of a chat."""

    role: Annotated[wire.Name, about("Role of the speaker, as the model's chat template knows it.", "user")]
    content: Annotated[str | list[Any], about("Text, or parts with text or a picture.", wire.QUERY)]


class MuveraParameters(msgspec.Struct, kw_only=True):
    """Parameters of the encoding muvera."""

    k_sim: Annotated[wire.NotNegative | None, about("Bits of a region's number. Default: 3.", 3)] = None
    r_reps: Annotated[wire.Positive | None, about("Number of repetitions. Default: 40.", 40)] = None
    d_proj: Annotated[
        wire.NotNegative | None, about("Numbers a region; 0: as many as a token vector has. Default: 32.", 32)
    ] = None
    d_final: Annotated[
        wire.Positive | None, about("Length that the vector is shortened to. Default: not shortened.", 2048)
    ] = None
    full_length: Annotated[
        bool | None, about("Scale each region of a document to its tokens' length. Default: true.", True)
    ] = None
    seed: Annotated[wire.NotNegative | None, about("Seed of the random numbers. Default: 0.", 0)] = None


class EmbeddingsRequest(wire.Common, kw_only=True):
    """Texts as `input`, or one text as the `messages` of a chat."""

    input: wire.Texts = UNSET
    messages: Annotated[
        list[Message] | None,
        about("Chat, in place of `input`: the model's template makes one text of it."),
    ] = None
    add_generation_prompt: Annotated[
        bool | None, about("With `messages`: add the beginning of an answer. Default: false.", False)
    ] = None
    continue_final_message: Annotated[
        bool | None, about("With `messages`: leave the last message open. Default: false.", False)
    ] = None
    add_special_tokens: Annotated[
        bool | None, about("With `messages`: add special tokens to the template's. Default: false.", False)
    ] = None
    chat_template: Annotated[str | None, about("Must be empty: the model's own template is used.", "")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, about("Must be empty: the model's own template is used.", {})
    ] = None
    dimensions: Annotated[
        wire.NotNegative | None, about("Length of the vectors; 0: the model's. Default: the model's.", 128)
    ] = None
    output_dimension: Annotated[wire.Positive | None, about("Voyage's name for `dimensions`.", 128)] = None
    encoding_format: Annotated[
        Literal["float", "base64", "safetensors"] | None,
        about("Lists, base64, or one file of all vectors. Default: float.", "float"),
    ] = None
    embed_dtype: Annotated[
        wire.Name | None, about(f"Number format: {', '.join(NUMBERS)}. Default: float32.", "float16")
    ] = None
    output_dtype: Annotated[wire.Name | None, about("Voyage's name for `embed_dtype`.", "float")] = None
    embedding_type: Annotated[
        wire.Name | list[wire.Name] | None, about("Jina's name for `embed_dtype`; takes base64 too.", "float")
    ] = None
    input_type: wire.InputType = None
    task: Annotated[wire.Name | None, about("Jina's name for `input_type`.", "retrieval.passage")] = None
    prompt_name: wire.PromptName = None
    truncation: wire.VoyageTruncation = None
    modality: Annotated[
        wire.Name | None,
        about("Infinity's: `input` has `text` or `image`. Default: text.", "text"),
    ] = None
    normalized: Annotated[
        bool | None, about("Scale vectors to length 1. Default: as the model gives them.", True)
    ] = None
    late_chunking: Annotated[
        bool | None, about("Read `input` as chunks of one document. Default: false.", False)
    ] = None
    chunks: Annotated[
        list[tuple[wire.NotNegative, wire.NotNegative]] | None,
        about(
            "First character of each chunk of the one text in `input`, and the one after its last.",
            [[0, len(wire.DOCUMENTS[0])]],
        ),
    ] = None
    encoding: Annotated[
        Literal["muvera"] | None, about("Make one vector of a text's token vectors. Default: no.", "muvera")
    ] = None
    muvera: Annotated[MuveraParameters | None, about("Parameters of the encoding muvera.")] = None

    def unused_fields(self) -> frozenset[str]:
        unused = set()
        if self.messages is None:
            unused |= {name for name, usual in _OF_CHAT.items() if getattr(self, name) not in (None, usual)}
        elif self.modality is not None:
            unused.add("modality")
        if self.dimensions and self.output_dimension not in (None, self.dimensions):
            unused.add("output_dimension")
        if self.input_type is not None and not isinstance(self, PoolingRequest):
            unused.add("task")
        return frozenset(unused)


class PoolingRequest(EmbeddingsRequest, kw_only=True):
    task: Annotated[
        Literal["token_embed", "embed", "classify", "token_classify"] | None,
        about("What to give. Default: what the model is scored by.", "embed"),
    ] = None
    use_activation: Annotated[
        bool | None, about("With classes as task: apply the activation. Default: true.", True)
    ] = None


_Scales = Annotated[
    Any,
    about(
        "Factor of an int8 vector, or of each.",
        0.0031,
        schema={"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "number"}}]},
    ),
]
_MATRIX = [[0.12, -0.05], [0.03, 0.4]]


class Embedding(msgspec.Struct):
    index: wire.Index
    embedding: wire.OneVector
    object: Annotated[str, about("Always `embedding`.", "embedding")] = "embedding"
    scales: _Scales = UNSET


class MultiVector(msgspec.Struct):
    index: wire.Index
    embeddings: Annotated[
        Any, about("A vector for each token, as lists or base64.", _MATRIX, schema=wire.NUMBERS_OR_BASE64)
    ]
    object: Annotated[str, about("Always `embeddings`.", "embeddings")] = "embeddings"
    scales: _Scales = UNSET


class Pooling(msgspec.Struct):
    index: wire.Index
    data: Annotated[
        Any, about("Vector, vectors or probabilities, by the task.", _MATRIX, schema=wire.NUMBERS_OR_BASE64)
    ]
    object: Annotated[str, about("Always `pooling`.", "pooling")] = "pooling"
    scales: _Scales = UNSET


class Encoding(msgspec.Struct):
    """Parameters by which vectors are made of token vectors. Only vectors with equal ones are comparable."""

    name: Annotated[str, about("Name of the encoding.", "muvera")]
    k_sim: Annotated[int, about("Bits of a region's number.", 3)]
    r_reps: Annotated[int, about("Number of repetitions.", 40)]
    d_proj: Annotated[int, about("Numbers a region; 0: as many as a token vector has.", 32)]
    d_final: Annotated[int | None, about("Length that the vector was shortened to.", 2048)]
    full_length: Annotated[bool, about("Whether regions were scaled to their tokens' length.", True)]
    seed: Annotated[int, about("Seed of the random numbers.", 0)]


class _Vectors(wire.Warned, kw_only=True):
    id: wire.Id
    created: wire.Created
    model: wire.Model
    data: Any
    usage: wire.UsageField
    object: wire.AlwaysList = "list"
    encoding: Annotated[
        Encoding | UnsetType, about("Parameters of the encoding, if the request asks for one.")
    ] = UNSET


class EmbeddingsResponse(_Vectors, kw_only=True):
    data: Annotated[list[Embedding], about("A vector for each input.")]


class MultiVectorResponse(_Vectors, kw_only=True):
    data: Annotated[list[MultiVector], about("The vectors of each input.")]


class PoolingResponse(_Vectors, kw_only=True):
    data: Annotated[list[Pooling], about("What the task gives for each input.")]


class Encoded(msgspec.Struct, frozen=True):
    """One text's vectors as they are sent, [dim] or [tokens, dim]. Those in int8 are to be multiplied by
    `scales`, a number per vector."""

    data: Any
    scales: Any = UNSET


def encode_vectors(vectors: Array, numbers: Numbers, as_base64: bool) -> Encoded:
    """Nested lists, or base64 of little-endian bytes in row order."""
    tensor, scales = _converted(vectors, numbers)
    numbers_of_each = UNSET if scales is None else scales.tolist()
    if not as_base64:
        return Encoded(encode_rows(tensor), numbers_of_each)
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return Encoded(base64.b64encode(raw).decode("ascii"), numbers_of_each)


def encode_entries(entries: list[Any]) -> Any:
    """Encodes a part of an answer. Other threads run between parts, and Python's objects for a whole answer
    would take several times more memory."""
    return msgspec.Raw(msgspec.json.encode(entries))


def encode_rows(rows: torch.Tensor | Array) -> msgspec.Raw:
    """A vector or rows of vectors. Python's lists of all numbers would take several times more memory."""
    if rows.ndim == 1:
        return msgspec.Raw(msgspec.json.encode(rows.tolist()))
    return msgspec.Raw(b"[" + b",".join(msgspec.json.encode(row.tolist()) for row in rows) + b"]")


def file_of(matrices: Sequence[Array], numbers: Numbers, about: dict[str, str]) -> bytes:
    """All vectors as safetensors: `embeddings` [sum of lengths, dim], `lengths` [texts], the number of each
    text's vectors, and `scales` if there are some. `about` becomes the metadata."""
    matrices = [np.atleast_2d(matrix) for matrix in matrices]
    tensor, scales = _converted(np.concatenate(matrices), numbers)
    tensors = {
        "embeddings": tensor.contiguous(),
        "lengths": torch.tensor([len(matrix) for matrix in matrices]),
    }
    if scales is not None:
        tensors["scales"] = torch.from_numpy(scales)
    return save(tensors, metadata=about)


def _converted(vectors: Array, numbers: Numbers) -> tuple[torch.Tensor, NDArray[np.float32] | None]:
    """The vectors in other numbers, and their scales if they have some."""
    if numbers == "int8":
        most = np.abs(vectors).max(axis=-1, initial=0)
        scales = np.where(most > 0, most / _MOST_INT8, 1).astype(np.float32)
        return torch.from_numpy(np.rint(vectors / scales[..., None]).astype(np.int8)), scales
    if numbers in ("binary", "ubinary"):
        bits = np.packbits(vectors > 0, axis=-1)
        return torch.from_numpy(bits if numbers == "ubinary" else (bits ^ 0x80).view(np.int8)), None
    tensor = torch.from_numpy(np.ascontiguousarray(vectors, dtype=np.float32))
    return tensor.to(_FLOATS.get(numbers, torch.float32)), None


class Chat(NamedTuple):
    """Messages of "role" and "content" that become one text."""

    messages: list[dict[str, str]]


def read_inputs(request: Any, most: int, name: str = "input") -> reading.Inputs:
    return reading.as_inputs(getattr(request, name), most, name)


def read_inputs_or_chat(request: EmbeddingsRequest, most: int) -> reading.Inputs | Chat:
    """Reads texts and pictures, or at most so many messages. A message with a picture is a document."""
    if request.messages is None:
        if request.modality in (None, "text"):
            return read_inputs(request, most)
        if request.modality == "image":
            return reading.pictures_of(request.input, most, "input")
        raise InvalidRequestError(
            f"modality {request.modality} cannot be read here; use text or image", "modality"
        )
    for name in ("chat_template", "chat_template_kwargs"):
        if getattr(request, name):
            raise InvalidRequestError(f"{name} cannot be chosen; the model's own template is used", name)
    if request.input is not UNSET:
        raise InvalidRequestError("input and messages exclude each other; leave out one", "messages")
    reading.check_count(request.messages, "messages", most)
    if not request.messages:
        raise InvalidRequestError("messages is empty; give at least one", "messages")
    contents = reading.texts_and_pictures(
        [{"content": message.content} for message in request.messages], "messages"
    )
    if all(isinstance(content, str) for content in contents):
        roles = [message.role for message in request.messages]
        return Chat(
            [{"role": role, "content": str(text)} for role, text in zip(roles, contents, strict=True)]
        )
    if len(contents) > 1:
        raise InvalidRequestError(
            "messages with pictures are read one at a time; send a single message", "messages"
        )
    return contents


def input_type_of(state: ServerState, value: str | None, param: str = "input_type") -> EngineInputType | None:
    """`query` or `document` for clients' names of them, or as the model's name says."""
    if value is not None and value not in _INPUT_TYPES:
        raise InvalidRequestError(f"{param} {value!r} is not known; use query or document", param)
    meant, named = _INPUT_TYPES.get(value), state.read_as.input_type
    if named is not None and value is not None and meant != named:
        raise _contradiction(state, param, value)
    return named or meant


def prompt_name_of(state: ServerState, value: str | None) -> str | None:
    """The name of the prompt in the request, or in the model's name."""
    named = state.read_as.prompt_name
    if named is not None and value is not None and value != named:
        raise _contradiction(state, "prompt_name", value)
    return value if named is None else named


def _contradiction(state: ServerState, param: str, value: str) -> InvalidRequestError:
    name = quoted(state.read_as.name)
    return InvalidRequestError(f"{param} {value!r} contradicts the model's name {name}; leave one out", param)


def _number_format_of(request: EmbeddingsRequest) -> Numbers:
    """The number format of vectors, whichever field names it."""
    found: dict[str, Numbers] = {}
    for param in ("embed_dtype", "output_dtype", "embedding_type"):
        given = getattr(request, param)
        names = given if isinstance(given, list) else [given]
        if len(names) > 1:
            raise InvalidRequestError(f"{param} must be one kind of number here, not {len(names)}", param)
        for name in names:
            if name is None or name in ("auto", "base64"):
                continue
            numbers = "float32" if name == "float" else name
            if numbers not in NUMBERS:
                raise InvalidRequestError(
                    f"{param} {name!r} is not known; use float or one of {', '.join(NUMBERS)}", param
                )
            found[param] = cast("Numbers", numbers)
    if len({*found.values()}) > 1:
        raise InvalidRequestError(f"{' and '.join(found)} say different things; leave out one", [*found][-1])
    return next(iter(found.values()), "float32")


def encoding_of(request: EmbeddingsRequest) -> Muvera | None:
    """The requested encoding. Raises InvalidRequestError for parameters without it, and for wrong ones."""
    if request.encoding is None:
        if request.muvera is not None:
            raise InvalidRequestError(
                'muvera is for "encoding": "muvera"; ask for that, or leave it out', "muvera"
            )
        return None
    given = {} if request.muvera is None else msgspec.structs.asdict(request.muvera)
    parameters = {name: value for name, value in given.items() if value is not None}
    if parameters.get("d_proj") == 0:
        parameters["d_proj"] = None
    try:
        return Muvera(**parameters)
    except ValueError as error:
        raise InvalidRequestError(str(error), "muvera") from None


def describe_encoding(muvera: Muvera) -> Encoding:
    """An encoding with all its parameters, as a request may send them again."""
    return Encoding(name="muvera", **{**asdict(muvera), "d_proj": muvera.d_proj or 0})


async def _vectors(
    task: str | None,
    item: type[Embedding] | type[MultiVector] | type[Pooling],
    response: type[_Vectors],
    prefix: str,
    state: ServerState,
    body: EmbeddingsRequest,
    inputs: reading.Inputs | Chat,
) -> Answer:
    """Answers in the numbers and the format that the request wants. JSON is a `response` with an `item` for
    each text. Without a `task` it is the request's, or the model's main one."""
    if task is None:
        task = body.task or state.engine.facts.score_task
    types = body.embedding_type if isinstance(body.embedding_type, list) else [body.embedding_type]
    numbers, model = _number_format_of(body), state.model_name
    as_base64 = "base64" in (body.encoding_format, *types)
    if isinstance(inputs, Chat):
        inputs = await _read_chat(state, body, inputs)
    else:
        reading.check_token_ids(inputs, state.config.accept_token_ids)
    of_vectors = ["normalized"] if task != "embed" or body.encoding is not None else []
    if task in _CLASSIFYING:
        of_vectors += ["dimensions", "output_dimension", "input_type", "prompt_name"]
    unread = [reading.UnreadField(name, None) for name in of_vectors if getattr(body, name)]
    state = state.warning_about(unread, f"task {task}")
    must_scale, vain = scaling(state, body.normalized if task == "embed" else None, "normalized")
    result = await _run(state, body, inputs, task)
    given = _rows_of(result, body)
    size = sum(each.size for each in given)
    warnings = [*(reading.warnings_of(result.truncated, state.field_warnings, body) or ()), *vain] or UNSET

    def vectors() -> Any:
        return in_unit_length(cast("Array", given)) if must_scale else given

    made_by = result.encoding if isinstance(result, EmbedResult) else None
    if body.encoding_format == "safetensors":
        about = {"model": model, "prompt_tokens": str(result.usage.prompt_tokens)}
        if made_by is not None:
            about["encoding"] = msgspec.json.encode(describe_encoding(made_by)).decode()
        whole = await run_in_thread_if_large(size, lambda: file_of(vectors(), numbers, about))
        answer = Answer(200, {"Content-Type": _SAFETENSORS}, whole)
    else:

        def build() -> _Vectors:
            all_encoded = [encode_vectors(each, numbers, as_base64) for each in vectors()]
            data = [item(i, each.data, scales=each.scales) for i, each in enumerate(all_encoded)]
            return response(
                id=new_id(prefix),
                created=now(),
                model=model,
                data=data,
                usage=usage_of(result.usage),
                warnings=warnings,
                encoding=UNSET if made_by is None else describe_encoding(made_by),
            )

        answer = await wire_answer(build, size)
    state.note_used(result)
    return answer.with_timings(result.timings).with_warnings(warnings)


def _rows_of(result: _Result, body: EmbeddingsRequest) -> Sequence[Array] | Array:
    """The numbers of each text."""
    match result:
        case ClassifyResult():
            return result.scores
        case TokenClassifyResult():
            raw = isinstance(body, PoolingRequest) and body.use_activation is False
            logits = [each.logits for each in result.logits or ()]
            return logits if raw else [_activated(rows) for rows in logits]
    return result.embeddings


def _activated(logits: Array) -> Array:
    """The probabilities [tokens, labels], as vLLM makes them: a sigmoid for a single label."""
    if logits.shape[1] > 1:
        return probabilities(logits)
    made: Array = 1 / (1 + np.exp(-logits.clip(-_STEEP, _STEEP)))
    return made


async def _run(state: ServerState, body: EmbeddingsRequest, inputs: reading.Inputs, task: str) -> _Result:
    engine = state.engine
    options: dict[str, Any] = {
        "truncation": reading.truncation_of(body, state.config.long_documents),
        "priority": body.priority or 0,
        "tenant": state.tenant,
        "timeout": body.timeout,
    }
    use_activation = body.use_activation if isinstance(body, PoolingRequest) else None
    for name in ("late_chunking", "chunks", "encoding", "muvera") if task != "embed" else ():
        if getattr(body, name) not in (None, False):
            raise InvalidRequestError(f"{name} is for the task embed, not {task}", name)
    if task == "token_classify":
        state.check_name_is_plain()
        texts = reading.plain_texts(inputs, "input")
        options["max_tokens"] = most_labeled(state, _BYTES_A_NUMBER)
        return await engine.token_classify(texts, return_logits=True, **options)
    if task == "classify":
        state.check_name_is_plain()
        check_labels(state, len(inputs))
        return await engine.classify(inputs, use_activation=use_activation is not False, **options)
    if task == "sparse_embed":
        raise InvalidRequestError("this model gives sparse vectors; use /embed_sparse", "model")
    if task not in ("embed", "token_embed"):
        raise InvalidRequestError(
            "this model is scored by several embeddings of a text; name task embed or token_embed", "task"
        )
    if use_activation is False:
        raise InvalidRequestError(
            "use_activation=false is only for the tasks classify and token_classify", "use_activation"
        )
    dimensions = body.dimensions or body.output_dimension
    input_type = input_type_of(state, body.input_type)
    if body.input_type is None and not isinstance(body, PoolingRequest):
        input_type = input_type_of(state, body.task, "task")
    prompt_name = prompt_name_of(state, body.prompt_name)
    options |= {"input_type": input_type, "prompt_name": prompt_name, "dimensions": dimensions}
    named = "dimensions" if body.dimensions else "output_dimension"
    with reading.with_request_field_names(dimensions=named):
        if task == "embed":
            return await engine.embed(inputs, **options, **_one_vector_options(state, body, len(inputs)))
        most = most_vectors(state, dimensions)
        return await engine.embed_tokens(inputs, **options, max_tokens=most, return_tokens=False)


def scaling(state: ServerState, wanted: bool | None, name: str) -> tuple[bool, list[str]]:
    """Whether vectors must be scaled to length 1, and a warning if the model does that although the request's
    field `name` says not to."""
    facts = state.engine.facts
    normalizes = "embed" in facts.normalized
    message = f"{name} false has no effect: the model's own last layer normalizes; leave it out"
    warnings = [message] if normalizes and wanted is False else []
    return bool(wanted) and "embed" in facts.dims and not normalizes, warnings


def in_unit_length(rows: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    scaled: NDArray[np.floating[Any]] = rows / np.maximum(
        np.linalg.norm(rows, axis=-1, keepdims=True), _SHORTEST
    )
    return scaled


def _one_vector_options(state: ServerState, body: EmbeddingsRequest, num_texts: int) -> dict[str, Any]:
    """Options on how a text, or each of its chunks, becomes one vector."""
    options: dict[str, Any] = {}
    if body.late_chunking or body.chunks is not None:
        reading.check_count(body.chunks, "chunks", state.config.max_documents)
        options |= {"late_chunking": bool(body.late_chunking), "chunks": body.chunks}
    num_vectors = num_texts if body.chunks is None else len(body.chunks)
    if (encoding := encoding_of(body)) is None:
        check_embeddings(state, num_vectors, body.dimensions or body.output_dimension)
        return options
    dim = state.engine.facts.dims.get("token_embed")
    if dim is not None:  # else the engine says so
        try:
            encoding.length(dim)
        except ValueError as error:
            raise InvalidRequestError(str(error), "muvera") from None
        # Shortened vectors are made in full length first.
        length = encoding.whole_length(dim)
        _check_room(state, num_vectors, length, "ask for a smaller k_sim, r_reps or d_proj")
    return options | {"encoding": encoding}


def check_embeddings(state: ServerState, num_vectors: int, dimensions: int | None) -> None:
    """Refuses more vectors than there is room for. The model chooses the length if `dimensions` is None."""
    dim = state.engine.facts.dims.get("embed")
    if dim is not None and (dimensions is None or 1 <= dimensions <= dim):
        _check_room(state, num_vectors, dimensions or dim, "ask for shorter vectors")
    # The engine refuses other dimensions.


def check_labels(state: ServerState, num_texts: int, num_labels: int | None = None) -> None:
    """Refuses more texts than there is room for all labels of: the model's, or so many."""
    num_labels = len(state.engine.facts.labels) if num_labels is None else num_labels
    most = state.bodies.most // (_BYTES_A_LABEL * max(1, num_labels))
    if num_texts > most:
        raise RequestTooLargeError(
            f"{num_texts} texts would have {num_labels} labels each, and there is room for {most} such "
            "texts; send fewer at a time, or raise --limit max_bodies_mb"
        )


def _check_room(state: ServerState, num_vectors: int, length: int, remedy: str) -> None:
    """Refuses vectors that need more memory in an answer than all bodies may have."""
    most = state.bodies.most // (_BYTES_A_NUMBER * length)
    if num_vectors > most:
        raise RequestTooLargeError(
            f"{num_vectors} vectors of {length} numbers would be made, and there is room for {most}; send "
            f"fewer texts at a time, {remedy}, or raise --limit max_bodies_mb"
        )


async def _read_chat(state: ServerState, body: EmbeddingsRequest, chat: Chat) -> reading.Inputs:
    """Returns token ids, unless the request wants special tokens beside the template's."""
    engine = state.engine
    text, is_complete = await engine.conversation(
        chat.messages,
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=bool(body.continue_final_message),
    )
    if body.add_special_tokens and not is_complete:
        return [text]
    tokenizer = engine.tokenizer
    return await engine.in_thread(lambda: [tokenizer.encode([text], "messages")[0].tolist()], len(text))


def most_vectors(state: ServerState, dimensions: int | None) -> int | None:
    """The most token vectors that an answer may have, so that it takes no more memory than all bodies may;
    None if the model has no token vectors."""
    dim = state.engine.facts.dims.get("token_embed")
    if dim is None or (dimensions is not None and not 1 <= dimensions <= dim):
        return None
    return state.bodies.most // (_BYTES_A_NUMBER * (dimensions or dim))


def most_labeled(state: ServerState, bytes_a_label: int, bytes_a_token: int = 0) -> int:
    """The most tokens that an answer has room for, with so many bytes for each label and each token."""
    num_labels = max(1, len(state.engine.facts.labels))
    return state.bodies.most // (bytes_a_token + bytes_a_label * num_labels)


_WANTED_OF_TASK = {
    "token_embed": Wanted.TOKEN_VECTORS,
    "classify": Wanted.CLASSES,
    "token_classify": Wanted.TOKEN_CLASSES,
}


def _wanted_by_task(state: ServerState, body: EmbeddingsRequest | Fields) -> Wanted:
    """By two fields, whose values may be wrong. Encodings are made of token vectors."""
    if field_of(body, "encoding") is not None:
        return Wanted.TOKEN_VECTORS
    return _WANTED_OF_TASK.get(str(field_of(body, "task")), Wanted.VECTORS)


_TEXTS = {"input": wire.DOCUMENTS}

EMBED = Form(
    EmbeddingsRequest,
    read_inputs_or_chat,
    partial(_vectors, "embed", Embedding, EmbeddingsResponse, "embd"),
    _wanted_by_task,
)
POOL = Form(
    PoolingRequest,
    read_inputs_or_chat,
    partial(_vectors, None, Pooling, PoolingResponse, "pooling"),
    _wanted_by_task,
)

ROUTES = (
    *post(
        ("/v1/embeddings", "/embeddings"),
        EMBED,
        Shown(Group.EMBED, "Embed texts, one vector each", _TEXTS),
        EmbeddingsResponse,
        _SAFETENSORS,
    ),
    *post(
        ("/v1/multi-vector",),
        Form(
            EmbeddingsRequest,
            read_inputs_or_chat,
            partial(_vectors, "token_embed", MultiVector, MultiVectorResponse, "multi-vector"),
            Wanted.TOKEN_VECTORS,
        ),
        Shown(Group.EMBED, "Embed texts, one vector per token", _TEXTS),
        MultiVectorResponse,
        _SAFETENSORS,
    ),
    *post(
        ("/pooling",),
        POOL,
        Shown(Group.EMBED, "Embed or classify texts, by task", _TEXTS | {"task": "embed"}),
        PoolingResponse,
        _SAFETENSORS,
    ),
)
