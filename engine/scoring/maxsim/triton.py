"""MaxSim by the Triton kernel: everything the CPU knows of a step reaches the device in one copy."""

from collections.abc import Sequence

import numpy as np
import torch

from maxsimd.engine.ops.triton.maxsim import maxsim
from maxsimd.engine.scoring.maxsim.reference import EMPTY_DOCUMENT_SCORE
from maxsimd.pooling.ragged import Ragged
from maxsimd.pooling.transfer import to_device


def maxsim_triton(
    queries: Ragged, documents: Ragged, pairs: Sequence[tuple[int, int]], parts: int | None = None
) -> torch.Tensor:
    """As `maxsim_reference`; documents may be int8 rows with a scale each. `parts` as the kernel has it."""
    device = documents.values.device
    if not pairs:
        return torch.empty(0, dtype=torch.float32, device=device)
    wanted = np.asarray(pairs, dtype=np.int32)
    numbers = [np.asarray(queries.offsets), np.asarray(documents.offsets), wanted[:, 0], wanted[:, 1]]
    together = to_device(np.concatenate(numbers).astype(np.int32), device)
    query_offsets, document_offsets, pair_queries, pair_documents = together.split([len(x) for x in numbers])
    return maxsim(
        queries.values,
        documents.values,
        documents.scales,
        query_offsets,
        document_offsets,
        pair_queries,
        pair_documents,
        max(1, *queries.lengths),
        max(documents.lengths),
        EMPTY_DOCUMENT_SCORE,
        parts,
    )
