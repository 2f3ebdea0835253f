"""The routes that give vectors, /v1/embeddings, /v1/multi-vector and /pooling: their wire types, and the
vectors as numbers of 32 bits down to one, in JSON, in base64, or as a file of safetensors."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save

from maxsimd.api.answer import Answer, new_id, now, usage_of, wire_answer
from maxsimd.api.handlers.route import Group, Shown, post_texts
from maxsimd.api.models import Wanted
from maxsimd.api.reading import (
    Inputs,
    UnreadField,
    as_inputs,
    as_text,
    check_count,
    check_token_ids,
    content_of,
    has_pictures,
    pictures_of,
    truncation_of,
    warnings_of,
)
from maxsimd.api.state import ServerState
from maxsimd.api.wire import (
    DOCUMENTS,
    NUMBERS_OR_BASE64,
    QUERY,
    AlwaysList,
    Common,
    Created,
    Id,
    Index,
    InputType,
    Model,
    Name,
    NotNegative,
    OneVector,
    Positive,
    PromptName,
    Texts,
    UsageField,
    Warned,
    about,
)
from maxsimd.engine import (
    ClassifyResult,
    EmbedResult,
    InvalidRequestError,
    Muvera,
    RequestTooLargeError,
    TokenEmbedResult,
)
from maxsimd.engine.media import Content
from maxsimd.engine.requests import InputType as EngineInputType
from maxsimd.engine.workers import run_in_thread_if_large

# Bytes of a number in an answer, as text and while it is made; and of a label.
_BYTES_A_NUMBER, _BYTES_A_LABEL = 24, 160
_SHORTEST = 1e-12
NORMALIZES_ANYWAY = "{} false has no effect: the model's own last layer normalizes; leave it out"
_SAFETENSORS = "application/vnd.safetensors"
# binary packs eight bits, 1 for numbers above 0, in a signed byte; ubinary in an unsigned one.
Numbers = Literal["float32", "float16", "bfloat16", "int8", "binary", "ubinary"]
NUMBERS: tuple[Numbers, ...] = get_args(Numbers)
Array = NDArray[np.float32]

_FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_MOST_INT8 = 127

_Result = ClassifyResult | EmbedResult | TokenEmbedResult

# Fields of chats alone, with values that change nothing.
_OF_CHAT = {
    "add_generation_prompt": False,
    "continue_final_message": False,
    "add_special_tokens": True,
    "chat_template": None,
    "chat_template_kwargs": None,
}
# Cohere's and Jina's purposes that are neither a query nor a document.
_OTHER_TYPES = ("classification", "clustering", "separation", "text-matching")


class Message(msgspec.Struct, kw_only=True):
    """A message of a chat."""

    role: Annotated[Name, about("Role of the speaker, as the model's chat template knows it.", "user")]
    content: Annotated[str | list[Any], about("Text, or parts with text or a picture.", QUERY)]


class MuveraParameters(msgspec.Struct, kw_only=True):
    """Parameters of the encoding muvera."""

    k_sim: Annotated[NotNegative | None, about("Bits of a region's number. Default: 3.", 3)] = None
    r_reps: Annotated[Positive | None, about("Number of repetitions. Default: 40.", 40)] = None
    d_proj: Annotated[
        NotNegative | None, about("Numbers a region; 0: as many as a token vector has. Default: 32.", 32)
    ] = None
    d_final: Annotated[
        Positive | None, about("Length that the vector is shortened to. Default: not shortened.", 2048)
    ] = None
    full_length: Annotated[
        bool | None, about("Scale each region of a document to its tokens' length. Default: true.", True)
    ] = None
    seed: Annotated[NotNegative | None, about("Seed of the random numbers. Default: 0.", 0)] = None


class EmbeddingsRequest(Common, kw_only=True):
    """Texts as `input`, or one text as the `messages` of a chat."""

    input: Texts = msgspec.UNSET
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
        NotNegative | None, about("Length of the vectors; 0: the model's. Default: the model's.", 128)
    ] = None
    output_dimension: Annotated[Positive | None, about("Voyage's name of `dimensions`.", 128)] = None
    encoding_format: Annotated[
        Literal["float", "base64", "safetensors"] | None,
        about("Lists, base64, or one file of all vectors. Default: float.", "float"),
    ] = None
    embed_dtype: Annotated[
        Name | None, about(f"Number format: {', '.join(NUMBERS)}. Default: float32.", "float16")
    ] = None
    output_dtype: Annotated[Name | None, about("Voyage's name of `embed_dtype`.", "float")] = None
    embedding_type: Annotated[
        Name | list[Name] | None, about("Jina's name of `embed_dtype`; takes base64 too.", "float")
    ] = None
    input_type: InputType = None
    task: Annotated[Name | None, about("Jina's name of `input_type`.", "retrieval.passage")] = None
    prompt_name: PromptName = None
    truncation: Annotated[bool | None, about("Voyage's: truncate long texts; false refuses them.", True)] = (
        None
    )
    modality: Annotated[
        Name | None,
        about("Infinity's: `input` has `text` or `image`. Default: text.", "text"),
    ] = None
    normalized: Annotated[
        bool | None, about("Scale vectors to length 1. Default: as the model gives them.", True)
    ] = None
    late_chunking: Annotated[
        bool | None, about("Read `input` as chunks of one document. Default: false.", False)
    ] = None
    chunks: Annotated[
        list[tuple[NotNegative, NotNegative]] | None,
        about("First and last character of each chunk of the one text in `input`.", [[0, 24]]),
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
        Literal["token_embed", "embed", "classify"] | None,
        about("What to give. Default: what the model is scored by.", "embed"),
    ] = None
    use_activation: Annotated[
        bool | None, about("With task classify: apply the activation. Default: true.", True)
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
    index: Index
    embedding: OneVector
    object: Annotated[str, about("Always `embedding`.", "embedding")] = "embedding"
    scales: _Scales = msgspec.UNSET


class MultiVector(msgspec.Struct):
    index: Index
    embeddings: Annotated[
        Any, about("A vector for each token, as lists or base64.", _MATRIX, schema=NUMBERS_OR_BASE64)
    ]
    object: Annotated[str, about("Always `embeddings`.", "embeddings")] = "embeddings"
    scales: _Scales = msgspec.UNSET


class Pooling(msgspec.Struct):
    index: Index
    data: Annotated[
        Any, about("Vector, vectors or probabilities, by the task.", _MATRIX, schema=NUMBERS_OR_BASE64)
    ]
    object: Annotated[str, about("Always `pooling`.", "pooling")] = "pooling"
    scales: _Scales = msgspec.UNSET


class Encoding(msgspec.Struct):
    """Parameters by which vectors are made of token vectors. Only vectors with equal ones are comparable."""

    name: Annotated[str, about("Name of the encoding.", "muvera")]
    k_sim: Annotated[int, about("Bits of a region's number.", 3)]
    r_reps: Annotated[int, about("Number of repetitions.", 40)]
    d_proj: Annotated[int, about("Numbers a region; 0: as many as a token vector has.", 32)]
    d_final: Annotated[int | None, about("Length that the vector was shortened to.", 2048)]
    full_length: Annotated[bool, about("Whether regions were scaled to their tokens' length.", True)]
    seed: Annotated[int, about("Seed of the random numbers.", 0)]


class _Vectors(Warned, kw_only=True):
    id: Id
    created: Created
    model: Model
    data: Any
    usage: UsageField
    object: AlwaysList = "list"
    encoding: Annotated[
        Encoding | msgspec.UnsetType, about("Parameters of the encoding, if the request asks for one.")
    ] = msgspec.UNSET


class EmbeddingsResponse(_Vectors, kw_only=True):
    data: Annotated[list[Embedding], about("A vector for each input.")]


class MultiVectorResponse(_Vectors, kw_only=True):
    data: Annotated[list[MultiVector], about("The vectors of each input.")]


class PoolingResponse(_Vectors, kw_only=True):
    data: Annotated[list[Pooling], about("What the task gives for each input.")]


# The entries of an answer, its type, and the prefix of its id.
_Item = type[Embedding] | type[MultiVector] | type[Pooling]
_RESPONSES: dict[_Item, tuple[Any, str]] = {
    Embedding: (EmbeddingsResponse, "embd"),
    MultiVector: (MultiVectorResponse, "multi-vector"),
    Pooling: (PoolingResponse, "pooling"),
}


class Encoded(msgspec.Struct, frozen=True):
    """One text's vectors as they are sent, [dim] or [tokens, dim]. Those in int8 are to be multiplied by
    `scales`, a number per vector."""

    data: Any
    scales: Any = msgspec.UNSET


def encode_vectors(vectors: Array, numbers: Numbers, as_base64: bool) -> Encoded:
    """Nested lists, or base64 of little-endian bytes in row order."""
    tensor, scales = _converted(vectors, numbers)
    numbers_of_each = msgspec.UNSET if scales is None else scales.tolist()
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


def read_inputs_or_chat(request: EmbeddingsRequest, most: int) -> Inputs | Chat:
    """Reads texts and pictures, or at most so many messages. A message with a picture is a document."""
    if request.messages is None:
        if request.modality in (None, "text"):
            return as_inputs(request.input, most)
        if request.modality == "image":
            return pictures_of(request.input, most, "input")
        raise InvalidRequestError(
            f"modality {request.modality} cannot be read here; use text or image", "modality"
        )
    for name in ("chat_template", "chat_template_kwargs"):
        if getattr(request, name):
            raise InvalidRequestError(f"{name} cannot be chosen; the model's own template is used", name)
    if request.input is not msgspec.UNSET:
        raise InvalidRequestError("input and messages exclude each other; leave out one", "messages")
    check_count(request.messages, "messages", most)
    if not request.messages:
        raise InvalidRequestError("messages is empty; give at least one", "messages")
    contents = [{"content": message.content} for message in request.messages]
    if any(map(has_pictures, contents)):
        if len(contents) > 1:
            raise InvalidRequestError(
                "messages with pictures are read one at a time; send a single message", "messages"
            )
        document: list[str | Content] = [content_of(contents[0], "messages[0]", "messages")]
        return document
    return Chat(
        [
            {
                "role": message.role,
                "content": as_text({"content": message.content}, f"messages[{i}]", "messages"),
            }
            for i, message in enumerate(request.messages)
        ]
    )


def input_type_of(value: str | None, param: str = "input_type") -> EngineInputType | None:
    """`query` or `document` for clients' names of them."""
    if value is None or value in _OTHER_TYPES:
        return None
    if value in ("query", "search_query", "retrieval.query"):
        return "query"
    if value in ("document", "passage", "search_document", "retrieval.passage"):
        return "document"
    raise InvalidRequestError(f"{param} {value!r} is not known; use query or document", param)


