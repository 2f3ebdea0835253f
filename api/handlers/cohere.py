"""Cohere's routes for vectors. Its rerank is beside the others that rank."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from maxsimd.api import wire_cohere
from maxsimd.api.answer import Answer, new_id, wire_answer
from maxsimd.api.handlers.embedding import check_embeddings
from maxsimd.api.handlers.route import post_texts
from maxsimd.api.models import Wanted
from maxsimd.api.reading import (
    check_count,
    cohere_truncation_of,
    input_called,
    input_type_of,
    pictures_of,
    texts_and_pictures,
)
from maxsimd.api.request_warnings import warnings_of
from maxsimd.api.state import ServerState
from maxsimd.api.vectors import Numbers, encode_rows, encoded
from maxsimd.engine import InvalidRequestError
from maxsimd.engine.media import Content

# Texts and, for a model that reads them, pictures.
Texts: TypeAlias = list[str | Content]

# Its types, and the numbers of which each is made. Those of 8 bits have no place for their scale.
_NUMBERS: Mapping[str, Numbers] = {
    "float": "float32",
    "base64": "float32",
    "binary": "binary",
    "ubinary": "ubinary",
}


async def embed_1(
    state: ServerState, body: wire_cohere.CohereEmbedRequest, texts: Texts, tenant: str
) -> Answer:
    """Lists of numbers, unless types of them are named."""
    return await _embed(state, body, texts, tenant, version="1", by_type=body.embedding_types is not None)


async def embed_2(
    state: ServerState, body: wire_cohere.CohereEmbedRequest, texts: Texts, tenant: str
) -> Answer:
    """Lists of numbers by their types."""
    return await _embed(state, body, texts, tenant, version="2", by_type=True)


async def _embed(
    state: ServerState,
    body: wire_cohere.CohereEmbedRequest,
    texts: Texts,
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
    of_pictures = body.input_type == "image" and not any(isinstance(text, str) for text in texts)
    check_embeddings(state, len(texts) * len(types), body.output_dimension)
    with input_called(_name_of(body)):
        result = await state.engine.embed(
            texts,
            input_type="document" if of_pictures else input_type_of(body.input_type),
            dimensions=body.output_dimension,
            truncation=cohere_truncation_of(body, state.config.long_documents),
            tenant=tenant,
        )
    warnings = warnings_of(result.truncated, state.field_warnings, body)
    echoed = [text for text in texts if isinstance(text, str)]
    billed = {"input_tokens": result.usage.prompt_tokens}
    if len(echoed) < len(texts):
        billed["images"] = sum(len(content.pictures) for content in texts if isinstance(content, Content))

    def build() -> wire_cohere.CohereEmbedResponse:
        rows = result.embeddings
        by_name = {name: _of_type(rows, name) for name in types} if by_type else {}
        return wire_cohere.CohereEmbedResponse(
            id=new_id("embd"),
            embeddings=by_name if by_type else [encode_rows(row) for row in rows],
            texts=echoed,
            meta={"api_version": {"version": version}, "billed_units": billed},
            response_type="embeddings_by_type" if by_type else "embeddings_floats",
            warnings=warnings,
        )

    answer = await wire_answer(build, result.embeddings.size * len(types), sum(map(len, echoed)))
    return answer.with_timings(result.timings).with_warnings(warnings)


def _of_type(rows: NDArray[np.float32], name: str) -> list[Any]:
    return [encoded(row, _NUMBERS[name], as_base64=name == "base64").data for row in rows]


def _name_of(request: wire_cohere.CohereEmbedRequest) -> str:
    """Under which of three names a request has what is to be embedded."""
    named = [name for name in ("texts", "images", "inputs") if getattr(request, name) is not None]
    if not named:
        raise InvalidRequestError("texts is missing", "texts")
    if len(named) > 1:
        raise InvalidRequestError(f"{' and '.join(named)} exclude each other; leave out one", named[1])
    return named[0]


def _texts_of(request: wire_cohere.CohereEmbedRequest, most: int) -> Texts:
    """What is to be embedded."""
    name = _name_of(request)
    values = getattr(request, name)
    check_count(values, name, most)
    if not values:
        raise InvalidRequestError(f"{name} is empty; give at least one", name)
    if name == "images":
        return pictures_of(values, most, name)
    return [*texts_and_pictures([*values], name)]


ROUTES = (
    *(
        post_texts(
            path,
            wire_cohere.CohereEmbedRequest,
            _texts_of,
            handler,
            wire_cohere.CohereEmbedResponse,
            wanted=Wanted.VECTORS,
        )
        for path, handler in (("/v1/embed", embed_1), ("/v2/embed", embed_2))
    ),
)
