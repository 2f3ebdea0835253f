"""The routes that give vectors: /v1/embeddings, /v1/multi-vector and /pooling."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from maxsimd.api import wire
from maxsimd.api.answer import Answer, new_id, now, usage_of, wire_answer
from maxsimd.api.encodings import described, encoding_of
from maxsimd.api.handlers.route import post_texts
from maxsimd.api.models import Wanted
from maxsimd.api.reading import (
    Inputs,
    check_count,
    check_token_ids,
    meaning_of,
    numbers_of,
    truncation_of,
    wants_base64,
)
from maxsimd.api.reading_messages import Chat, inputs_or_chat_of
from maxsimd.api.request_warnings import UnreadField, warnings_of
from maxsimd.api.state import ServerState
from maxsimd.api.vectors import encoded, file_of
from maxsimd.engine import (
    ClassifyResult,
    EmbedResult,
    InvalidRequestError,
    RequestTooLargeError,
    TokenEmbedResult,
)
from maxsimd.engine.workers import run_in_thread_if_large

# Bytes that a number of an answer takes as text, and as much again while that is made; and a label.
_BYTES_A_NUMBER, _BYTES_A_LABEL = 24, 160

_SHORTEST = 1e-12
NORMALIZES_ANYWAY = "{} false has no effect: the model's own last layer normalizes; leave it out"

_SAFETENSORS = "application/vnd.safetensors"
# How the ids of answers begin, by what is in them.
_PREFIXES = {wire.Embedding: "embd", wire.MultiVector: "multi-vector", wire.Pooling: "pooling"}

_Result = ClassifyResult | EmbedResult | TokenEmbedResult


async def embeddings(
    state: ServerState, body: wire.EmbeddingsRequest, inputs: Inputs | Chat, tenant: str
) -> Answer:
    return await _vectors(state, body, inputs, tenant, "embed", wire.Embedding)


async def multi_vector(
    state: ServerState, body: wire.EmbeddingsRequest, inputs: Inputs | Chat, tenant: str
) -> Answer:
    """Jina's: a vector a token, as late interaction scores them."""
    return await _vectors(state, body, inputs, tenant, "token_embed", wire.MultiVector)


async def pooling(
    state: ServerState, body: wire.PoolingRequest, inputs: Inputs | Chat, tenant: str
) -> Answer:
    """vLLM's: the task that the request names, or else the one that the model's scores are made of."""
    task = body.task or state.engine.facts.score_task
    return await _vectors(state, body, inputs, tenant, task, wire.Pooling)


async def _vectors(
    state: ServerState,
    body: wire.EmbeddingsRequest,
    inputs: Inputs | Chat,
    tenant: str,
    task: str,
    item: type[Any],
) -> Answer:
    """The vectors in the numbers and the format that the request wants; in JSON an `item` a text."""
    numbers, as_base64, model = numbers_of(body), wants_base64(body), state.model_name
    if isinstance(inputs, Chat):
        inputs = await _read_chat(state, body, inputs)
    else:
        check_token_ids(inputs, state.config.accept_token_ids)
    state = state.telling_of(_unused_for(task, body), f"task {task}")
    normalises = "embed" in state.engine.facts.normalised
    result = await _run(state, body, inputs, tenant, task)
    vectors = result.scores if isinstance(result, ClassifyResult) else result.embeddings
    warnings = warnings_of(result.truncated, state.field_warnings, body)
    if body.normalized is not None and task == "embed" and isinstance(result, EmbedResult):
        if body.normalized and not normalises:
            vectors = in_unit_length(result.embeddings)
        elif normalises and not body.normalized:
            warnings = [*(warnings or ()), NORMALIZES_ANYWAY.format("normalized")]
    size = sum(each.size for each in vectors)
    made_by = result.encoding if isinstance(result, EmbedResult) else None
    if body.encoding_format == "safetensors":
        about = {"model": model, "prompt_tokens": str(result.usage.prompt_tokens)}
        if made_by is not None:
            about["encoding"] = msgspec.json.encode(described(made_by)).decode()
        whole = await run_in_thread_if_large(size, file_of, list(vectors), numbers, about)
        answer = Answer(200, {"Content-Type": _SAFETENSORS}, whole)
    else:

        def build() -> wire.VectorsResponse:
            all_encoded = [encoded(each, numbers, as_base64) for each in vectors]
            data = [item(i, each.data, scales=each.scales) for i, each in enumerate(all_encoded)]
            return wire.VectorsResponse(
                new_id(_PREFIXES[item]),
                now(),
                model,
                data,
                usage_of(result.usage),
                warnings=warnings,
                encoding=msgspec.UNSET if made_by is None else described(made_by),
            )

        answer = await wire_answer(build, size)
    return answer.with_timings(result.timings).with_warnings(warnings)


async def _run(
    state: ServerState, body: wire.EmbeddingsRequest, inputs: Inputs, tenant: str, task: str
) -> _Result:
    engine = state.engine
    options: dict[str, Any] = {
        "truncation": truncation_of(body, state.config.long_documents),
        "priority": body.priority or 0,
        "tenant": tenant,
        "timeout": body.timeout,
    }
    use_activation = body.use_activation if isinstance(body, wire.PoolingRequest) else None
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
        "input_type": meaning_of(body),
        "prompt_name": body.prompt_name,
        "dimensions": dimensions,
    }
    if task == "embed":
        return await engine.embed(inputs, **options, **_of_one_vector(state, body, len(inputs)))
    return await engine.embed_tokens(inputs, **options, max_tokens=most_vectors(state, dimensions))


