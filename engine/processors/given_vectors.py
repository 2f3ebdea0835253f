"""Queries and documents that come as their embeddings: checked, and ready to be scored."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
import torch

from maxsimd.engine.cache import CachedEmbedding
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.ops import cpu as kernels
from maxsimd.engine.ops.cpu.maxsim import first_not_finite
from maxsimd.engine.processors.text.truncation import InputName
from maxsimd.engine.requests import ScoreRequest
from maxsimd.engine.workers import yield_to_smaller
from maxsimd.pooling.query_rows import QueryRows
from maxsimd.pooling.vectors import Vectors

# Documents that are checked before smaller work gets its turn.
_AT_ONCE = 64
# Products of two rows up to this are finite in every precision.
_USUAL = torch.finfo(torch.float16).max


class GivenVectors:
    """Checks embeddings for one model, of at most `most` vectors each. All raise InvalidRequestError."""

    def __init__(self, model: LoadedModel, most: int | None) -> None:
        self._model = model
        self._most = most

    def documents(self, given: Mapping[int, Vectors]) -> Iterator[tuple[int, CachedEmbedding]]:
        """Documents by their index, which are scored as if they were cached. No token was ever run for
        them."""
        left = iter(given.items())
        while part := dict(islice(left, _AT_ONCE)):
            yield_to_smaller()
            rows = [self._as_rows(vectors, "documents", index) for index, vectors in part.items()]
            _check_finite([values for values, _ in rows], "documents", [*part])
            for index, (values, scales) in zip(part, rows, strict=True):
                yield index, CachedEmbedding(values, scales, tokens=0, truncated=False)

    def query(self, vectors: Vectors, index: int) -> torch.Tensor:
        """A query's rows [tokens, dim], without scales."""
        if isinstance(vectors, QueryRows) and vectors.fingerprint != self._model.fingerprint:
            what = "was encoded by another model than this one; encode it here, or give its text"
            raise _wrong("queries", index, what)
        rows, scales = self._as_rows(vectors, "queries", index)
        if len(rows):
            _check_finite([rows], "queries", [index])
        return rows if scales is None else rows * scales[:, None]

    def _as_rows(self, vectors: Vectors, param: str, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        try:
            if self._model.items_have_ids and not isinstance(vectors, QueryRows):
                raise ValueError("cannot be scored as a vector by this model; give its text")
            rows, scales = vectors.as_rows(self._model.tasks[self._model.score_task].dim)
            if self._model.score_task == "embed" and len(rows) > 1:
                raise ValueError(f"has {len(rows)} vectors, but with this model a text has one")
            if self._most is not None and len(rows) > self._most:
                raise ValueError(
                    f"has {len(rows)} vectors, and at most {self._most} are taken; send it in parts, or "
                    "raise max_vectors"
                )
        except ValueError as error:
            raise _wrong(param, index, error) from None
        return rows, scales


def overflow_error(
    request: ScoreRequest, document: int, largest_of_queries: dict[int, float]
) -> InvalidRequestError | None:
    """Returns the error for the embedding that makes a document's score infinite or NaN; None if the numbers
    of the embeddings are too small for that, or no embedding was sent.

    `largest_of_queries` keeps the largest number of each query that was sent as an embedding."""
    query = request.query_of(document)
    largest: dict[tuple[str, int], float] = {}
    dim = 0
    if isinstance(given := request.documents[document], Vectors):
        largest["documents", document], dim = given.largest, np.shape(given.values)[-1]
    if isinstance(given := request.queries[query], Vectors):
        if query not in largest_of_queries:
            largest_of_queries[query] = given.largest
        largest["queries", query], dim = largest_of_queries[query], np.shape(given.values)[-1]
    # The vectors of a text are taken to have numbers of at most 1.
    if dim * math.prod(largest.values()) <= _USUAL:
        return None
    param, index = name = max(largest, key=lambda each: largest[each])
    what = f"has numbers up to {largest[name]:.3g}, so that a score is not finite; normalize it"
    return _wrong(param, index, what)


def _check_finite(arrays: Sequence[torch.Tensor], param: str, indexes: Sequence[int]) -> None:
    positions = [position for position, array in enumerate(arrays) if array.dtype != torch.int8]
    floats = [arrays[position] for position in positions]
    found = first_not_finite(floats) if kernels.is_available() else _first_not_finite(floats)
    if found is not None:
        raise _wrong(param, indexes[positions[found]], "has a number that is NaN or infinite")


def _first_not_finite(arrays: Sequence[torch.Tensor]) -> int | None:
    """Does the same in plain torch. A NaN among the numbers is the least and the greatest of them."""
    for i, array in enumerate(arrays):
        if not all(math.isfinite(each) for each in torch.aminmax(array)):
            return i
    return None


def _wrong(param: str, index: int, what: object) -> InvalidRequestError:
    name = InputName(param, index)
    return InvalidRequestError(f"{name} {what}", name.param)
