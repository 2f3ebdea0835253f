"""MaxSim as Triton kernels: each program walks over the tokens of a document and holds running maxima in
registers. Nothing is padded or copied, and no similarity is written to memory.

A tile's similarities are [document tokens, query tokens]: from tile to tile the maximum over document tokens
is one between numbers of the same thread, and threads exchange theirs once, at the document's end. Where a
tile reaches beyond the document's end, it repeats the last token, which changes no maximum: the loop compares
no positions.

There is a program for each pair, not a few that walk over all pairs. Those would wait for less at a pair's
start and read a common query once, but with three to five programs on a multiprocessor their loads already
fill the memory's bandwidth, and a common query is read from the multiprocessor's own cache.
"""

import triton
import triton.language as tl

from maxsimd.engine.ops.triton.launch import INTERPRETED
from maxsimd.engine.ops.triton.maxsim_int8 import grouped_by_byte, unpack_words
from maxsimd.engine.ops.triton.product import add_product

# Arguments that differ from launch to launch: a specialisation for each would mean a compilation for each.
VARYING = ("longest_query", "split_k")
# These arguments are slices, which begin at any address. A kernel that is specialised on addresses would be
# compiled again while requests wait. Constants give the alignment of rows instead.
VIEWS = ("queries", "documents", "scales", "bounds", "best_of_split", "scores")
_ANY_NAN = tl.constexpr(tl.PropagateNan.ALL)
_PLAIN = tl.constexpr(INTERPRETED)


