"""MaxSim as Triton kernels: each program walks over the tokens of a document and holds running maxima in
registers. Nothing is padded or copied, and no similarity is written to memory.

A tile's similarities are [document tokens, query tokens]: from tile to tile the maximum over document tokens
is within a thread, and threads exchange theirs once, at the document's end. A tile beyond the document's end
repeats the last token, which changes no maximum, so the loop compares no positions.

There is a program for each pair. Programs that walk over all pairs would read a common query once, but three
to five programs on a multiprocessor already fill the memory's bandwidth, and the query comes from its
cache."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from maxsimd.engine.ops.triton.launch import INTERPRETED, limits
from maxsimd.engine.ops.triton.maxsim_tiles import (
    QUERY_CLASSES,
    PairGroup,
    Tiles,
    choose_split_k,
    row_alignment,
    tiles_for,
)
from maxsimd.engine.ops.triton.projection import add_product

_PLAIN = tl.constexpr(INTERPRETED)


def _for_each_byte(instructions: str, constants: str) -> tl.constexpr:
    """Assembly that takes two words and returns four registers; the i-th holds byte i of both words."""
    # Bytes 0 to 3 are the first word, 4 to 7 the second: selects byte i of both, each in the lower half of 16
    # bits.
    selectors = ("0x4400", "0x5511", "0x6622", "0x7733")
    each = [instructions.format(selector=selector, out=f"${i}") for i, selector in enumerate(selectors)]
    return tl.constexpr("{ .reg .b32 a, s, t, c;" + constants + "".join(each) + "}")


# A bfloat16 0x4300 is 128 and has 7 bits of mantissa, each worth 1: with the lower 7 bits of a number in them
# it is 128 + these. With the sign in the lowest bit of its exponent it is 128, or 256 for a negative number.
# The difference is the number: without sign 0 to 127, with one 0 to 127 less 128.
_TO_BFLOAT16 = _for_each_byte(
    "prmt.b32 a, $4, $5, {selector};"
    "lop3.b32 s, a, 0x007f007f, 0x43004300, 0xea;"  # (a & b) | c
    "lop3.b32 t, a, 0x00800080, 0x43004300, 0xea;"
    "fma.rn.bf16x2 {out}, t, c, s;",
    "mov.b32 c, 0xbf80bf80;",  # -1, twice
)
# A float16 0x6400 is 1024 and has 10 bits of mantissa, each worth 1. With the sign's bit inverted, a number
# is 128 more than it was, and 0 to 255: 1152 is taken off.
_TO_FLOAT16 = _for_each_byte(
    "prmt.b32 a, $4, $5, {selector};"
    "lop3.b32 s, a, 0x00ff00ff, 0x64806480, 0x6a;"  # (a & b) ^ c
    "sub.f16x2 {out}, s, c;",
    "mov.b32 c, 0x64806480;",
)
_CONSTRAINTS = tl.constexpr("=r,=r,=r,=r,r,r")


@triton.jit  # type: ignore[untyped-decorator]
def unpack_words(words, dtype: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The int8 numbers of 32-bit words [ROWS, COLUMNS / 4], as `dtype` [ROWS, COLUMNS]: the lowest byte of
    every word of a row, then the second bytes, and so on."""
    if _PLAIN or dtype == tl.float32:
        b0 = ((words << 24) >> 24).to(tl.float32).to(dtype)
        b1 = ((words << 16) >> 24).to(tl.float32).to(dtype)
        b2 = ((words << 8) >> 24).to(tl.float32).to(dtype)
        b3 = (words >> 24).to(tl.float32).to(dtype)
    elif dtype == tl.bfloat16:
        b0, b1, b2, b3 = tl.inline_asm_elementwise(
            _TO_BFLOAT16,
            _CONSTRAINTS,
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        b0, b1, b2, b3 = tl.inline_asm_elementwise(
            _TO_FLOAT16,
            _CONSTRAINTS,
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    low, high = _side_by_side(b0, b1, ROWS, COLUMNS // 2), _side_by_side(b2, b3, ROWS, COLUMNS // 2)
    return _side_by_side(low, high, ROWS, COLUMNS)


@triton.jit  # type: ignore[untyped-decorator]
def _side_by_side(a, b, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two tensors of half the columns as one [ROWS, COLUMNS]."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (ROWS, COLUMNS))


@triton.jit  # type: ignore[untyped-decorator]
def grouped_by_byte(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The columns of x [ROWS, COLUMNS] in the order of `unpack_words`: 0, 4, 8, ..., then 1, 5, 9, ..."""
    return tl.reshape(tl.permute(tl.reshape(x, (ROWS, COLUMNS // 4, 4)), (0, 2, 1)), (ROWS, COLUMNS))


# Arguments that differ from launch to launch: a specialization for each would mean a compilation for each.
VARYING = ("longest_query", "split_k")
# These arguments are slices, which begin at any address. A kernel that is specialized on addresses would be
# compiled again while requests wait. Constants give the alignment of rows instead.
VIEWS = ("queries", "documents", "scales", "bounds", "best_of_split", "scores")
_ANY_NAN = tl.constexpr(tl.PropagateNan.ALL)


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
    """For dimensions that do not fit a tile: one loop over tiles and chunks of dimensions, so that all loads
    are prefetched."""
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
    """Keeps the query's tile q [BLOCK_Q, BLOCK_DIM] in shared memory for the whole document."""
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
    """Like `_best_by_tiles`, for int8 documents whose dimensions are a multiple of 4, read as words of four.
    A row's numbers are ordered by their byte in a word, as are the query's."""
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
        # Prefetches the scales of the next turn.
        scale = tl.load(scales + tl.minimum(tile + BLOCK_D + tl.arange(0, BLOCK_D), stop - 1))
    return best


@triton.jit
def _bounds_of(bounds, pair):  # type: ignore[no-untyped-def]
    """The start and stop of the query's rows and the document's, by one load of 16 bytes."""
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

    Neighboring programs read the same document. `WHOLE` leaves out what only parts need, and so takes fewer
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


# Numbers that a program of `sum_kernel` loads at a time.
_SUMMED_TOGETHER = 2048


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The pairs to score. `bounds`, int32 [pairs, 4] on the device, has the first row and the end of the
    query, and those of the document; texts may lie in any order and share rows. `groups` come from
    `group_by_query_length`. No document has more than `longest_document` tokens."""

    bounds: torch.Tensor
    groups: tuple[PairGroup, ...]
    longest_document: int


def maxsim(
    queries: torch.Tensor,
    documents: torch.Tensor,
    pairs: Pairs,
    empty_score: float,
    *,
    scales: torch.Tensor | None = None,
    split_k: int | None = None,
) -> torch.Tensor:
    """Scores float32 [pairs] of the token embeddings of queries and documents [rows, dim], in one launch for
    each group of pairs, or two if its queries are longer than a tile or its documents are split. With
    `scales`, float32 [rows], documents are int8, and each row is multiplied by its scale.

    A document is split among `split_k` programs, by default as many as keep the device busy. A document
    without tokens scores `empty_score`, one with a NaN scores NaN. Raises ValueError if queries and documents
    differ in dtype, unless documents are int8 with scales."""
    if scales is not None:
        if documents.dtype != torch.int8:
            raise ValueError(f"documents with scales must be int8, not {documents.dtype}")
        if not queries.dtype.is_floating_point:
            raise ValueError(f"queries must be floating point numbers, not {queries.dtype}")
    elif documents.dtype != queries.dtype:
        raise ValueError(
            f"queries are {queries.dtype} and documents {documents.dtype}: convert either to the other"
        )
    queries, documents, bounds = _aligned(queries), _aligned(documents), _aligned(pairs.bounds)
    device, dim = limits(documents.device), documents.shape[1]
    scores = torch.empty(len(bounds), dtype=torch.float32, device=documents.device)
    stop = 0
    for group in pairs.groups:
        start, stop = stop, stop + group.count
        of_group = slice(start, stop)
        if group.count == 0:
            continue
        longest = group.longest_query
        tiles = tiles_for(device, dim, queries.itemsize, documents.itemsize, longest)
        query_tiles, document_tiles = -(-longest // tiles.query), pairs.longest_document // tiles.document
        programs = group.count * query_tiles
        splits = split_k or choose_split_k(device.multiprocessors, programs, document_tiles)
        is_complete = query_tiles == splits == 1
        best = scores[of_group]
        if not is_complete:
            best = torch.empty(group.count, splits, longest, dtype=torch.float32, device=documents.device)
        maxsim_kernel[(programs, splits)](
            queries,
            documents,
            scores if scales is None else scales,
            bounds[of_group],
            best,
            scores[of_group],
            longest,
            splits,
            EMPTY=empty_score,
            SCALED=scales is not None,
            DIM=dim,
            QUERY_ALIGNMENT=row_alignment(dim * queries.itemsize),
            DOCUMENT_ALIGNMENT=row_alignment(dim * documents.itemsize),
            BLOCK_Q=tiles.query,
            BLOCK_D=tiles.document,
            BLOCK_DIM=tiles.dim,
            FOLD=tiles.fold,
            # Longer queries have one kernel for both: warm-up compiles it.
            WHOLE=is_complete and longest <= QUERY_CLASSES[-1],
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        if not is_complete:
            sum_kernel[(group.count,)](
                best,
                bounds[of_group],
                scores[of_group],
                longest,
                splits,
                EMPTY=empty_score,
                BLOCK_Q=tiles.query,
                BLOCK_SPLITS=summed_splits(tiles),
            )
    return scores


def summed_splits(tiles: Tiles) -> int:
    """The splits that a program of `sum_kernel` loads at a time."""
    return _SUMMED_TOGETHER // tiles.query


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Contiguous rows [n, dim] at an address from which the kernel may load several numbers at a time. Only a
    view that begins within a row of something else is copied."""
    rows = rows.contiguous()
    alignment = row_alignment(rows.shape[1] * rows.itemsize)
    return rows if rows.data_ptr() % alignment == 0 else rows.clone()
