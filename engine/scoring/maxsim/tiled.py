"""MaxSim for the CPU: products over tiles of documents that stay in cache, then maxima in two levels."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.scoring.maxsim.reference import EMPTY_DOCUMENT_SCORE
from maxsimd.pooling.ragged import Ragged, Spans, offsets_of, to_device

# Rows over which the first level takes maxima, halving by halving: a power of two. A document's similarities
# are padded to a multiple of it with those of its last token, which changes no maximum.
BLOCK = 32
# The size of the similarities of a tile of documents, so that they stay in the second-level cache.
TILE_BYTES = 2 * 1024 * 1024
# Rows of a document that are multiplied at once however long the query: with fewer, products are slower.
LEAST_ROWS = 256

# The shapes of products that are not float32: their rows, and the multiple to which query tokens are padded.
PIECES = (4096, 2048, 1024, 512, 256, 128, 64)
COLUMNS = 16

Rows = NDArray[np.int64]


def maxsim_tiled(queries: Ragged, documents: Ragged, pairs: Rows) -> torch.Tensor:
    """As `maxsim_reference`, with products in the documents' precision and sums in float32.

    Plain torch operations, so it runs on any device."""
    scores = torch.full((len(pairs),), EMPTY_DOCUMENT_SCORE, device=documents.values.device)
    lengths = np.diff(documents.offsets)
    of_query, of_document = pairs[:, 0], pairs[:, 1]
    there = np.flatnonzero(lengths[of_document])
    for query in np.unique(of_query[there]).tolist():
        indices = there[of_query[there] == query]
        wanted = of_document[indices]
        tokens = _tokens_of(wanted, documents, lengths)
        best = _best_matches(queries[query].to(tokens.dtype), tokens, lengths[wanted])
        scores[to_device(indices, scores.device)] = best.sum(dim=1)
    return scores


def _best_matches(query: torch.Tensor, tokens: torch.Tensor, lengths: Rows) -> torch.Tensor:
    """The similarity of each query token to its best match in each document: float32 [documents, Lq].

    `tokens` holds the rows of documents of these lengths, none of them 0, end to end."""
    blocks = -(-lengths // BLOCK)  # of each document
    offsets, block_offsets = offsets_of(lengths), offsets_of(blocks)
    filled = to_device(_filled_rows(lengths, blocks, offsets), tokens.device)
    best_of_block = torch.empty(int(block_offsets[-1]), len(query), device=tokens.device)
    if len(query) == 0:
        return best_of_block[: len(lengths)]
    transposed = query.T.contiguous()
    for start, stop, first, last in _tiles(
        offsets, block_offsets, TILE_BYTES // (len(query) * tokens.itemsize)
    ):
        similarity = _product(tokens[start:stop], transposed)  # [rows, Lq]
        similarity = _take(similarity, filled[first * BLOCK : last * BLOCK] - start)
        best_of_block[first:last] = _maxima(similarity.unflatten(0, (-1, BLOCK)))
    if tokens.device.type != "cpu":
        return maxima_by_torch(best_of_block, blocks)
    return torch.from_numpy(np.maximum.reduceat(best_of_block.numpy(), block_offsets[:-1], axis=0))


def maxima_by_torch(rows: torch.Tensor, counts: Rows) -> torch.Tensor:
    """Maxima over consecutive rows, `counts[i]` of them for item i, on the rows' device: float32 [items,
    columns]."""
    owner = to_device(np.repeat(np.arange(len(counts)), counts), rows.device)
    best = torch.full((len(counts), rows.shape[1]), float("-inf"), device=rows.device)
    return best.scatter_reduce_(0, owner[:, None].expand_as(rows), rows, "amax")


def _product(rows: torch.Tensor, transposed: torch.Tensor) -> torch.Tensor:
    """`rows @ transposed`. Unless it is float32, it is computed in pieces of few different shapes, because a
    kernel is compiled for each shape and its memory is never freed. The last piece overlaps the one before
    it."""
    count, columns = len(rows), transposed.shape[1]
    if rows.dtype is torch.float32 or rows.device.type != "cpu":
        return rows @ transposed
    if columns % COLUMNS:
        transposed = torch.nn.functional.pad(transposed, (0, -columns % COLUMNS))
    if count < PIECES[-1]:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, PIECES[-1] - count))
    out = rows.new_empty(len(rows), transposed.shape[1])
    done = 0
    while done < len(rows):
        size = next((size for size in PIECES if size <= len(rows) - done), PIECES[-1])
        piece = slice(min(done, len(rows) - size), min(done, len(rows) - size) + size)
        torch.mm(rows[piece], transposed, out=out[piece])
        done = piece.stop
    return out[:count, :columns]


def _take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows by index, copied as int64 where their size allows it: torch has a fast path for int64, and none
    for bfloat16."""
    if not rows.is_contiguous() or rows.shape[1] * rows.itemsize % 8:
        return rows.index_select(0, index)
    return rows.view(torch.int64).index_select(0, index).view(rows.dtype)


def _maxima(similarity: torch.Tensor) -> torch.Tensor:
    """Maxima over the middle of [blocks, rows, Lq], for a power of two of rows: each halving is one
    vectorised operation, which a reduction in bfloat16 is not."""
    while similarity.shape[1] > 1:
        half = similarity.shape[1] // 2
        similarity = torch.maximum(similarity[:, :half], similarity[:, half:])
    return similarity[:, 0]


def _filled_rows(lengths: Rows, blocks: Rows, offsets: Rows) -> Rows:
    """The indices of the documents' rows, each document padded to whole blocks with its last row."""
    rows = blocks * BLOCK
    within = np.arange(rows.sum()) - np.repeat(offsets_of(rows)[:-1], rows)
    filled: Rows = np.repeat(offsets[:-1], rows) + np.minimum(within, np.repeat(lengths - 1, rows))
    return filled


def _tiles(offsets: Rows, block_offsets: Rows, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Tiles as (start, stop) of rows and (first, last) of blocks: documents that have at most `rows` rows
    together, or as many of one longer document, but at least `LEAST_ROWS`."""
    document, count = 0, len(offsets) - 1
    while document < count:
        end = int(np.searchsorted(offsets, offsets[document] + rows, side="right")) - 1
        end = max(end, document + 1)
        start, stop = int(offsets[document]), int(offsets[end])
        first, last = int(block_offsets[document]), int(block_offsets[end])
        at_once = max(LEAST_ROWS, rows) // BLOCK if end == document + 1 else last - first
        for block in range(first, last, at_once):
            from_row = start + (block - first) * BLOCK
            yield from_row, min(stop, from_row + at_once * BLOCK), block, min(last, block + at_once)
        document = end


def _tokens_of(wanted: Rows, documents: Ragged, lengths: Rows) -> torch.Tensor:
    """The rows of the wanted documents, end to end."""
    first, last = int(wanted[0]), int(wanted[-1])
    if np.array_equal(wanted, np.arange(first, last + 1)):
        return documents.values[int(documents.offsets[first]) : int(documents.offsets[last + 1])]
    return Spans(documents.values, documents.offsets[wanted], documents.offsets[wanted + 1]).gathered().values
