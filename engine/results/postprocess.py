"""Values to results: activation, ranking and shortening. Functions of their input, called `aside` where there
is much of it."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.config import ScoreType
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.processors import Prepared, usage_of
from maxsimd.engine.requests import (
    ClassifyResult,
    EmbedResult,
    Item,
    RankedDocument,
    SparseEmbedResult,
    SparseVector,
    TokenEmbedResult,
    Value,
    Values,
)
from maxsimd.engine.scoring.calibration import Calibration
from maxsimd.engine.scoring.scale import has_bounds
from maxsimd.pooling.methods import Head
from maxsimd.pooling.query_rows import QueryRows

# Rows that an activation is applied to at a time. torch takes whole vectors of numbers in one way and what is
# left over in another, which may differ in the last bit: with this number of rows nothing is left over.
_ROWS = 64
# With more values than this, what is made of them would keep the event loop for milliseconds. Numbers in one
# array are that much less work.
_MANY, _NUMBERS_A_VALUE = 500, 200

T = TypeVar("T")
# From scores, and how many tokens of its query take part in each, to scores from 0 to 1.
Bounded: TypeAlias = Callable[[NDArray[np.float32], NDArray[np.int64] | None], NDArray[np.float32]]


async def aside(function: Callable[[], T], work: int) -> T:
    """Calls a function that makes a result, in a thread where it is much `work`, counted in values. It needs
    nothing of the engine, which may stop meanwhile."""
    return await asyncio.to_thread(function) if work > _MANY else function()


def work_in(values: Values) -> int:
    """How much work it is to make a result of values that may be arrays, in values."""
    numbers = sum(value.size if isinstance(value, np.ndarray) else 1 for value in values.values)
    return max(len(values.values), numbers // _NUMBERS_A_VALUE)


def bounded_by(model: LoadedModel, calibration: Calibration | None = None) -> Bounded:
    """How the scores of a model become numbers from 0 to 1: probabilities are such already, of a cosine the
    negative part is cut off, and of a MaxSim sum, which has a cosine for each token of the query, the mean is
    taken first; and these become probabilities by a `calibration`, if there is one. Raises
    InvalidRequestError for a model whose scores have no bounds."""
    if not has_bounds(model):
        raise InvalidRequestError(
            "normalize is not possible: this model's vectors have any length, and so its scores have no "
            "bounds; leave it out",
            "normalize",
        )
    is_sum = model.score_type is not ScoreType.LISTWISE and model.similarity == "maxsim"

    def bounded(scores: NDArray[np.float32], rows: NDArray[np.int64] | None) -> NDArray[np.float32]:
        if model.score_task != "classify":
            scores = np.clip(scores / (rows if is_sum and rows is not None else 1), 0, 1)
        return scores if calibration is None else calibration(scores)

    return bounded


@lru_cache(maxsize=64)
def keeps_order(activation: Head) -> bool:
    """Whether a greater logit never has a smaller score, but for rounding. Tried, because a checkpoint may
    name any function."""
    scores = activation(torch.linspace(-40, 40, 641)[:, None])  # [641, 1]
    return bool((scores.diff(dim=0) >= -1e-6).all())


def activate(logits: NDArray[np.float32], activation: Head) -> NDArray[np.float32]:
    """The activation of each row [labels] of logits [n, labels] by itself, whatever other rows there are."""
    filled = np.zeros((len(logits) + -len(logits) % _ROWS, logits.shape[1]), dtype=np.float32)
    filled[: len(logits)] = logits
    # Without rows there is one part, which is empty.
    parts = (torch.from_numpy(filled[i : i + _ROWS]) for i in range(0, max(1, len(filled)), _ROWS))
    return np.concatenate([activation(part).numpy() for part in parts])[: len(logits)]


def embed_result(prepared: Prepared, values: Values, dimensions: int | None, normalised: bool) -> EmbedResult:
    """One row a text."""
    rows = np.concatenate([np.asarray(value) for value in values.values])
    vectors = shorten(rows, dimensions, normalised)
    return EmbedResult(vectors, usage_of(prepared), prepared.truncated, values.timings)


def token_embed_result(
    prepared: Prepared, values: Values, dimensions: int | None, normalised: bool
) -> TokenEmbedResult:
    """One matrix a text, with a row a token."""
    matrices = [shorten(np.asarray(value), dimensions, normalised) for value in values.values]
    return TokenEmbedResult(matrices, usage_of(prepared), prepared.truncated, values.timings)


def sparse_embed_result(prepared: Prepared, values: Values) -> SparseEmbedResult:
    """One sparse vector a text."""
    vectors = [_sparse_vector(np.asarray(value)) for value in values.values]
    return SparseEmbedResult(vectors, usage_of(prepared), prepared.truncated, values.timings)


def _sparse_vector(entries: NDArray[np.float32]) -> SparseVector:
    """Of entries [n, 2], each a token's id and its weight."""
    entries = entries[entries[:, 1] != 0]
    entries = entries[np.argsort(entries[:, 0], kind="stable")]
    return SparseVector(entries[:, 0].astype(np.int64), entries[:, 1].copy())


