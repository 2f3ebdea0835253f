"""MaxSim over packed ragged embeddings, in several backends; `maxsim_reference` defines it. Signatures are
`MaxSim` for documents end to end, `MaxSimApart` for documents each in its own tensor, and `MaxSimSpans` for
rows of a slab."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.ops import cpu as kernels
from maxsimd.engine.ops import triton as triton_ops
from maxsimd.engine.ops.cpu.maxsim import is_supported, maxsim, maxsim_apart
from maxsimd.pooling.ragged import Ragged, Spans, decoded, offsets_of, to_device

# A document without scored tokens ranks below all others, like in sentence-transformers.
EMPTY_DOCUMENT_SCORE = -1e9


def maxsim_reference(queries: Ragged, documents: Ragged, pairs: NDArray[np.int64]) -> torch.Tensor:
    """score(q, d) = sum over query tokens i of max over document tokens j of <q_i, d_j>.

    Source: Khattab & Zaharia, ColBERT (SIGIR 2020), equation 3. `queries.values` is [Tq, dim],
    `documents.values` [Td, dim], `pairs` [n, 2] query and document index. Returns float32 [n]."""
    scores = torch.full(
        (len(pairs),), EMPTY_DOCUMENT_SCORE, device=documents.values.device, dtype=torch.float32
    )
    for i, (query, document) in enumerate(pairs):
        similarity = queries[query].float() @ documents[document].float().T  # [Lq, Ld]
        if similarity.shape[1]:
            scores[i] = similarity.amax(dim=1).sum()
    return scores


# Rows over which the first level takes maxima: a power of two. Documents are padded with their last row.
BLOCK = 32
# The similarities of a tile of documents stay in the second-level cache.
TILE_BYTES = 2 * 1024 * 1024
# The least rows of a document per product: with fewer, products are slower.
LEAST_ROWS = 256

# The shapes of products that are not float32: their rows, and the multiple to which query tokens are padded.
PIECES = (4096, 2048, 1024, 512, 256, 128, 64)
COLUMNS = 16

Indices = NDArray[np.int64]


def maxsim_tiled(queries: Ragged, documents: Ragged, pairs: Indices) -> torch.Tensor:
    """Multiplies tiles of documents that stay in cache. On a CPU, NumPy takes the maxima."""
    scores = torch.full(
        (len(pairs),), EMPTY_DOCUMENT_SCORE, device=documents.values.device, dtype=torch.float32
    )
    lengths = np.diff(documents.offsets)
    of_query, of_document = pairs[:, 0], pairs[:, 1]
    there = np.flatnonzero(lengths[of_document])
    for query in np.unique(of_query[there]).tolist():
        indices = there[of_query[there] == query]
        wanted = of_document[indices]
        tokens = documents.take(wanted).values
        best = _best_matches(queries[query].to(tokens.dtype), tokens, lengths[wanted])
        scores[to_device(indices, scores.device)] = best.sum(dim=1)
    return scores


def _best_matches(query: torch.Tensor, tokens: torch.Tensor, lengths: Indices) -> torch.Tensor:
    """Returns the similarity of each query token's best match: float32 [documents, Lq].

    `tokens` holds the rows of documents of these lengths, none of them 0, end to end."""
    blocks = -(-lengths // BLOCK)  # of each document
    offsets, block_offsets = offsets_of(lengths), offsets_of(blocks)
    filled = to_device(_filled_rows(lengths, blocks, offsets), tokens.device)
    best_of_block = torch.empty(int(block_offsets[-1]), len(query), device=tokens.device, dtype=torch.float32)
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


def maxima_by_torch(rows: torch.Tensor, counts: Indices) -> torch.Tensor:
    """Returns maxima over consecutive rows, `counts[i]` of them for item i: float32 [items, columns]."""
    owner = to_device(np.repeat(np.arange(len(counts)), counts), rows.device)
    best = torch.full((len(counts), rows.shape[1]), float("-inf"), device=rows.device, dtype=torch.float32)
    return best.scatter_reduce_(0, owner[:, None].expand_as(rows), rows, "amax")


def _product(rows: torch.Tensor, transposed: torch.Tensor) -> torch.Tensor:
    """`rows @ transposed`. Unless it is float32, it is computed in pieces of few shapes: a kernel is
    compiled for each shape and its memory never freed. The last piece overlaps the one before it."""
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
    """Selects rows, as int64 if their size allows: torch has a fast path for int64, and none for bfloat16."""
    if not rows.is_contiguous() or rows.shape[1] * rows.itemsize % 8:
        return rows.index_select(0, index)
    return rows.view(torch.int64).index_select(0, index).view(rows.dtype)


def _maxima(similarity: torch.Tensor) -> torch.Tensor:
    """Returns maxima over the middle of [blocks, rows, Lq], for a power of two of rows: each halving is
    one vectorized operation, which a reduction in bfloat16 is not."""
    while similarity.shape[1] > 1:
        half = similarity.shape[1] // 2
        similarity = torch.maximum(similarity[:, :half], similarity[:, half:])
    return similarity[:, 0]


def _filled_rows(lengths: Indices, blocks: Indices, offsets: Indices) -> Indices:
    """Returns row indices, each document padded to whole blocks with its last row."""
    rows = blocks * BLOCK
    within = np.arange(rows.sum()) - np.repeat(offsets_of(rows)[:-1], rows)
    filled: Indices = np.repeat(offsets[:-1], rows) + np.minimum(within, np.repeat(lengths - 1, rows))
    return filled


def _tiles(offsets: Indices, block_offsets: Indices, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields tiles as (start, stop) of rows and (first, last) of blocks: documents of at most `rows` rows
    together, or part of a longer document, at least `LEAST_ROWS`."""
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


