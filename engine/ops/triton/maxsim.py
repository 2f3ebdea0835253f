"""MaxSim as a Triton kernel: programs walk the tokens of documents and keep running maxima in registers.

Nothing is padded or copied; similarities never reach memory.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from maxsimd.engine.ops.triton.launch import generation, multiprocessors, next_power_of_two
from maxsimd.engine.ops.triton.product import add_product


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a program is cut up: query tokens, document tokens and dimensions at a time, and its warps."""

    query: int
    document: int
    dim: int
    warps: int


# By the major number of the compute capability: for queries of at most as many tokens as the first has, and
# for longer ones. Dimensions are numbers of 16 bits; what is loaded must fit into shared memory several
# times.
TILES = {
    8: (Tiles(32, 64, 128, 4), Tiles(64, 64, 128, 4)),
    9: (Tiles(32, 128, 128, 4), Tiles(128, 128, 128, 8)),
    10: (Tiles(32, 128, 128, 4), Tiles(128, 128, 128, 8)),
}
_OTHER_TILES = (Tiles(32, 32, 64, 4), Tiles(32, 32, 64, 4))

LARGEST_PARTS = 64

# What differs from launch to launch must not be compiled for anew.
_VARYING = ("longest_query", "parts")
_OFFSETS = ("query_offsets", "document_offsets", "pair_queries", "pair_documents")


@triton.jit  # type: ignore[untyped-decorator]
def _add_similarity(similarity, q, d, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    if SCALED:  # int8, of which every precision has all values
        d = d.to(tl.float32).to(q.dtype)
    return add_product(similarity, q, tl.trans(d))


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
    WHOLE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Program (pair and query tile, part): the best similarity of each token of a tile of the query in one of
    the parts of a document. Neighbours read the same document. All dimensions are one tile where `WHOLE`;
    then documents are the innermost loop, whose loads are on their way ahead of time."""
    query_tiles = tl.cdiv(longest_query, BLOCK_Q)
    pair = tl.program_id(0) // query_tiles
    query_tile = tl.program_id(0) % query_tiles
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

    place = query_tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    in_query = query_start + place < query_stop
    columns = tl.arange(0, BLOCK_DIM)
    query_rows = queries + (query_start + place)[:, None].to(tl.int64) * dim
    best = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    if WHOLE:
        of_query = in_query[:, None] & (columns < dim)[None, :]
        q = tl.load(query_rows + columns[None, :], mask=of_query, other=0.0)  # [BLOCK_Q, BLOCK_DIM]
    if query_start + query_tile * BLOCK_Q >= query_stop:
        part_stop = part_start
    for document_tile in range(part_start, part_stop, BLOCK_D):
        document_token = document_tile + tl.arange(0, BLOCK_D)
        in_document = document_token < part_stop
        document_rows = documents + document_token[:, None].to(tl.int64) * dim
        similarity = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
        if WHOLE:
            of_document = in_document[:, None] & (columns < dim)[None, :]
            d = tl.load(document_rows + columns[None, :], mask=of_document, other=0)  # [BLOCK_D, BLOCK_DIM]
            similarity = _add_similarity(similarity, q, d, SCALED)
        else:
            for first in range(0, dim, BLOCK_DIM):
                here = first + columns[None, :]
                q = tl.load(query_rows + here, mask=in_query[:, None] & (here < dim), other=0.0)
                d = tl.load(document_rows + here, mask=in_document[:, None] & (here < dim), other=0)
                similarity = _add_similarity(similarity, q, d, SCALED)
        if SCALED:
            scale = tl.load(scales + document_token, mask=in_document, other=0.0)
            similarity = similarity * scale[None, :]
        similarity = tl.where(in_document[None, :], similarity, float("-inf"))
        best = tl.maximum(best, tl.max(similarity, axis=1))
    out = best_of_part + (pair.to(tl.int64) * parts + part) * longest_query
    tl.store(out + place, best, mask=in_query)


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
    tiles = tiles_for(device, dim, queries.itemsize, longest_query)
    query_tiles = triton.cdiv(longest_query, tiles.query)
    if parts is None:
        parts = parts_to_fill(multiprocessors(device), pairs * query_tiles, longest_document, tiles)
    best = torch.empty(pairs, parts, longest_query, dtype=torch.float32, device=device)
    documents = documents.contiguous()
    maxsim_kernel[(pairs * query_tiles, parts)](
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
        WHOLE=dim <= tiles.dim,
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


def tiles_for(device: torch.device, dim: int, itemsize: int, longest_query: int) -> Tiles:
    """The tiles for a device, queries of so many tokens, and no more dimensions at a time than there are."""
    short, long = TILES.get(generation(device), _OTHER_TILES)
    tiles = short if longest_query <= short.query else long
    return replace(tiles, dim=min(tiles.dim * 2 // itemsize, next_power_of_two(dim)))


def parts_to_fill(multiprocessors: int, programs: int, longest: int, tiles: Tiles) -> int:
    """Into how many parts documents are cut so that so many programs become two for each multiprocessor, if
    the longest has so many tiles."""
    wanted = -(-2 * multiprocessors // programs)
    return max(1, min(wanted, longest // tiles.document, LARGEST_PARTS))
