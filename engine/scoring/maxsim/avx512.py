"""MaxSim by the compiled kernel, and in plain torch for precisions and dimensions that the kernel does not
take."""

from collections.abc import Callable, Sequence

import torch

from maxsimd.engine.ops import cpu as kernels
from maxsimd.engine.ops.cpu.maxsim import is_supported, maxsim, maxsim_apart
from maxsimd.engine.scoring.maxsim.reference import EMPTY_DOCUMENT_SCORE
from maxsimd.engine.scoring.maxsim.tiled import maxsim_tiled
from maxsimd.pooling.ragged import Ragged


def runs_on(device: torch.device) -> bool:
    """Whether the kernel was built and this machine can run it."""
    return device.type == "cpu" and kernels.is_available()


def maxsim_avx512(queries: Ragged, documents: Ragged, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
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


def maxsim_apart_avx512(
    queries: Ragged, documents: Sequence[Ragged], pairs: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """The same of documents that lie each by itself, of one item each, in any precision that embeddings come
    in; products are in the queries' precision."""
    dtype, dim = queries.values.dtype, queries.values.shape[1]
    if not is_supported(dtype, dim):
        return maxsim_tiled(queries, Ragged.join([document.decoded(dtype) for document in documents]), pairs)
    rows = [(document.values, document.scales) for document in documents]
    return _by_query(
        pairs,
        lambda sorted_pairs: maxsim_apart(
            queries.values, queries.offsets, rows, sorted_pairs, EMPTY_DOCUMENT_SCORE
        ),
    )


def _by_query(
    pairs: Sequence[tuple[int, int]], score: Callable[[Sequence[tuple[int, int]]], torch.Tensor]
) -> torch.Tensor:
    """Scores pairs of one query one after the other, so that it is packed once."""
    order = sorted(range(len(pairs)), key=lambda i: pairs[i][0])
    sorted_pairs = [pairs[i] for i in order]
    scores = score(sorted_pairs)
    if sorted_pairs == list(pairs):
        return scores
    in_order = torch.empty_like(scores)
    in_order[torch.tensor(order)] = scores
    return in_order
