"""One vector of a text's token vectors: what a request must say for it, and from values to vectors."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.cache import EmbeddingCache
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.processors import Prepared, usage_of
from maxsimd.engine.requests import EmbedResult, InputType, Value, Values
from maxsimd.pooling.muvera import Muvera
from maxsimd.pooling.ragged import Ragged, decoded


def as_muvera(encoding: Muvera | Literal["muvera"]) -> Muvera:
    """An encoding by its parameters, or with those that it has by default. Raises InvalidRequestError for a
    name that there is not."""
    found = Muvera() if encoding == "muvera" else encoding
    if not isinstance(found, Muvera):
        raise InvalidRequestError(f"encoding {encoding!r} is not known; use muvera", "encoding")
    return found


def check_encoding(
    muvera: Muvera, model: LoadedModel, input_type: InputType | None, others: Mapping[str, bool]
) -> None:
    """Raises InvalidRequestError where a model's scores are no MaxSim, where its tokens do not go with the
    parameters, where it is not said what a text is, and for any of the `others`, options that exclude it."""
    if model.score_task != "token_embed":
        raise InvalidRequestError(
            "encoding is for models that score by late interaction, and this one does not; leave it out, or "
            "run the model with score_type late-interaction",
            "encoding",
        )
    if input_type is None:
        raise InvalidRequestError(
            "queries and documents are encoded unlike; say which they are by input_type query or document",
            "input_type",
        )
    for name, is_given in others.items():
        if is_given:
            raise InvalidRequestError(f"{name} and encoding exclude each other; leave out one", name)
    try:
        muvera.length(model.tasks["token_embed"].dim)
    except ValueError as error:
        raise InvalidRequestError(str(error), "encoding") from None


def encoded_result(
    prepared: Prepared, values: Values, muvera: Muvera, are_queries: bool, cache: EmbeddingCache | None
) -> EmbedResult:
    """One vector a text. Documents are encoded in the precision of the cache, if there is one, whether they
    were in it or not."""
    run = iter(values.values)
    num_texts = len(values.values) + len(prepared.cached_rows)
    matrices: list[torch.Tensor] = []
    for i in range(num_texts):
        entry = prepared.cached_rows.get(i)
        if entry is not None:
            matrices.append(decoded(entry.rows, entry.scales, torch.float32))
        else:
            rows = torch.from_numpy(np.array(_rows(next(run)), dtype=np.float32))
            matrices.append(rows if cache is None or are_queries else _rounded(rows, cache))
    vectors = muvera.encode(matrices, "query" if are_queries else "document")
    return EmbedResult(vectors, usage_of(prepared), prepared.truncated, values.timings, muvera)


def _rows(value: Value | None) -> NDArray[np.float32]:
    assert isinstance(value, np.ndarray)
    return value


def _rounded(rows: torch.Tensor, cache: EmbeddingCache) -> torch.Tensor:
    """Rows as they are when they come from the cache."""
    return cache.rounded(Ragged(rows, (0, len(rows)))).decoded(torch.float32).values
