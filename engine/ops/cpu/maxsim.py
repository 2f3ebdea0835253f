"""MaxSim over packed ragged embeddings, compiled: similarities stay in registers."""

from collections.abc import Sequence

import numpy as np
import torch

from maxsimd.engine.ops.cpu.library import kernels


def is_supported(dtype: torch.dtype, dim: int) -> bool:
    """Whether embeddings of this precision and dimension can be scored: bfloat16 is read in pairs."""
    return dtype is torch.float32 or (dtype is torch.bfloat16 and dim % 2 == 0)


def maxsim(
    queries: torch.Tensor,
    query_offsets: Sequence[int],
    documents: torch.Tensor,
    document_offsets: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    empty_score: float,
) -> torch.Tensor:
    """Scores float32 [pairs] of queries [Tq, dim] and documents [Td, dim] of one precision, on the CPU.

    Sums and maxima are float32 in either precision. A document without tokens scores `empty_score`."""
    kernel = kernels().maxsimd_maxsim_float32
    if documents.dtype is torch.bfloat16:
        kernel = kernels().maxsimd_maxsim_bfloat16
    queries, documents = queries.contiguous(), documents.contiguous()
    starts, stops = np.asarray(query_offsets, dtype=np.int64), np.asarray(document_offsets, dtype=np.int64)
    indices = np.ascontiguousarray(np.asarray(pairs, dtype=np.int64).reshape(-1, 2))
    scores = np.full(len(indices), empty_score, dtype=np.float32)
    kernel(
        queries.data_ptr(),
        starts.ctypes.data,
        documents.data_ptr(),
        stops.ctypes.data,
        indices.ctypes.data,
        len(indices),
        documents.shape[1],
        scores.ctypes.data,
    )
    return torch.from_numpy(scores)
