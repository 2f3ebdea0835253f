"""MaxSim by the Triton kernel: all indices and offsets of a step reach the device in one copy."""

from collections.abc import Sequence

import numpy as np
import torch

from maxsimd.engine.ops.triton.maxsim import PackedTokens, Pairs, maxsim
from maxsimd.engine.scoring.maxsim.reference import EMPTY_DOCUMENT_SCORE
from maxsimd.pooling.ragged import Ragged
from maxsimd.pooling.transfer import to_device


def maxsim_triton(
    queries: Ragged, documents: Ragged, pairs: Sequence[tuple[int, int]], split_k: int | None = None
) -> torch.Tensor:
    """As `maxsim_reference`; documents may be int8 rows with a scale each. The kernel divides each document
    among `split_k` programs, by default as many as keep the device busy."""
    device = documents.values.device
    if not pairs:
        return torch.empty(0, dtype=torch.float32, device=device)
    indices = np.asarray(pairs, dtype=np.int32)
    query_offsets, document_offsets = np.asarray(queries.offsets), np.asarray(documents.offsets)
    numbers = [
        *(query_offsets[:-1], query_offsets[1:]),
        *(document_offsets[:-1], document_offsets[1:]),
        *(indices[:, 0], indices[:, 1]),
    ]
    together = to_device(np.concatenate(numbers).astype(np.int32), device)
    on_device = together.split([len(x) for x in numbers])
    return maxsim(
        PackedTokens(queries.values, *on_device[0:2], max(queries.lengths)),
        PackedTokens(documents.values, *on_device[2:4], max(documents.lengths), documents.scales),
        Pairs(*on_device[4:]),
        EMPTY_DOCUMENT_SCORE,
        split_k=split_k,
    )
