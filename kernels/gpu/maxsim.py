"""MaxSim as a Triton kernel: programs walk the tokens of documents and keep running maxima in registers.

Nothing is padded or copied; similarities never reach memory.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from maxsimd.kernels.gpu.launch import generation, multiprocessors, next_power_of_two
from maxsimd.kernels.gpu.product import add_product


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

LARGEST_PARTS = 64


# What differs from launch to launch must not be compiled for anew.
_VARYING = ("longest_query", "parts")
_OFFSETS = ("query_offsets", "document_offsets", "pair_queries", "pair_documents")


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_OFFSETS)  # type: ignore[untyped-decorator]
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
    parts,
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
    tiles = tl.cdiv(tl.cdiv(document_stop - document_start, BLOCK_D), parts)
    part_start = document_start + part * tiles * BLOCK_D
    part_stop = tl.minimum(part_start + tiles * BLOCK_D, document_stop)

    out = best_of_part + (pair.to(tl.int64) * parts + part) * longest_query
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
                if SCALED:  # int8, of which every precision has all values
                    d = d.to(tl.float32).to(q.dtype)
                similarity = add_product(similarity, q, tl.trans(d))
            if SCALED:
                scale = tl.load(scales + document_rows, mask=in_document, other=0.0)
                similarity = similarity * scale[None, :]
            similarity = tl.where(in_document[None, :], similarity, float("-inf"))
            best = tl.maximum(best, tl.max(similarity, axis=1))
        tl.store(out + (query_rows - query_start), best, mask=in_query)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_OFFSETS)  # type: ignore[untyped-decorator]
def sum_kernel(  # type: ignore[no-untyped-def]
    best_of_part,  # float32 [pairs, parts, longest query]
    query_offsets,  # int32 [queries + 1]
    document_offsets,  # int32 [documents + 1]
    pair_queries,  # int32 [pairs]
    pair_documents,  # int32 [pairs]
    scores,  # float32 [pairs]
    longest_query,
    parts,
    EMPTY: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Program pair: the sum over query tokens of the best of all parts."""
    pair = tl.program_id(0)
    query = tl.load(pair_queries + pair)
    document = tl.load(pair_documents + pair)
    tokens = tl.load(query_offsets + query + 1) - tl.load(query_offsets + query)
    empty = tl.load(document_offsets + document + 1) == tl.load(document_offsets + document)
    first_part = best_of_part + pair.to(tl.int64) * parts * longest_query
    total = 0.0
    for first in range(0, tokens, BLOCK_Q):
        token = first + tl.arange(0, BLOCK_Q)
        best = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        for part in range(parts):
            of_part = first_part + part * longest_query + token
            best = tl.maximum(best, tl.load(of_part, mask=token < tokens, other=float("-inf")))
        total += tl.sum(tl.where(token < tokens, best, 0.0), axis=0)
    tl.store(scores + pair, tl.where(empty, EMPTY, total))


def maxsim(
    queries: torch.Tensor,
    documents: torch.Tensor,
    scales: torch.Tensor | None,
    query_offsets: torch.Tensor,
    document_offsets: torch.Tensor,
    pair_queries: torch.Tensor,
    pair_documents: torch.Tensor,
    longest_query: int,
    longest_document: int,
    empty: float,
    parts: int | None = None,
) -> torch.Tensor:
    """Scores float32 [pairs] of queries [Tq, dim] and documents [Td, dim], whatever pairs these are, in two
    launches.

    Offsets and pairs are int32 on the device; the lengths of the longest are known to the CPU. With `scales`,
    float32 [Td], documents are int8, each token with its scale. Each document is read in `parts`, by default
    as many as keep the device busy. A document without tokens scores `empty`."""
    device, pairs, dim = documents.device, len(pair_queries), documents.shape[1]
    scores = torch.empty(pairs, dtype=torch.float32, device=device)
    if pairs == 0:
        return scores
    tiles = tiles_for(device, dim)
    if parts is None:
        parts = parts_to_fill(multiprocessors(device), pairs, longest_document, tiles)
    best = torch.empty(pairs, parts, longest_query, dtype=torch.float32, device=device)
    documents = documents.contiguous()
    maxsim_kernel[(pairs, parts)](
        queries.contiguous(),
        documents,
        documents if scales is None else scales,
        query_offsets,
        document_offsets,
        pair_queries,
        pair_documents,
        best,
        dim,
        longest_query,
        parts,
        SCALED=scales is not None,
        BLOCK_Q=tiles.query,
        BLOCK_D=tiles.document,
        BLOCK_DIM=tiles.dim,
        num_warps=tiles.warps,
    )
    sum_kernel[(pairs,)](
        best,
        query_offsets,
        document_offsets,
        pair_queries,
        pair_documents,
        scores,
        longest_query,
        parts,
        EMPTY=empty,
        BLOCK_Q=tiles.query,
    )
    return scores


def tiles_for(device: torch.device, dim: int) -> Tiles:
    """The tiles for a device, and no more dimensions at a time than there are."""
    tiles = TILES.get(generation(device), _OTHER_TILES)
    return replace(tiles, dim=min(tiles.dim, next_power_of_two(dim)))


def parts_to_fill(multiprocessors: int, pairs: int, longest: int, tiles: Tiles) -> int:
    """Into how many parts documents are cut so that there are two programs for each multiprocessor, if the
    longest has so many tiles."""
    wanted = -(-2 * multiprocessors // pairs)
    return max(1, min(wanted, longest // tiles.document, LARGEST_PARTS))