def query_rows(prepared: Prepared, values: Values, model: LoadedModel, dtype: torch.dtype) -> QueryRows:
    """The embedding of the one query, in the precision `dtype` where its tokens are compared one by one: one
    vector is compared in float32."""
    rows = torch.from_numpy(np.array(values.values[0], dtype=np.float32))
    return QueryRows(
        rows.to(dtype) if model.score_task == "token_embed" else rows,
        tokens=usage_of(prepared).query_tokens,
        truncated=prepared.truncated > 0,
        fingerprint=model.fingerprint,
    )


def classify_result(
    prepared: Prepared, values: Values, activation: Head | None, labels: tuple[str, ...]
) -> ClassifyResult:
    """One row a text, with a number a label: logits, unless there is an `activation`."""
    rows = np.array(values.values, dtype=np.float32).reshape(len(values.values), -1)
    scores = rows if activation is None else activate(rows, activation)
    return ClassifyResult(scores, labels, usage_of(prepared), prepared.truncated, values.timings)


def document_scores(
    combine: Callable[[list[Value]], NDArray[np.float32]], values: Values
) -> tuple[NDArray[np.float32], dict[int, str]]:
    """One score a document, NaN where a value is missing, and for which documents that is because of an
    error."""
    there = [math.nan if value is None else value for value in values.values]
    errors: dict[int, str] = {}
    for reason in dict.fromkeys(values.errors.values()):
        only: list[Value] = [math.nan if values.errors.get(i) == reason else 0.0 for i in range(len(there))]
        errors |= {int(i): reason for i in np.flatnonzero(np.isnan(combine(only)))}
    return combine(there), errors


def unscored(scores: NDArray[np.float32], errors: Mapping[int, str]) -> tuple[int, ...]:
    """The documents without a score that have no error either."""
    return tuple(int(i) for i in np.flatnonzero(np.isnan(scores)) if int(i) not in errors)


def rank(
    scores: Sequence[float],
    documents: Sequence[Item],
    top_n: int | None,
    threshold: float | None = None,
    by: Sequence[float] | None = None,
) -> list[RankedDocument]:
    """Documents best first, ties in input order; the first `top_n` of them, all for None or 0. They are
    ranked `by` these numbers, if given, else by their scores. Those whose score is NaN, or below the
    `threshold`, are left out."""
    keys = np.asarray(scores if by is None else by, dtype=np.float64)
    order = np.argsort(-keys, kind="stable")  # NaN last
    least = -math.inf if threshold is None else threshold
    scored = [int(i) for i in order if scores[i] >= least]
    return [RankedDocument(i, scores[i], documents[i]) for i in scored[: top_n or None]]


def shorten(rows: NDArray[np.float32], dimensions: int | None, normalised: bool) -> NDArray[np.float32]:
    """The first `dimensions` columns of each row, L2-normalised again where the model normalises.

    Source: matryoshka embeddings, Kusupati et al. 2022 (arXiv 2205.13147)."""
    if dimensions is None or dimensions == rows.shape[-1]:
        return rows
    rows = rows[..., :dimensions]
    if normalised:
        rows = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
    return rows