def _input_type_of_request(request: EmbeddingsRequest) -> EngineInputType | None:
    """By `input_type`, or by Jina's `task`, which means something else on /pooling."""
    if request.input_type is None and not isinstance(request, PoolingRequest):
        return input_type_of(request.task, "task")
    return input_type_of(request.input_type)


def _number_format_of(request: EmbeddingsRequest) -> Numbers:
    """The number format of vectors, whichever field names it."""
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
            return cast("Numbers", numbers)
    return "float32"


def _wants_base64(request: EmbeddingsRequest) -> bool:
    """In OpenAI's field or in Jina's."""
    return request.encoding_format == "base64" or request.embedding_type in ("base64", ["base64"])


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
    return Encoding(
        "muvera",
        muvera.k_sim,
        muvera.r_reps,
        muvera.d_proj or 0,
        muvera.d_final,
        muvera.full_length,
        muvera.seed,
    )


async def embeddings(
    state: ServerState, body: EmbeddingsRequest, inputs: Inputs | Chat, tenant: str
) -> Answer:
    return await _vectors(state, body, inputs, tenant, "embed", Embedding)


async def multi_vector(
    state: ServerState, body: EmbeddingsRequest, inputs: Inputs | Chat, tenant: str
) -> Answer:
    """Jina's: a vector for each token."""
    return await _vectors(state, body, inputs, tenant, "token_embed", MultiVector)


