"""MaxSim by the Triton kernel: all indices and bounds of a step reach the device in one copy."""

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.ops.triton.maxsim import PackedTokens, Pairs, maxsim
from maxsimd.engine.ops.triton.maxsim_tiles import group_by_query_length
from maxsimd.engine.scoring.maxsim.reference import EMPTY_DOCUMENT_SCORE
from maxsimd.pooling.ragged import Ragged
from maxsimd.pooling.spans import Spans
from maxsimd.pooling.transfer import to_device


def maxsim_triton(
    queries: Ragged, documents: Ragged, pairs: NDArray[np.int64], split_k: int | None = None
) -> torch.Tensor:
    """As `maxsim_reference`; documents may be int8 rows with a scale each. The kernel divides each document
    among `split_k` programs, by default as many as keep the device busy."""
    return maxsim_spans_triton(queries, Spans.of(documents), pairs, split_k)


def maxsim_spans_triton(
    queries: Ragged, documents: Spans, pairs: NDArray[np.int64], split_k: int | None = None
) -> torch.Tensor:
    """The same of documents that lie anywhere in one tensor."""
    device = documents.values.device
    if len(pairs) == 0:
        return torch.empty(0, dtype=torch.float32, device=device)
    indices = np.asarray(pairs, dtype=np.int64)
    order, groups = group_by_query_length(np.diff(queries.offsets)[indices[:, 0]])
    if order is not None:
        indices = indices[order]
    numbers = [queries.offsets[:-1], queries.offsets[1:], documents.starts, documents.stops, *indices.T]
    numbers.append(np.empty(0) if order is None else np.argsort(order))
    together = to_device(np.concatenate(numbers).astype(np.int32), device)
    parts = iter(together.split([len(part) for part in numbers]))
    longest_query, longest = int(np.diff(queries.offsets).max()), int(documents.lengths.max())
    # The kernel multiplies numbers of one precision, int8 aside.
    values = queries.values if documents.scales is not None else queries.values.to(documents.values.dtype)
    scores = maxsim(
        PackedTokens(values, next(parts), next(parts), max(1, longest_query)),
        PackedTokens(documents.values, next(parts), next(parts), longest, documents.scales),
        Pairs(next(parts), next(parts), groups),
        EMPTY_DOCUMENT_SCORE,
        split_k=split_k,
    )
    return scores if order is None else scores[next(parts)]
