"""The routes that give vectors: /v1/embeddings and /pooling."""

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maxsimd.api import wire
from maxsimd.api.answer import Answer, new_id, now, usage_of, warnings_of, wire_answer
from maxsimd.api.handlers.route import post_texts
from maxsimd.api.reading import check_token_ids, input_type_of, inputs_of, truncation_of
from maxsimd.api.state import ServerState
from maxsimd.engine import ClassifyResult, EmbedResult, InvalidRequestError, TokenEmbedResult

# What a number of an answer takes as text, and as much again while that is made.
_BYTES_A_NUMBER = 24

Inputs = list[str] | list[list[int]]


async def embeddings(state: ServerState, body: wire.EmbeddingsRequest, inputs: Inputs, tenant: str) -> Answer:
    check_token_ids(inputs, state.config.accept_token_ids)
    model = state.model_name
    result = await state.engine.embed(
        inputs,
        input_type=input_type_of(body.input_type),
        prompt_name=body.prompt_name,
        dimensions=body.dimensions,
        truncation=truncation_of(body, state.config.long_documents),
        priority=body.priority or 0,
        tenant=tenant,
        timeout=body.timeout,
    )

    warnings = warnings_of(result.truncated)

    def build() -> wire.EmbeddingsResponse:
        data = [
            wire.Embedding(i, _encode(vector, body.encoding_format))
            for i, vector in enumerate(result.embeddings)
        ]
        usage = usage_of(result.usage)
        return wire.EmbeddingsResponse(new_id("embd"), now(), model, data, usage, warnings=warnings)

    return (await wire_answer(build, result.embeddings.size)).with_warnings(warnings)


async def pooling(state: ServerState, body: wire.PoolingRequest, inputs: Inputs, tenant: str) -> Answer:
    check_token_ids(inputs, state.config.accept_token_ids)
    model = state.model_name
    result = await _pool(state, body, inputs, tenant)
    pooled = result.scores if isinstance(result, ClassifyResult) else result.embeddings
    warnings = warnings_of(result.truncated)

    def build() -> wire.PoolingResponse:
        data = [wire.Pooling(i, _encode(item, body.encoding_format)) for i, item in enumerate(pooled)]
        usage = usage_of(result.usage)
        return wire.PoolingResponse(new_id("pooling"), now(), model, data, usage, warnings=warnings)

    num_values = sum(item.size for item in pooled)
    return (await wire_answer(build, num_values)).with_warnings(warnings)


async def _pool(
    state: ServerState, body: wire.PoolingRequest, inputs: Inputs, tenant: str
) -> ClassifyResult | EmbedResult | TokenEmbedResult:
    """Runs the task that the request names, or else the one that the model's scores are made of."""
    engine = state.engine
    task = body.task or engine.model.score_task
    options: dict[str, Any] = {
        "truncation": truncation_of(body, state.config.long_documents),
        "priority": body.priority or 0,
        "tenant": tenant,
        "timeout": body.timeout,
    }
    if task == "classify":
        activated = body.use_activation is not False
        return await engine.classify(inputs, use_activation=activated, **options)
    if body.use_activation is False:
        raise InvalidRequestError("use_activation=false is only for the task classify", "use_activation")
    options |= {
        "input_type": input_type_of(body.input_type),
        "prompt_name": body.prompt_name,
        "dimensions": body.dimensions,
    }
    if task == "embed":
        return await engine.embed(inputs, **options)
    return await engine.embed_tokens(inputs, **options, max_tokens=most_vectors(state, body.dimensions))


def most_vectors(state: ServerState, dimensions: int | None) -> int | None:
    """How many vectors of a token each an answer may have, so that it takes no more memory than bodies may
    together; None where the model has none."""
    task = state.engine.model.tasks.get("token_embed")
    if task is None or (dimensions is not None and dimensions < 1):
        return None
    return (state.config.max_bodies_mb << 20) // (_BYTES_A_NUMBER * (dimensions or task.dim))


def _encode(array: NDArray[np.float32], encoding_format: str | None) -> Any:
    """Numbers as nested lists, or as base64 of little-endian float32 in row order."""
    if encoding_format == "base64":
        return base64.b64encode(np.ascontiguousarray(array, dtype="<f4").tobytes()).decode("ascii")
    return array.tolist()


ROUTES = (
    post_texts("/v1/embeddings", wire.EmbeddingsRequest, inputs_of, embeddings),
    post_texts("/embeddings", wire.EmbeddingsRequest, inputs_of, embeddings),
    post_texts("/pooling", wire.PoolingRequest, inputs_of, pooling),
)