@triton.jit  # type: ignore[untyped-decorator]
def _rows(values, row, DIM: tl.constexpr, ALIGNMENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The addresses of rows, [rows, 1]. All are multiples of `ALIGNMENT` bytes."""
    return tl.multiple_of(values + row[:, None].to(tl.int64) * DIM, (ALIGNMENT, ALIGNMENT))


@triton.jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b, propagate_nan=_ANY_NAN)


@triton.jit  # type: ignore[untyped-decorator]
def _largest(x, axis: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest along an axis, NaN where any is NaN."""
    if _PLAIN:  # the interpreter is slow at reductions by functions of ours, and leaves NaN out of its own
        result = tl.max(x, axis) + tl.sum(tl.where(x != x, x, 0.0), axis)
    else:
        result = tl.reduce(x, axis, _larger)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _with_tile(best, similarity, FOLD: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """The running maxima [BLOCK_D / FOLD, BLOCK_Q] with another tile's similarities [BLOCK_D, BLOCK_Q].

    `FOLD` 2 halves the registers of maxima: tensor cores give a thread rows that are eight apart, of which it
    remembers the larger."""
    if FOLD == 2:
        in_twos = tl.reshape(similarity, (BLOCK_D // 16, 2, 8, BLOCK_Q))
        similarity = tl.reshape(_largest(in_twos, 1), (BLOCK_D // 2, BLOCK_Q))
    return _larger(best, similarity)


@triton.jit  # type: ignore[untyped-decorator]
def _best_by_chunks(  # type: ignore[no-untyped-def]
    best,
    query_rows,
    in_query,
    documents,
    scales,
    start,
    stop,
    SCALED: tl.constexpr,
    DIM: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Where a tile of all dimensions is too large: one loop over tiles and, within each, over chunks of
    dimensions, so that the loads of all its turns are prefetched."""
    CHUNKS: tl.constexpr = (DIM + BLOCK_DIM - 1) // BLOCK_DIM
    similarity = tl.zeros((BLOCK_D, BLOCK_Q), tl.float32)
    for turn in range(tl.cdiv(stop - start, BLOCK_D) * CHUNKS):
        columns = (turn % CHUNKS) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)[None, :]
        row = tl.minimum(start + (turn // CHUNKS) * BLOCK_D + tl.arange(0, BLOCK_D), stop - 1)
        of_document = _rows(documents, row, DIM, ALIGNMENT) + columns
        if DIM % BLOCK_DIM == 0:
            q = tl.load(query_rows + columns, mask=in_query[:, None], other=0.0)
            d = tl.load(of_document)
        else:
            q = tl.load(query_rows + columns, mask=in_query[:, None] & (columns < DIM), other=0.0)
            d = tl.load(of_document, mask=columns < DIM, other=0)
        if SCALED:
            d = d.to(tl.float32).to(q.dtype)
        similarity = add_product(similarity, d, tl.trans(q))
        if turn % CHUNKS == CHUNKS - 1:
            if SCALED:
                similarity = similarity * tl.load(scales + row)[:, None]
            best = _with_tile(best, similarity, FOLD, BLOCK_D, BLOCK_Q)
            similarity = tl.zeros((BLOCK_D, BLOCK_Q), tl.float32)
    return best


@triton.jit  # type: ignore[untyped-decorator]
def _best_by_tiles(  # type: ignore[no-untyped-def]
    best,
    q,
    documents,
    start,
    stop,
    DIM: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    FOLD: tl.constexpr,
):
    """With the query's tile q [BLOCK_Q, BLOCK_DIM] in shared memory for the whole document."""
    transposed = tl.trans(q)  # out of the loop, or it would be written to shared memory in each turn
    columns = tl.arange(0, BLOCK_DIM)[None, :]
    for tile in range(start, stop, BLOCK_D):
        row = tl.minimum(tile + tl.arange(0, BLOCK_D), stop - 1)
        of_document = _rows(documents, row, DIM, ALIGNMENT) + columns
        d = tl.load(of_document) if DIM == BLOCK_DIM else tl.load(of_document, mask=columns < DIM, other=0.0)
        similarity = add_product(tl.zeros((BLOCK_D, BLOCK_Q), tl.float32), d, transposed)
        best = _with_tile(best, similarity, FOLD, BLOCK_D, BLOCK_Q)
    return best


@triton.jit  # type: ignore[untyped-decorator]
def _best_by_words(  # type: ignore[no-untyped-def]
    best,
    q,
    documents,
    scales,
    start,
    stop,
    DIM: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    FOLD: tl.constexpr,
):
    """As `_best_by_tiles`, for int8 documents whose dimensions are a multiple of 4: they are read as words of
    four. A row's numbers are then ordered by their byte in a word, those of the query too."""
    transposed = tl.trans(grouped_by_byte(q, BLOCK_Q, BLOCK_DIM))
    columns = tl.arange(0, BLOCK_DIM // 4)[None, :]
    first_row = tl.minimum(start + tl.arange(0, BLOCK_D), stop - 1)
    scale = tl.load(scales + first_row, mask=first_row >= start, other=0.0)
    for tile in range(start, stop, BLOCK_D):
        row = tl.minimum(tile + tl.arange(0, BLOCK_D), stop - 1)
        words = _rows(documents, row, DIM, ALIGNMENT).to(tl.pointer_type(tl.int32)) + columns
        packed = tl.load(words) if DIM == BLOCK_DIM else tl.load(words, mask=columns < DIM // 4, other=0)
        d = unpack_words(packed, q.dtype, BLOCK_D, BLOCK_DIM)
        similarity = add_product(tl.zeros((BLOCK_D, BLOCK_Q), tl.float32), d, transposed)
        best = _with_tile(best, similarity * scale[:, None], FOLD, BLOCK_D, BLOCK_Q)
        # Nothing prefetches scales but this: they are those of the next turn.
        scale = tl.load(scales + tl.minimum(tile + BLOCK_D + tl.arange(0, BLOCK_D), stop - 1))
    return best


@triton.jit
def _bounds_of(bounds, pair):  # type: ignore[no-untyped-def]
    """Where the query's rows start and stop, and the document's, by one load of 16 bytes."""
    of_pair = tl.load(tl.multiple_of(bounds + pair.to(tl.int64) * 4 + tl.arange(0, 4), 16))
    starts, stops = tl.split(tl.reshape(of_pair, (2, 2)))
    query_start, document_start = tl.split(starts)
    query_stop, document_stop = tl.split(stops)
    return query_start, query_stop, document_start, document_stop


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=VIEWS)  # type: ignore[untyped-decorator]
def maxsim_kernel(  # type: ignore[no-untyped-def]
    queries,  # [rows, DIM]
    documents,  # [rows, DIM]
    scales,  # float32 [rows], of int8 documents
    bounds,  # int32 [pairs, 4]: the first row of the query and the one behind its last, those of the document
    best_of_split,  # float32 [pairs, split_k, longest query]
    scores,  # float32 [pairs]
    longest_query,
    split_k,
    EMPTY: tl.constexpr,
    SCALED: tl.constexpr,
    DIM: tl.constexpr,
    QUERY_ALIGNMENT: tl.constexpr,
    DOCUMENT_ALIGNMENT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    FOLD: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Program (pair and query tile, split): the best similarity of each token in a tile of the query within
    one split of the document; or the pair's score, where that is the whole query and the whole document.

    Neighbouring programs read the same document. `WHOLE` leaves out what only parts need, and so takes fewer
    registers and instructions: programs of short queries do little else."""
    query_tiles = 1 if WHOLE else tl.cdiv(longest_query, BLOCK_Q)
    pair = tl.program_id(0) // query_tiles
    query_start, query_stop, document_start, document_stop = _bounds_of(bounds, pair)
    start, stop = document_start, document_stop
    if not WHOLE:
        query_tile = tl.program_id(0) % query_tiles
        split = tl.program_id(1)
        query_start += query_tile * BLOCK_Q
        # Splits consist of whole tiles, so that only the last split has a partial one.
        tiles = tl.cdiv(tl.cdiv(document_stop - document_start, BLOCK_D), split_k)
        start = document_start + split * tiles * BLOCK_D
        stop = tl.minimum(start + tiles * BLOCK_D, document_stop)
        if query_start >= query_stop:
            stop = start

    token = tl.arange(0, BLOCK_Q)
    in_query = query_start + token < query_stop
    query_rows = _rows(queries, query_start + token, DIM, QUERY_ALIGNMENT)
    best = tl.full((BLOCK_D // FOLD, BLOCK_Q), float("-inf"), tl.float32)
    if BLOCK_DIM < DIM or (SCALED and (DIM % 4 != 0 or BLOCK_DIM < 64)):
        best = _best_by_chunks(
            best, query_rows, in_query, documents, scales, start, stop,
            SCALED, DIM, DOCUMENT_ALIGNMENT, BLOCK_D, BLOCK_Q, BLOCK_DIM, FOLD,
        )  # fmt: skip
    else:
        columns = tl.arange(0, BLOCK_DIM)[None, :]
        q = tl.load(query_rows + columns, mask=in_query[:, None] & (columns < DIM), other=0.0)
        if SCALED:
            best = _best_by_words(
                best, q, documents, scales, start, stop,
                DIM, DOCUMENT_ALIGNMENT, BLOCK_D, BLOCK_Q, BLOCK_DIM, FOLD,
            )  # fmt: skip
        else:
            best = _best_by_tiles(
                best, q, documents, start, stop,
                DIM, DOCUMENT_ALIGNMENT, BLOCK_D, BLOCK_Q, BLOCK_DIM, FOLD,
            )  # fmt: skip

    # Computed again, to free registers during the loop.
    in_query = token < query_stop - query_start
    of_token = tl.where(in_query, _largest(best, 0), 0.0)
    score = tl.where(document_start == document_stop, EMPTY, tl.sum(of_token, axis=0))
    if WHOLE:  # noqa: SIM114 (a constant: with it, the other condition is not compiled)
        tl.store(scores + pair, score)
    elif (query_tiles == 1) & (split_k == 1):
        tl.store(scores + pair, score)
    else:
        out = best_of_split + (pair.to(tl.int64) * split_k + split) * longest_query
        tl.store(out + query_tile * BLOCK_Q + token, of_token, mask=in_query)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=VIEWS)  # type: ignore[untyped-decorator]
def sum_kernel(  # type: ignore[no-untyped-def]
    best_of_split,  # float32 [pairs, split_k, longest query]
    bounds,  # int32 [pairs, 4], as above
    scores,  # float32 [pairs]
    longest_query,
    split_k,
    EMPTY: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Program i: the score of pair i, the sum over its query tokens of the best similarity in any split.

    Each load brings a tile of splits and query tokens, since a load after another would wait for memory as
    often as there are splits."""
    pair = tl.program_id(0)
    query_start, query_stop, document_start, document_stop = _bounds_of(bounds, pair)
    tokens = query_stop - query_start
    of_pair = best_of_split + pair.to(tl.int64) * split_k * longest_query
    total = tl.zeros((BLOCK_Q,), tl.float32)
    for first in range(0, tokens, BLOCK_Q):
        token = first + tl.arange(0, BLOCK_Q)
        best = tl.full((BLOCK_SPLITS, BLOCK_Q), float("-inf"), tl.float32)
        for first_split in range(0, split_k, BLOCK_SPLITS):
            split = first_split + tl.arange(0, BLOCK_SPLITS)[:, None]
            there = (split < split_k) & (token < tokens)[None, :]
            at = of_pair + split * longest_query + token[None, :]
            best = _larger(best, tl.load(at, mask=there, other=float("-inf")))
        total += tl.where(token < tokens, _largest(best, 0), 0.0)
    score = tl.sum(total, axis=0)
    tl.store(scores + pair, tl.where(document_start == document_stop, EMPTY, score))
