"""MaxSim by the Triton kernel. Apart from `maxsim.py`, because triton loads slowly and not everywhere."""

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.ops.triton.maxsim import Pairs, maxsim
from maxsimd.engine.ops.triton.maxsim_tiles import MOST_ROWS, group_by_query_length
from maxsimd.engine.scoring.maxsim import EMPTY_DOCUMENT_SCORE
from maxsimd.pooling.ragged import Ragged, Spans, to_device


def maxsim_triton(
    queries: Ragged, documents: Ragged, pairs: NDArray[np.int64], split_k: int | None = None
) -> torch.Tensor:
    """Like `maxsim_reference`. Documents may be int8 rows with scales. Each is divided among `split_k`
    programs, by default as many as keep the device busy."""
    return maxsim_spans_triton(queries, Spans.of(documents), pairs, split_k)


def maxsim_spans_triton(
    queries: Ragged, documents: Spans, pairs: NDArray[np.int64], split_k: int | None = None
) -> torch.Tensor:
    """Like `maxsim_triton` for documents anywhere in one tensor; they are copied first if one lies beyond
    row `MOST_ROWS`. Raises ValueError for more than `MOST_ROWS` rows."""
    device = documents.values.device
    if len(pairs) == 0:
        return torch.empty(0, dtype=torch.float32, device=device)
    if documents.stops.max() > MOST_ROWS:
        documents = Spans.of(documents.gathered())
    indices = np.asarray(pairs, dtype=np.int64)
    order, groups = group_by_query_length(np.diff(queries.offsets)[indices[:, 0]])
    if order is not None:
        indices = indices[order]
    bounds = bounds_of(queries, documents, indices)
    back = np.empty(0, dtype=np.int32) if order is None else np.argsort(order).astype(np.int32)
    together = to_device(np.concatenate([bounds.reshape(-1), back]), device)
    # The kernel multiplies numbers of one precision, int8 aside.
    values = queries.values if documents.scales is not None else queries.values.to(documents.values.dtype)
    scores = maxsim(
        values,
        documents.values,
        Pairs(together[: bounds.size].view(-1, 4), groups, int(documents.lengths.max())),
        EMPTY_DOCUMENT_SCORE,
        scales=documents.scales,
        split_k=split_k,
    )
    return scores if order is None else scores[together[bounds.size :]]


def bounds_of(queries: Ragged, documents: Spans, pairs: NDArray[np.int64]) -> NDArray[np.int32]:
    """Returns `Pairs.bounds`: [pairs, 4]."""
    query, document = pairs.T
    columns = (
        queries.offsets[query],
        queries.offsets[query + 1],
        documents.starts[document],
        documents.stops[document],
    )
    bounds = np.stack(columns, axis=1)
    if (last := int(bounds.max())) > MOST_ROWS:
        raise ValueError(f"MaxSim on a GPU reads at most {MOST_ROWS} rows, not {last}: score fewer at a time")
    return bounds.astype(np.int32)
