"""MaxSim over packed ragged embeddings, and the search for numbers that are not finite, compiled."""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.ops.cpu.library import FLOAT16, INT8, KINDS, address, kernels


def is_supported(dtype: torch.dtype, dim: int) -> bool:
    """Whether embeddings of this precision and dimension can be scored: bfloat16 is read in pairs."""
    return dtype is torch.float32 or (dtype is torch.bfloat16 and dim % 2 == 0)


def maxsim(
    queries: torch.Tensor,
    query_offsets: NDArray[np.int64],
    documents: torch.Tensor,
    document_offsets: NDArray[np.int64],
    pairs: NDArray[np.int64],
    empty_score: float,
) -> torch.Tensor:
    """Scores float32 [n] of queries [Tq, dim] and documents [Td, dim] of one dtype, on the CPU, for pairs [n,
    2] of a query and a document. Sums and maxima are float32. A document without tokens scores
    `empty_score`."""
    documents, offsets = documents.contiguous(), _int64(document_offsets)
    addresses = [documents.data_ptr(), offsets.ctypes.data]
    return _scores("maxsim", queries, query_offsets, addresses, pairs, empty_score)


def maxsim_apart(
    queries: torch.Tensor,
    query_offsets: NDArray[np.int64],
    documents: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    pairs: NDArray[np.int64],
    empty_score: float,
) -> torch.Tensor:
    """Scores like `maxsim`, for documents in separate tensors: rows [tokens, dim] in float32, bfloat16,
    float16, or int8 with float32 scales [tokens]. They are converted to the queries' dtype tile by tile,
    without a copy."""
    # Copies must outlive the call, which gets their addresses.
    rows = [values.contiguous() for values, _ in documents]
    scales = [None if scale is None else scale.contiguous() for _, scale in documents]
    of_each = np.array(
        [
            [_KINDS[values.dtype] for values in rows],
            [values.data_ptr() for values in rows],
            [address(scale) for scale in scales],
            [len(values) for values in rows],
        ],
        dtype=np.int64,
    )
    addresses = [each.ctypes.data for each in of_each]
    return _scores("maxsim_apart", queries, query_offsets, addresses, pairs, empty_score)


def _scores(
    kernel: str,
    queries: torch.Tensor,
    query_offsets: NDArray[np.int64],
    documents: Sequence[int],
    pairs: NDArray[np.int64],
    empty_score: float,
) -> torch.Tensor:
    """The kernel's scores in the queries' precision, for the addresses of what describes the documents."""
    precision = "bfloat16" if queries.dtype is torch.bfloat16 else "float32"
    queries, starts, indices = queries.contiguous(), _int64(query_offsets), _int64(pairs)
    scores = np.full(len(indices), empty_score, dtype=np.float32)
    getattr(kernels(), f"maxsimd_{kernel}_{precision}")(
        queries.data_ptr(),
        starts.ctypes.data,
        *documents,
        indices.ctypes.data,
        len(indices),
        queries.shape[1],
        scores.ctypes.data,
    )
    return torch.from_numpy(scores)


def _int64(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.ascontiguousarray(numbers, dtype=np.int64)


_KINDS = KINDS | {torch.int8: INT8, torch.float16: FLOAT16}
# How the library reads limits: the bits of 32-bit numbers, and those of 16-bit numbers twice.
_VIEWS = {4: (torch.int32, 1), 2: (torch.int16, 0x1_0001)}


@functools.cache
def _bits(limit: float, dtype: torch.dtype) -> int:
    view, times = _VIEWS[dtype.itemsize]
    return int(torch.tensor(limit, dtype=dtype).view(view)) * times


def first_not_finite(arrays: Sequence[torch.Tensor], limits: Sequence[float]) -> int | None:
    """The index of the first array with a NaN, or with a number as large as its limit or infinite; or None.
    Arrays are contiguous, on the CPU, in float32, bfloat16 or float16."""
    of_each = np.array(
        [
            [array.data_ptr() for array in arrays],
            [array.nbytes for array in arrays],
            [_bits(limit, array.dtype) for array, limit in zip(arrays, limits, strict=True)],
            [array.itemsize for array in arrays],
        ],
        dtype=np.int64,
    )
    found = kernels().maxsimd_first_not_finite(*(each.ctypes.data for each in of_each), len(arrays))
    return None if found < 0 else int(found)