# The rows [tokens, dim] of one document, and float32 scales [tokens] if they are int8.
Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]


def maxsim_avx512(queries: Ragged, documents: Ragged, pairs: NDArray[np.int64]) -> torch.Tensor:
    """MaxSim by the compiled kernel; falls back to `maxsim_tiled` for other precisions and dimensions."""
    dtype, dim = documents.values.dtype, documents.values.shape[1]
    if not is_supported(dtype, dim):
        return maxsim_tiled(queries, documents, pairs)
    return _by_query(
        pairs,
        lambda sorted_pairs: maxsim(
            queries.values.to(dtype),
            queries.offsets,
            documents.values,
            documents.offsets,
            sorted_pairs,
            EMPTY_DOCUMENT_SCORE,
        ),
    )


def maxsim_apart_avx512(queries: Ragged, documents: Sequence[Rows], pairs: NDArray[np.int64]) -> torch.Tensor:
    """The same for documents each in a tensor, in any precision; products are in the queries'."""
    dtype, dim = queries.values.dtype, queries.values.shape[1]
    if not is_supported(dtype, dim):
        together = Ragged.from_items([decoded(*rows, dtype) for rows in documents])
        return maxsim_tiled(queries, together, pairs)
    return _by_query(
        pairs,
        lambda sorted_pairs: maxsim_apart(
            queries.values, queries.offsets, documents, sorted_pairs, EMPTY_DOCUMENT_SCORE
        ),
    )


def _by_query(pairs: NDArray[np.int64], score: Callable[[NDArray[np.int64]], torch.Tensor]) -> torch.Tensor:
    """Scores the pairs of one query after the other, so that it is packed once."""
    by_query = pairs[:, 0]
    if (by_query[1:] >= by_query[:-1]).all():
        return score(pairs)
    order = np.argsort(by_query, kind="stable")
    scores = score(pairs[order])
    in_order = torch.empty_like(scores)
    in_order[torch.from_numpy(order)] = scores
    return in_order


log = logging.getLogger(__name__)

# (queries, documents, pairs [n, 2] of query index and document index) -> float32 scores [n]
MaxSim = Callable[[Ragged, Ragged, NDArray[np.int64]], torch.Tensor]
# The same for documents that lie anywhere in one tensor.
MaxSimSpans = Callable[[Ragged, Spans, NDArray[np.int64]], torch.Tensor]
# The same for documents that each have their own tensor.
MaxSimApart = Callable[[Ragged, Sequence[Rows], NDArray[np.int64]], torch.Tensor]


def choose_maxsim(name: str, device: torch.device, compiled_allowed: bool = True) -> tuple[str, MaxSim]:
    """Returns the backend for a name (auto, reference, tiled, avx512, triton), with its own name.

    `auto` is Triton on a CUDA device that has it. On a CPU it is the compiled kernel (`avx512`), if allowed,
    on processors with AVX-512, VNNI and BF16, else `tiled`. Raises ModelLoadError if the device cannot run
    it."""
    if name == "reference":
        return "reference", maxsim_reference
    # The kernel was built, and this machine has AVX-512 with VNNI and BF16.
    has_compiled = device.type == "cpu" and kernels.is_available()
    if has_compiled and (name == "avx512" or (name == "auto" and compiled_allowed)):
        return "avx512", maxsim_avx512
    if name == "tiled" or (name == "auto" and device.type != "cuda"):
        return "tiled", maxsim_tiled
    if name != "avx512" and triton_ops.runs_on(device):
        from maxsimd.engine.scoring.maxsim_triton import maxsim_triton

        return "triton", maxsim_triton
    is_missing = name != "avx512" and triton_ops.is_missing_on(device)
    if name == "auto":
        if is_missing:
            log.warning("plain torch runs in place of kernels for this GPU, because %s", triton_ops.MISSING)
        return "tiled", maxsim_tiled
    raise ModelLoadError(
        f"the MaxSim backend {name!r} cannot run on this {device.type}; "
        + (triton_ops.MISSING if is_missing else 'use maxsim="auto", "tiled" or "reference"')
    )


def choose_maxsim_spans(name: str) -> MaxSimSpans | None:
    """Returns the backend for documents anywhere in one tensor; None if it needs them end to end."""
    if name != "triton":
        return None
    from maxsimd.engine.scoring.maxsim_triton import maxsim_spans_triton

    return maxsim_spans_triton
