"""Cohere's routes for vectors. Its rerank is beside the others that rank."""

import base64
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maxsimd.api import wire_cohere
from maxsimd.api.answer import Answer, new_id, warnings_of, wire_answer
from maxsimd.api.handlers.route import post_texts
from maxsimd.api.reading import as_texts, check_count, cohere_truncation_of, input_type_of
from maxsimd.api.state import ServerState
from maxsimd.engine import InvalidRequestError

# What a text is embedded for that is neither a query nor a document.
_OTHER_TYPES = ("classification", "clustering")


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
        if name not in _ENCODED:
            raise InvalidRequestError(
                f"embedding_types {name} is not given here; use {', '.join(_ENCODED)}", "embedding_types"
            )
    input_type = None if body.input_type in _OTHER_TYPES else input_type_of(body.input_type)
    result = await state.engine.embed(
        texts,
        input_type=input_type,
        dimensions=body.output_dimension,
        truncation=cohere_truncation_of(body, state.config.long_documents),
        tenant=tenant,
    )
    warnings = warnings_of(result.truncated)

    def build() -> wire_cohere.CohereEmbedResponse:
        rows = result.embeddings
        return wire_cohere.CohereEmbedResponse(
            id=new_id("embd"),
            embeddings={name: _ENCODED[name](rows) for name in types} if by_type else rows.tolist(),
            texts=texts,
            meta={
                "api_version": {"version": version},
                "billed_units": {"input_tokens": result.usage.prompt_tokens},
            },
            response_type="embeddings_by_type" if by_type else "embeddings_floats",
            warnings=warnings,
        )

    answer = await wire_answer(build, result.embeddings.size * len(types), sum(map(len, texts)))
    return answer.with_warnings(warnings)


def _base64(rows: NDArray[np.float32]) -> list[str]:
    """Little-endian float32."""
    return [base64.b64encode(np.ascontiguousarray(row, dtype="<f4").tobytes()).decode() for row in rows]


def _signs(rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    """A bit a number, 1 for those above 0, eight in a byte."""
    return np.packbits(rows > 0, axis=-1)


_ENCODED: Mapping[str, Callable[[NDArray[np.float32]], Any]] = {
    "float": lambda rows: rows.tolist(),
    "base64": _base64,
    # Those of the signed kind are 128 less.
    "binary": lambda rows: (_signs(rows).astype(np.int16) - 128).tolist(),
    "ubinary": lambda rows: _signs(rows).tolist(),
}


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
    post_texts("/v1/embed", wire_cohere.CohereEmbedRequest, _texts_of, embed_1),
    post_texts("/v2/embed", wire_cohere.CohereEmbedRequest, _texts_of, embed_2),
)