def _unused_for(task: str, body: wire.EmbeddingsRequest) -> list[UnreadField]:
    """Fields that say how vectors are made, in a request for something else."""
    names = ["normalized"] if task != "embed" or body.encoding is not None else []
    if task == "classify":
        names += ["dimensions", "output_dimension", "input_type", "prompt_name"]
    return [UnreadField(name, None) for name in names if getattr(body, name)]


def in_unit_length(rows: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Each row divided by its length."""
    scaled: NDArray[np.floating[Any]] = rows / np.maximum(
        np.linalg.norm(rows, axis=-1, keepdims=True), _SHORTEST
    )
    return scaled


def _check_task(body: wire.EmbeddingsRequest, task: str) -> None:
    """Refuses what is said of one vector a text where others are asked for."""
    given = {
        "late_chunking": bool(body.late_chunking),
        "chunks": body.chunks is not None,
        "encoding": body.encoding is not None,
        "muvera": body.muvera is not None,
    }
    for name, is_given in given.items():
        if is_given and task != "embed":
            raise InvalidRequestError(f"{name} is for the task embed, not {task}", name)


def _of_one_vector(state: ServerState, body: wire.EmbeddingsRequest, num_texts: int) -> dict[str, Any]:
    """What a request says of how a text, or each of its chunks, becomes one vector."""
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
        # A vector that is shortened is made at its whole length first.
        length = encoding.whole_length(dim)
        _check_room(state, num_vectors, length, "ask for a smaller k_sim, r_reps or d_proj")
    return options | {"encoding": encoding}


def check_embeddings(state: ServerState, num_vectors: int, dimensions: int | None) -> None:
    """Refuses more vectors than there is room for. Without `dimensions` they are as long as the model makes
    them."""
    dim = state.engine.facts.dims.get("embed")
    if dim is not None and (dimensions is None or 1 <= dimensions <= dim):
        _check_room(state, num_vectors, dimensions or dim, "ask for shorter vectors")
    # else the engine says what is wrong


def check_labels(state: ServerState, num_texts: int) -> None:
    """Refuses more texts than there is room for the scores of all labels of."""
    num_labels = len(state.engine.facts.labels)
    most = (state.config.max_bodies_mb << 20) // (_BYTES_A_LABEL * max(1, num_labels))
    if num_texts > most:
        raise RequestTooLargeError(
            f"{num_texts} texts would have {num_labels} labels each, and there is room for {most} such "
            "texts; send fewer at a time, or raise --max-bodies-mb"
        )


def _check_room(state: ServerState, num_vectors: int, length: int, remedy: str) -> None:
    """Refuses vectors whose numbers, in an answer, need more memory than bodies may have together."""
    most = (state.config.max_bodies_mb << 20) // (_BYTES_A_NUMBER * length)
    if num_vectors > most:
        raise RequestTooLargeError(
            f"{num_vectors} vectors of {length} numbers would be made, and there is room for {most}; send "
            f"fewer texts at a time, {remedy}, or raise --max-bodies-mb"
        )


async def _read_chat(state: ServerState, body: wire.EmbeddingsRequest, chat: Chat) -> Inputs:
    """As token ids, unless the request wants special tokens beside those of the template."""
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
    """How many vectors of a token each an answer may have, so that it takes no more memory than bodies may
    together; None where the model has none."""
    dim = state.engine.facts.dims.get("token_embed")
    if dim is None or (dimensions is not None and not 1 <= dimensions <= dim):
        return None
    return (state.config.max_bodies_mb << 20) // (_BYTES_A_NUMBER * (dimensions or dim))


_ANSWERS = (wire.VectorsResponse, _SAFETENSORS)


def wanted_vectors(state: ServerState, body: wire.EmbeddingsRequest) -> Wanted:
    """Encodings are made of token vectors."""
    return Wanted.VECTORS if body.encoding is None else Wanted.TOKEN_VECTORS


_WANTED_OF_TASK = {"token_embed": Wanted.TOKEN_VECTORS, "classify": Wanted.CLASSES}


def wanted_pooling(state: ServerState, body: wire.PoolingRequest) -> Wanted:
    return _WANTED_OF_TASK.get(body.task or "", Wanted.VECTORS)


ROUTES = (
    *(
        post_texts(
            path, wire.EmbeddingsRequest, inputs_or_chat_of, embeddings, *_ANSWERS, wanted=wanted_vectors
        )
        for path in ("/v1/embeddings", "/embeddings")
    ),
    post_texts(
        "/v1/multi-vector",
        wire.EmbeddingsRequest,
        inputs_or_chat_of,
        multi_vector,
        *_ANSWERS,
        wanted=Wanted.TOKEN_VECTORS,
    ),
    post_texts("/pooling", wire.PoolingRequest, inputs_or_chat_of, pooling, *_ANSWERS, wanted=wanted_pooling),
)
