"""MaxSim as a Triton kernel: each program walks over the tokens of a document and holds running maxima in
registers. Nothing is padded or copied, and no similarity is written to memory.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from maxsimd.engine.ops.triton.launch import generation, multiprocessors, next_power_of_two
from maxsimd.engine.ops.triton.product import add_product


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one program works on at a time: `query` query tokens, `document` document tokens and `dim`
    dimensions; and its number of warps."""

    query: int
    document: int
    dim: int
    warps: int


# By the major number of the compute capability: the tiles for queries that fit into the first one's `query`
# tokens, and for longer queries. `dim` counts 16-bit numbers. Several tiles must fit into shared memory at
# once.
TILES = {
    8: (Tiles(32, 64, 128, 4), Tiles(64, 64, 128, 4)),
    9: (Tiles(32, 128, 128, 4), Tiles(128, 128, 128, 8)),
    10: (Tiles(32, 128, 128, 4), Tiles(128, 128, 128, 8)),
}
_OTHER_TILES = (Tiles(32, 32, 64, 4), Tiles(32, 32, 64, 4))

MAX_SPLIT_K = 64

# Arguments that differ from launch to launch: a specialisation for each would mean a compilation for each.
_VARYING = ("longest_query", "split_k")
_INDICES = (
    "query_starts",
    "query_stops",
    "document_starts",
    "document_stops",
    "pair_queries",
    "pair_documents",
)