async def pooling(state: ServerState, body: PoolingRequest, inputs: Inputs | Chat, tenant: str) -> Answer:
    """vLLM's: the request's task, or the model's main one."""
    task = body.task or state.engine.facts.score_task
    return await _vectors(state, body, inputs, tenant, task, Pooling)


async def _vectors(
    state: ServerState,
    body: EmbeddingsRequest,
    inputs: Inputs | Chat,
    tenant: str,
    task: str,
    item: _Item,
) -> Answer:
    """Answers in the numbers and the format that the request wants. JSON has an `item` for each text."""
    numbers, as_base64, model = _number_format_of(body), _wants_base64(body), state.model_name
    if isinstance(inputs, Chat):
        inputs = await _read_chat(state, body, inputs)
    else:
        check_token_ids(inputs, state.config.accept_token_ids)
    state = state.warning_about(_unused_for(task, body), f"task {task}")
    facts = state.engine.facts
    normalizes = "embed" in facts.normalized
    result = await _run(state, body, inputs, tenant, task)
    vectors = result.scores if isinstance(result, ClassifyResult) else result.embeddings
    warnings = warnings_of(result.truncated, state.field_warnings, body)
    embeds = task == "embed" and "embed" in facts.dims
    if body.normalized is not None and embeds and isinstance(result, EmbedResult):
        if body.normalized and not normalizes:
            vectors = in_unit_length(result.embeddings)
        elif normalizes and not body.normalized:
            warnings = [*(warnings or ()), NORMALIZES_ANYWAY.format("normalized")]
    size = sum(each.size for each in vectors)
    made_by = result.encoding if isinstance(result, EmbedResult) else None
    if body.encoding_format == "safetensors":
        about = {"model": model, "prompt_tokens": str(result.usage.prompt_tokens)}
        if made_by is not None:
            about["encoding"] = msgspec.json.encode(describe_encoding(made_by)).decode()
        whole = await run_in_thread_if_large(size, file_of, list(vectors), numbers, about)
        answer = Answer(200, {"Content-Type": _SAFETENSORS}, whole)
    else:

        def build() -> _Vectors:
            all_encoded = [encode_vectors(each, numbers, as_base64) for each in vectors]
            data = [item(i, each.data, scales=each.scales) for i, each in enumerate(all_encoded)]
            response, prefix = _RESPONSES[item]
            whole: _Vectors = response(
                id=new_id(prefix),
                created=now(),
                model=model,
                data=data,
                usage=usage_of(result.usage),
                warnings=warnings,
                encoding=msgspec.UNSET if made_by is None else describe_encoding(made_by),
            )
            return whole

        answer = await wire_answer(build, size)
    return answer.with_timings(result.timings).with_warnings(warnings)


