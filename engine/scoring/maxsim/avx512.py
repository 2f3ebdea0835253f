"""MaxSim by the compiled kernel, and in plain torch for precisions and dimensions that the kernel does not
take."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.ops import cpu as kernels
from maxsimd.engine.ops.cpu.maxsim import is_supported, maxsim, maxsim_apart
from maxsimd.engine.scoring.maxsim.reference import EMPTY_DOCUMENT_SCORE
from maxsimd.engine.scoring.maxsim.tiled import maxsim_tiled
from maxsimd.pooling.ragged import Ragged, decoded

# The rows [tokens, dim] of one document, and float32 scales [tokens] if they are int8.
Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]


def runs_on(device: torch.device) -> bool:
    """Whether the kernel was built and this machine can run it."""
    return device.type == "cpu" and kernels.is_available()


def maxsim_avx512(queries: Ragged, documents: Ragged, pairs: NDArray[np.int64]) -> torch.Tensor:
    """As `maxsim_reference`, with products in the documents' precision, maxima and sums in float32."""
    dtype, dim = documents.values.dtype, documents.values.shape[1]
    if not is_supported(dtype, dim):
        return maxsim_tiled(queries, documents, pairs)
    return _by_query(
        pairs,
        lambda sorted_pairs: maxsim(
            queries.values.to(dtype),
            queries.offsets,
            documents.values,
            documents.offsets,
            sorted_pairs,
            EMPTY_DOCUMENT_SCORE,
        ),
    )


def maxsim_apart_avx512(queries: Ragged, documents: Sequence[Rows], pairs: NDArray[np.int64]) -> torch.Tensor:
    """The same of documents that lie each by itself, in any precision that embeddings come in; products are
    in the queries' precision."""
    dtype, dim = queries.values.dtype, queries.values.shape[1]
    if not is_supported(dtype, dim):
        together = Ragged.from_items([decoded(*rows, dtype) for rows in documents])
        return maxsim_tiled(queries, together, pairs)
    return _by_query(
        pairs,
        lambda sorted_pairs: maxsim_apart(
            queries.values, queries.offsets, documents, sorted_pairs, EMPTY_DOCUMENT_SCORE
        ),
    )


def _by_query(pairs: NDArray[np.int64], score: Callable[[NDArray[np.int64]], torch.Tensor]) -> torch.Tensor:
    """Scores pairs of one query one after the other, so that it is packed once."""
    by_query = pairs[:, 0]
    if (by_query[1:] >= by_query[:-1]).all():
        return score(pairs)
    order = np.argsort(by_query, kind="stable")
    scores = score(pairs[order])
    in_order = torch.empty_like(scores)
    in_order[torch.from_numpy(order)] = scores
    return in_order