@triton.jit  # type: ignore[untyped-decorator]
def _add_similarity(similarity, q, d, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    if SCALED:  # int8 documents; every precision represents all int8 values exactly
        d = d.to(tl.float32).to(q.dtype)
    return add_product(similarity, q, tl.trans(d))


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDICES)  # type: ignore[untyped-decorator]
def maxsim_kernel(  # type: ignore[no-untyped-def]
    queries,  # [rows, dim]
    documents,  # [rows, dim]
    scales,  # float32 [rows], of int8 documents
    query_starts,  # int32 [queries]
    query_stops,  # int32 [queries]
    document_starts,  # int32 [documents]
    document_stops,  # int32 [documents]
    pair_queries,  # int32 [pairs]
    pair_documents,  # int32 [pairs]
    best_of_split,  # float32 [pairs, split_k, longest query]
    dim,
    longest_query,
    split_k,
    SCALED: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Program (pair and query tile, split): the best similarity of each token in a tile of the query within
    one split of the document. Neighbouring programs read the same document. With `WHOLE`, all dimensions fit
    into one tile, so that the innermost loop runs over document tokens and its loads are prefetched."""
    query_tiles = tl.cdiv(longest_query, BLOCK_Q)
    pair = tl.program_id(0) // query_tiles
    query_tile = tl.program_id(0) % query_tiles
    split = tl.program_id(1)
    query = tl.load(pair_queries + pair)
    document = tl.load(pair_documents + pair)
    query_start = tl.load(query_starts + query)
    query_stop = tl.load(query_stops + query)
    document_start = tl.load(document_starts + document)
    document_stop = tl.load(document_stops + document)
    # Splits consist of whole tiles, so that only the last split has a partial one.
    tiles = tl.cdiv(tl.cdiv(document_stop - document_start, BLOCK_D), split_k)
    split_start = document_start + split * tiles * BLOCK_D
    split_stop = tl.minimum(split_start + tiles * BLOCK_D, document_stop)

    position = query_tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    in_query = query_start + position < query_stop
    columns = tl.arange(0, BLOCK_DIM)
    query_rows = queries + (query_start + position)[:, None].to(tl.int64) * dim
    best = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    if WHOLE:
        of_query = in_query[:, None] & (columns < dim)[None, :]
        q = tl.load(query_rows + columns[None, :], mask=of_query, other=0.0)  # [BLOCK_Q, BLOCK_DIM]
    if query_start + query_tile * BLOCK_Q >= query_stop:
        split_stop = split_start
    for document_tile in range(split_start, split_stop, BLOCK_D):
        document_token = document_tile + tl.arange(0, BLOCK_D)
        in_document = document_token < split_stop
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
    out = best_of_split + (pair.to(tl.int64) * split_k + split) * longest_query
    tl.store(out + position, best, mask=in_query)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDICES)  # type: ignore[untyped-decorator]
def sum_kernel(  # type: ignore[no-untyped-def]
    best_of_split,  # float32 [pairs, split_k, longest query]
    query_starts,  # int32 [queries]
    query_stops,  # int32 [queries]
    document_starts,  # int32 [documents]
    document_stops,  # int32 [documents]
    pair_queries,  # int32 [pairs]
    pair_documents,  # int32 [pairs]
    scores,  # float32 [pairs]
    longest_query,
    split_k,
    EMPTY: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Program i: the score of pair i, the sum over its query tokens of the best similarity in any split."""
    pair = tl.program_id(0)
    query = tl.load(pair_queries + pair)
    document = tl.load(pair_documents + pair)
    tokens = tl.load(query_stops + query) - tl.load(query_starts + query)
    empty = tl.load(document_stops + document) == tl.load(document_starts + document)
    first_split = best_of_split + pair.to(tl.int64) * split_k * longest_query
    total = 0.0
    for first in range(0, tokens, BLOCK_Q):
        token = first + tl.arange(0, BLOCK_Q)
        best = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        for split in range(split_k):
            of_split = first_split + split * longest_query + token
            best = tl.maximum(best, tl.load(of_split, mask=token < tokens, other=float("-inf")))
        total += tl.sum(tl.where(token < tokens, best, 0.0), axis=0)
    tl.store(scores + pair, tl.where(empty, EMPTY, total))


@dataclass(frozen=True, slots=True, eq=False)
class PackedTokens:
    """The token embeddings of many texts: text i has the rows `starts[i]` to `stops[i]` (int32 [texts] on the
    device) of `values` [rows, dim]. Texts may lie apart, in any order, and share rows. `longest` is at least
    the length of the longest text.

    With `scales`, float32 [rows], the values are int8 and each row is multiplied by its scale."""

    values: torch.Tensor
    starts: torch.Tensor
    stops: torch.Tensor
    longest: int
    scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Which query is scored with which document: indices, int32 [pairs] each, on the device."""

    queries: torch.Tensor
    documents: torch.Tensor


def maxsim(
    queries: PackedTokens,
    documents: PackedTokens,
    pairs: Pairs,
    empty_score: float,
    *,
    split_k: int | None = None,
) -> torch.Tensor:
    """Scores float32 [pairs], in two launches.

    The tokens of each document are divided among `split_k` programs, by default among as many as keep the
    device busy. A document without tokens scores `empty_score`."""
    values, device, dim = documents.values.contiguous(), documents.values.device, documents.values.shape[1]
    count, longest_query = len(pairs.queries), max(1, queries.longest)
    scores = torch.empty(count, dtype=torch.float32, device=device)
    if count == 0:
        return scores
    tiles = tiles_for(device, dim, queries.values.itemsize, longest_query)
    programs = count * triton.cdiv(longest_query, tiles.query)
    if split_k is None:
        split_k = choose_split_k(multiprocessors(device), programs, documents.longest // tiles.document)
    best = torch.empty(count, split_k, longest_query, dtype=torch.float32, device=device)
    indices = (
        queries.starts,
        queries.stops,
        documents.starts,
        documents.stops,
        pairs.queries,
        pairs.documents,
    )
    maxsim_kernel[(programs, split_k)](
        queries.values.contiguous(),
        values,
        values if documents.scales is None else documents.scales,
        *indices,
        best,
        dim,
        longest_query,
        split_k,
        SCALED=documents.scales is not None,
        WHOLE=dim <= tiles.dim,
        BLOCK_Q=tiles.query,
        BLOCK_D=tiles.document,
        BLOCK_DIM=tiles.dim,
        num_warps=tiles.warps,
    )
    sum_kernel[(count,)](
        best,
        *indices,
        scores,
        longest_query,
        split_k,
        EMPTY=empty_score,
        BLOCK_Q=tiles.query,
    )
    return scores


def tiles_for(device: torch.device, dim: int, itemsize: int, longest_query: int) -> Tiles:
    """The tiles for a device and queries of at most `longest_query` tokens, with embeddings of `dim` numbers
    of `itemsize` bytes each."""
    short, long = TILES.get(generation(device), _OTHER_TILES)
    tiles = short if longest_query <= short.query else long
    return replace(tiles, dim=min(tiles.dim * 2 // itemsize, next_power_of_two(dim)))


def choose_split_k(multiprocessors: int, programs: int, tiles_of_longest: int) -> int:
    """Number of document splits that yields about two programs per multiprocessor, given the number of
    programs without splits and the tiles in the longest document."""
    wanted = -(-2 * multiprocessors // programs)
    return max(1, min(wanted, tiles_of_longest, MAX_SPLIT_K))