async def _run(
    state: ServerState, body: EmbeddingsRequest, inputs: Inputs, tenant: str, task: str
) -> _Result:
    engine = state.engine
    options: dict[str, Any] = {
        "truncation": truncation_of(body, state.config.long_documents),
        "priority": body.priority or 0,
        "tenant": tenant,
        "timeout": body.timeout,
    }
    use_activation = body.use_activation if isinstance(body, PoolingRequest) else None
    _check_task(body, task)
    if task == "classify":
        check_labels(state, len(inputs))
        return await engine.classify(inputs, use_activation=use_activation is not False, **options)
    if task == "sparse_embed":
        raise InvalidRequestError("this model gives sparse vectors; use /embed_sparse", "model")
    if task not in ("embed", "token_embed"):
        raise InvalidRequestError(
            "this model is scored by several embeddings of a text; name task embed or token_embed", "task"
        )
    if use_activation is False:
        raise InvalidRequestError("use_activation=false is only for the task classify", "use_activation")
    dimensions = body.dimensions or body.output_dimension
    options |= {
        "input_type": _input_type_of_request(body),
        "prompt_name": body.prompt_name,
        "dimensions": dimensions,
    }
    if task == "embed":
        return await engine.embed(inputs, **options, **_one_vector_options(state, body, len(inputs)))
    most = most_vectors(state, dimensions)
    return await engine.embed_tokens(inputs, **options, max_tokens=most, return_tokens=False)


def _unused_for(task: str, body: EmbeddingsRequest) -> list[UnreadField]:
    """Fields on vectors in a request for something else."""
    names = ["normalized"] if task != "embed" or body.encoding is not None else []
    if task == "classify":
        names += ["dimensions", "output_dimension", "input_type", "prompt_name"]
    return [UnreadField(name, None) for name in names if getattr(body, name)]


