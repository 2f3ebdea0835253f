"""Cohere's routes for vectors. Its rerank is beside the others that rank."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maxsimd.api import wire_cohere
from maxsimd.api.answer import Answer, new_id, warnings_of, wire_answer
from maxsimd.api.handlers.route import post_texts
from maxsimd.api.reading import as_texts, check_count, cohere_truncation_of, input_type_of
from maxsimd.api.state import ServerState
from maxsimd.api.vectors import Numbers, encoded
from maxsimd.engine import InvalidRequestError

# Its types, and the numbers of which each is made. Those of 8 bits have no place for their scale.
_NUMBERS: Mapping[str, Numbers] = {
    "float": "float32",
    "base64": "float32",
    "binary": "binary",
    "ubinary": "ubinary",
}


async def embed_1(
    state: ServerState, body: wire_cohere.CohereEmbedRequest, texts: list[str], tenant: str
) -> Answer:
    """Lists of numbers, unless types of them are named."""
    return await _embed(state, body, texts, tenant, version="1", by_type=body.embedding_types is not None)


async def embed_2(
    state: ServerState, body: wire_cohere.CohereEmbedRequest, texts: list[str], tenant: str
) -> Answer:
    """Lists of numbers by their types."""
    return await _embed(state, body, texts, tenant, version="2", by_type=True)


async def _embed(
    state: ServerState,
    body: wire_cohere.CohereEmbedRequest,
    texts: list[str],
    tenant: str,
    *,
    version: str,
    by_type: bool,
) -> Answer:
    types = list(dict.fromkeys(body.embedding_types or ("float",)))
    for name in types:
        if name not in _NUMBERS:
            raise InvalidRequestError(
                f"embedding_types {name} is not given here; use {', '.join(_NUMBERS)}", "embedding_types"
            )
    result = await state.engine.embed(
        texts,
        input_type=input_type_of(body.input_type),
        dimensions=body.output_dimension,
        truncation=cohere_truncation_of(body, state.config.long_documents),
        tenant=tenant,
    )
    warnings = warnings_of(result.truncated)

    def build() -> wire_cohere.CohereEmbedResponse:
        rows = result.embeddings
        return wire_cohere.CohereEmbedResponse(
            id=new_id("embd"),
            embeddings={name: _of_type(rows, name) for name in types} if by_type else rows.tolist(),
            texts=texts,
            meta={
                "api_version": {"version": version},
                "billed_units": {"input_tokens": result.usage.prompt_tokens},
            },
            response_type="embeddings_by_type" if by_type else "embeddings_floats",
            warnings=warnings,
        )

    answer = await wire_answer(build, result.embeddings.size * len(types), sum(map(len, texts)))
    return answer.with_timings(result.timings).with_warnings(warnings)


def _of_type(rows: NDArray[np.float32], name: str) -> list[Any]:
    return [encoded(row, _NUMBERS[name], as_base64=name == "base64").data for row in rows]


def _texts_of(request: wire_cohere.CohereEmbedRequest, most: int) -> list[str]:
    if request.images:
        raise InvalidRequestError("images cannot be read here; send texts", "images")
    name, given = ("texts", request.texts) if request.texts is not None else ("inputs", request.inputs)
    if given is None:
        raise InvalidRequestError("texts is missing", "texts")
    check_count(given, name, most)
    if not given:
        raise InvalidRequestError(f"{name} is empty; give at least one text", name)
    return as_texts([*given], name)


ROUTES = (
    post_texts(
        "/v1/embed", wire_cohere.CohereEmbedRequest, _texts_of, embed_1, wire_cohere.CohereEmbedResponse
    ),
    post_texts(
        "/v2/embed", wire_cohere.CohereEmbedRequest, _texts_of, embed_2, wire_cohere.CohereEmbedResponse
    ),
)
