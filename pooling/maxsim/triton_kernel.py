"""MaxSim as a Triton kernel: programs walk the tokens of documents and keep running maxima in registers.

Nothing is padded or copied; similarities never reach memory. Needs a CUDA device, or Triton's interpreter
(TRITON_INTERPRET=1) on a CPU.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from maxsimd.pooling.maxsim.reference import EMPTY_DOCUMENT_SCORE
from maxsimd.pooling.ragged import Ragged

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a program is cut up: query tokens, document tokens and dimensions at a time, and its warps."""

    query: int
    document: int
    dim: int
    warps: int


# By the major number of the compute capability. A tile of each operand must fit into shared memory with room
# for the next: in bfloat16 these take 2 x 24, 2 x 40 and 2 x 40 KiB.
TILES = {8: Tiles(32, 64, 128, 4), 9: Tiles(32, 128, 128, 4), 10: Tiles(32, 128, 128, 4)}
_OTHER_TILES = Tiles(32, 32, 64, 4)


@triton.jit  # type: ignore[untyped-decorator]
def maxsim_kernel(  # type: ignore[no-untyped-def]
    queries,  # [Tq, dim]
    documents,  # [Td, dim]
    scales,  # float32 [Td], of int8 documents
    query_offsets,  # int32 [queries + 1]
    document_offsets,  # int32 [documents + 1]
    pair_queries,  # int32 [pairs]
    pair_documents,  # int32 [pairs]
    best_of_part,  # float32 [pairs, parts, longest query]
    dim,
    longest_query,
    PARTS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Program (pair, part): the best similarity of each query token in one of the parts of a document."""
    pair = tl.program_id(0)
    part = tl.program_id(1)
    query = tl.load(pair_queries + pair)
    document = tl.load(pair_documents + pair)
    query_start = tl.load(query_offsets + query)
    query_stop = tl.load(query_offsets + query + 1)
    document_start = tl.load(document_offsets + document)
    document_stop = tl.load(document_offsets + document + 1)
    # Parts are whole tiles, so that none but the last has an edge.
    tiles = tl.cdiv(tl.cdiv(document_stop - document_start, BLOCK_D), PARTS)
    part_start = document_start + part * tiles * BLOCK_D
    part_stop = tl.minimum(part_start + tiles * BLOCK_D, document_stop)

    out = best_of_part + (pair.to(tl.int64) * PARTS + part) * longest_query
    columns = tl.arange(0, BLOCK_DIM)
    for query_tile in range(query_start, query_stop, BLOCK_Q):
        query_rows = query_tile + tl.arange(0, BLOCK_Q)
        in_query = query_rows < query_stop
        best = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        for document_tile in range(part_start, part_stop, BLOCK_D):
            document_rows = document_tile + tl.arange(0, BLOCK_D)
            in_document = document_rows < part_stop
            similarity = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
            for first in range(0, dim, BLOCK_DIM):
                in_dim = first + columns < dim
                q = tl.load(
                    queries + query_rows[:, None].to(tl.int64) * dim + (first + columns)[None, :],
                    mask=in_query[:, None] & in_dim[None, :],
                    other=0.0,
                )  # [BLOCK_Q, BLOCK_DIM]
                d = tl.load(
                    documents + document_rows[:, None].to(tl.int64) * dim + (first + columns)[None, :],
                    mask=in_document[:, None] & in_dim[None, :],
                    other=0,
                )  # [BLOCK_D, BLOCK_DIM]
                similarity = tl.dot(q, tl.trans(d.to(q.dtype)), similarity, input_precision="ieee")
            if SCALED:
                scale = tl.load(scales + document_rows, mask=in_document, other=0.0)
                similarity = similarity * scale[None, :]
            similarity = tl.where(in_document[None, :], similarity, float("-inf"))
            best = tl.maximum(best, tl.max(similarity, axis=1))
        tl.store(out + (query_rows - query_start), best, mask=in_query)


@triton.jit  # type: ignore[untyped-decorator]
def sum_kernel(  # type: ignore[no-untyped-def]
    best_of_part,  # float32 [pairs, parts, longest query]
    query_offsets,  # int32 [queries + 1]
    document_offsets,  # int32 [documents + 1]
    pair_queries,  # int32 [pairs]
    pair_documents,  # int32 [pairs]
    scores,  # float32 [pairs]
    longest_query,
    PARTS: tl.constexpr,
    EMPTY: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Program pair: the sum over query tokens of the best of all parts."""
    pair = tl.program_id(0)
    query = tl.load(pair_queries + pair)
    document = tl.load(pair_documents + pair)
    tokens = tl.load(query_offsets + query + 1) - tl.load(query_offsets + query)
    empty = tl.load(document_offsets + document + 1) == tl.load(document_offsets + document)
    parts = best_of_part + pair.to(tl.int64) * PARTS * longest_query
    total = 0.0
    for first in range(0, tokens, BLOCK_Q):
        token = first + tl.arange(0, BLOCK_Q)
        best = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        for part in range(PARTS):
            best = tl.maximum(
                best, tl.load(parts + part * longest_query + token, mask=token < tokens, other=float("-inf"))
            )
        total += tl.sum(tl.where(token < tokens, best, 0.0), axis=0)
    tl.store(scores + pair, tl.where(empty, EMPTY, total))


def runs_on(device: torch.device) -> bool:
    """Whether the kernel can run on a device: CUDA always, a CPU only when Triton interprets."""
    return device.type == "cuda" or INTERPRETED


def maxsim_triton(
    queries: Ragged,
    documents: Ragged,
    pairs: Sequence[tuple[int, int]],
    scales: torch.Tensor | None = None,
    parts: int | None = None,
) -> torch.Tensor:
    """As `maxsim_reference`, whatever the queries and documents of all pairs, in two launches.

    With `scales`, float32 [Td], documents are int8, each token with its scale. Documents are read in `parts`,
    by default as many as keep the device busy."""
    device = documents.values.device
    scores = torch.empty(len(pairs), dtype=torch.float32, device=device)
    if not pairs:
        return scores
    dim = documents.values.shape[1]
    longest = max(1, *queries.lengths)
    tiles = tiles_for(device, dim)
    if parts is None:
        parts = _parts_to_fill(device, len(pairs), max(documents.lengths), tiles)
    # One transfer for everything the CPU knows.
    ragged = [*queries.offsets, *documents.offsets, *(q for q, _ in pairs), *(d for _, d in pairs)]
    numbers = torch.tensor(ragged, dtype=torch.int32).to(device, non_blocking=True)
    sizes = [len(queries.offsets), len(documents.offsets), len(pairs), len(pairs)]
    query_offsets, document_offsets, pair_queries, pair_documents = numbers.split(sizes)
    best = torch.empty(len(pairs), parts, longest, dtype=torch.float32, device=device)
    rows = documents.values.contiguous()
    maxsim_kernel[(len(pairs), parts)](
        queries.values.contiguous(),
        rows,
        rows if scales is None else scales,
        query_offsets,
        document_offsets,
        pair_queries,
        pair_documents,
        best,
        dim,
        longest,
        PARTS=parts,
        SCALED=scales is not None,
        BLOCK_Q=tiles.query,
        BLOCK_D=tiles.document,
        BLOCK_DIM=tiles.dim,
        num_warps=tiles.warps,
    )
    sum_kernel[(len(pairs),)](
        best,
        query_offsets,
        document_offsets,
        pair_queries,
        pair_documents,
        scores,
        longest,
        PARTS=parts,
        EMPTY=EMPTY_DOCUMENT_SCORE,
        BLOCK_Q=tiles.query,
    )
    return scores


def tiles_for(device: torch.device, dim: int) -> Tiles:
    """The tiles for a device, and no more dimensions at a time than there are."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    tiles = TILES.get(major, _OTHER_TILES)
    return replace(tiles, dim=min(tiles.dim, max(16, triton.next_power_of_2(dim))))


def _parts_to_fill(device: torch.device, pairs: int, longest: int, tiles: Tiles) -> int:
    """Into how many parts documents are cut so that there are two programs for each multiprocessor, if the
    longest has so many tiles; a power of two, because each number is compiled."""
    if device.type != "cuda":
        return 1
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count // pairs
    most = min(wanted, longest // tiles.document, 16)
    return 1 << max(0, most.bit_length() - 1) if most > 1 else 1
