"""MaxSim as one Triton kernel: a program a pair walks the document's tokens and keeps running maxima.

Nothing is padded or copied; similarities never reach memory. Needs a CUDA device, or Triton's interpreter
(TRITON_INTERPRET=1) on a CPU.
"""

import os
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from maxsimd.pooling.maxsim.reference import EMPTY_DOCUMENT_SCORE
from maxsimd.pooling.ragged import Ragged

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BLOCK_QUERY = 32
BLOCK_DOCUMENT = 32


@triton.jit  # type: ignore[untyped-decorator]
def maxsim_kernel(  # type: ignore[no-untyped-def]
    queries,  # [Tq, dim]
    documents,  # [Td, dim]
    query_offsets,  # int32 [queries + 1]
    document_offsets,  # int32 [documents + 1]
    pair_queries,  # int32 [pairs]
    pair_documents,  # int32 [pairs]
    scores,  # float32 [pairs]
    dim,
    EMPTY: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    pair = tl.program_id(0)
    query = tl.load(pair_queries + pair)
    document = tl.load(pair_documents + pair)
    query_start = tl.load(query_offsets + query)
    query_stop = tl.load(query_offsets + query + 1)
    document_start = tl.load(document_offsets + document)
    document_stop = tl.load(document_offsets + document + 1)

    columns = tl.arange(0, BLOCK_DIM)
    in_dim = columns < dim
    total = 0.0
    for query_tile in range(query_start, query_stop, BLOCK_Q):
        query_rows = query_tile + tl.arange(0, BLOCK_Q)
        in_query = query_rows < query_stop
        q = tl.load(
            queries + query_rows[:, None].to(tl.int64) * dim + columns[None, :],
            mask=in_query[:, None] & in_dim[None, :],
            other=0.0,
        )  # [BLOCK_Q, BLOCK_DIM]
        best = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        for document_tile in range(document_start, document_stop, BLOCK_D):
            document_rows = document_tile + tl.arange(0, BLOCK_D)
            in_document = document_rows < document_stop
            d = tl.load(
                documents + document_rows[:, None].to(tl.int64) * dim + columns[None, :],
                mask=in_document[:, None] & in_dim[None, :],
                other=0.0,
            )  # [BLOCK_D, BLOCK_DIM]
            similarity = tl.dot(q, tl.trans(d), input_precision="ieee")  # [BLOCK_Q, BLOCK_D]
            similarity = tl.where(in_document[None, :], similarity, float("-inf"))
            best = tl.maximum(best, tl.max(similarity, axis=1))
        total += tl.sum(tl.where(in_query, best, 0.0), axis=0)
    total = tl.where(document_stop > document_start, total, EMPTY)
    tl.store(scores + pair, total)


def runs_on(device: torch.device) -> bool:
    """Whether the kernel can run on a device: CUDA always, a CPU only when Triton interprets."""
    return device.type == "cuda" or INTERPRETED


def maxsim_triton(queries: Ragged, documents: Ragged, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """As `maxsim_reference`, in one launch over all pairs."""
    device = documents.values.device
    scores = torch.empty(len(pairs), dtype=torch.float32, device=device)
    if not pairs:
        return scores
    dim = documents.values.shape[1]
    # One transfer for everything the CPU knows.
    ragged = [*queries.offsets, *documents.offsets, *(q for q, _ in pairs), *(d for _, d in pairs)]
    numbers = torch.tensor(ragged, dtype=torch.int32).to(device, non_blocking=True)
    sizes = [len(queries.offsets), len(documents.offsets), len(pairs), len(pairs)]
    maxsim_kernel[(len(pairs),)](
        queries.values.contiguous(),
        documents.values.contiguous(),
        *numbers.split(sizes),
        scores,
        dim,
        EMPTY=EMPTY_DOCUMENT_SCORE,
        BLOCK_Q=BLOCK_QUERY,
        BLOCK_D=BLOCK_DOCUMENT,
        BLOCK_DIM=max(16, triton.next_power_of_2(dim)),
    )
    return scores