def in_unit_length(rows: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    scaled: NDArray[np.floating[Any]] = rows / np.maximum(
        np.linalg.norm(rows, axis=-1, keepdims=True), _SHORTEST
    )
    return scaled


def _check_task(body: EmbeddingsRequest, task: str) -> None:
    """Refuses options of one vector per text for other tasks."""
    given = {
        "late_chunking": bool(body.late_chunking),
        "chunks": body.chunks is not None,
        "encoding": body.encoding is not None,
        "muvera": body.muvera is not None,
    }
    for name, is_given in given.items():
        if is_given and task != "embed":
            raise InvalidRequestError(f"{name} is for the task embed, not {task}", name)


def _one_vector_options(state: ServerState, body: EmbeddingsRequest, num_texts: int) -> dict[str, Any]:
    """Options on how a text, or each of its chunks, becomes one vector."""
    options: dict[str, Any] = {}
    if body.late_chunking or body.chunks is not None:
        check_count(body.chunks, "chunks", state.config.max_documents)
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


def check_labels(state: ServerState, num_texts: int) -> None:
    """Refuses more texts than there is room for all labels of."""
    num_labels = len(state.engine.facts.labels)
    most = (state.config.max_bodies_mb << 20) // (_BYTES_A_LABEL * max(1, num_labels))
    if num_texts > most:
        raise RequestTooLargeError(
            f"{num_texts} texts would have {num_labels} labels each, and there is room for {most} such "
            "texts; send fewer at a time, or raise --limit max_bodies_mb"
        )


def _check_room(state: ServerState, num_vectors: int, length: int, remedy: str) -> None:
    """Refuses vectors that need more memory in an answer than all bodies may have."""
    most = (state.config.max_bodies_mb << 20) // (_BYTES_A_NUMBER * length)
    if num_vectors > most:
        raise RequestTooLargeError(
            f"{num_vectors} vectors of {length} numbers would be made, and there is room for {most}; send "
            f"fewer texts at a time, {remedy}, or raise --limit max_bodies_mb"
        )


async def _read_chat(state: ServerState, body: EmbeddingsRequest, chat: Chat) -> Inputs:
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
    return (state.config.max_bodies_mb << 20) // (_BYTES_A_NUMBER * (dimensions or dim))


def wanted_vectors(state: ServerState, body: EmbeddingsRequest) -> Wanted:
    """Encodings are made of token vectors."""
    return wanted_by_task(None, body.encoding)


_WANTED_OF_TASK = {"token_embed": Wanted.TOKEN_VECTORS, "classify": Wanted.CLASSES}


def wanted_pooling(state: ServerState, body: PoolingRequest) -> Wanted:
    return wanted_by_task(body.task, body.encoding)


def wanted_by_task(task: Any, encoding: Any) -> Wanted:
    """The kind of result by two fields of /pooling, whose values may be wrong."""
    if encoding is not None:
        return Wanted.TOKEN_VECTORS
    return _WANTED_OF_TASK.get(task, Wanted.VECTORS) if isinstance(task, str) else Wanted.VECTORS


_TEXTS = {"input": DOCUMENTS}

ROUTES = (
    *(
        post_texts(
            path,
            EmbeddingsRequest,
            read_inputs_or_chat,
            embeddings,
            EmbeddingsResponse,
            _SAFETENSORS,
            wanted=wanted_vectors,
            shown=Shown(Group.EMBED, "Embed texts, one vector each", _TEXTS),
        )
        for path in ("/v1/embeddings", "/embeddings")
    ),
    post_texts(
        "/v1/multi-vector",
        EmbeddingsRequest,
        read_inputs_or_chat,
        multi_vector,
        MultiVectorResponse,
        _SAFETENSORS,
        wanted=Wanted.TOKEN_VECTORS,
        shown=Shown(Group.EMBED, "Embed texts, one vector per token", _TEXTS),
    ),
    post_texts(
        "/pooling",
        PoolingRequest,
        read_inputs_or_chat,
        pooling,
        PoolingResponse,
        _SAFETENSORS,
        wanted=wanted_pooling,
        shown=Shown(Group.EMBED, "Embed or classify texts, by task", _TEXTS | {"task": "embed"}),
    ),
)
