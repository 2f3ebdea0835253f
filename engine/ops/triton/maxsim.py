"""MaxSim on torch tensors, by Triton kernels: see `maxsim_kernels`."""

from dataclasses import dataclass

import torch

from maxsimd.engine.ops.triton.launch import limits
from maxsimd.engine.ops.triton.maxsim_kernels import maxsim_kernel, sum_kernel
from maxsimd.engine.ops.triton.maxsim_tiles import (
    QUERY_CLASSES,
    PairGroup,
    Tiles,
    choose_split_k,
    row_alignment,
    tiles_for,
)

# Numbers that a program of `sum_kernel` loads at a time.
_SUMMED_TOGETHER = 2048


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The pairs to score. Row i of `bounds`, int32 [pairs, 4] on the device, has the query's first row
    and the one behind its last, and those of the document. Texts may lie in any order, and share rows.

    `groups` says how long the queries of consecutive pairs are: see `group_by_query_length`.
    `longest_document` is at least the number of tokens in the longest document."""

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
    """Scores float32 [pairs] of the token embeddings of queries [rows, dim] and documents [rows, dim], in one
    launch for each group of pairs; in two where a group's queries are longer than a tile, or its documents
    are split. With `scales`, float32 [rows], documents are int8, and each row is multiplied by its scale.

    The tokens of each document are divided among `split_k` programs, by default among as many as keep the
    device busy. A document without tokens scores `empty_score`, and one with a NaN scores NaN. Raises
    ValueError where queries and documents are of different types, unless documents are int8 with scales."""
    _check_types(queries, documents, scales)
    queries, documents, bounds = _aligned(queries), _aligned(documents), _aligned(pairs.bounds)
    scores = torch.empty(len(bounds), dtype=torch.float32, device=documents.device)
    first = 0
    for group in pairs.groups:
        stop = first + group.count
        if group.count:
            of_group = _Launch(queries, documents, scales, bounds[first:stop], group.longest_query)
            _score(of_group, pairs.longest_document, empty_score, split_k, scores[first:stop])
        first = stop
    return scores


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """Pairs whose queries have at most `longest_query` tokens, so that they have the same tiles."""

    queries: torch.Tensor
    documents: torch.Tensor
    scales: torch.Tensor | None
    bounds: torch.Tensor
    longest_query: int


def _score(
    group: _Launch, longest_document: int, empty_score: float, split_k: int | None, scores: torch.Tensor
) -> None:
    queries, documents, longest_query = group.queries, group.documents, group.longest_query
    device, dim = limits(documents.device), documents.shape[1]
    tiles = tiles_for(device, dim, queries.itemsize, documents.itemsize, longest_query)
    query_tiles = -(-longest_query // tiles.query)
    programs = len(scores) * query_tiles
    if split_k is None:
        split_k = choose_split_k(device.multiprocessors, programs, longest_document // tiles.document)
    is_complete = query_tiles == split_k == 1
    best = scores
    if not is_complete:
        best = torch.empty(len(scores), split_k, longest_query, dtype=torch.float32, device=documents.device)
    maxsim_kernel[(programs, split_k)](
        queries,
        documents,
        scores if group.scales is None else group.scales,
        group.bounds,
        best,
        scores,
        longest_query,
        split_k,
        EMPTY=empty_score,
        SCALED=group.scales is not None,
        DIM=dim,
        QUERY_ALIGNMENT=row_alignment(dim * queries.itemsize),
        DOCUMENT_ALIGNMENT=row_alignment(dim * documents.itemsize),
        BLOCK_Q=tiles.query,
        BLOCK_D=tiles.document,
        BLOCK_DIM=tiles.dim,
        FOLD=tiles.fold,
        # Longer queries have one kernel for both: warm-up compiles it.
        WHOLE=is_complete and longest_query <= QUERY_CLASSES[-1],
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if not is_complete:
        sum_kernel[(len(scores),)](
            best,
            group.bounds,
            scores,
            longest_query,
            split_k,
            EMPTY=empty_score,
            BLOCK_Q=tiles.query,
            BLOCK_SPLITS=summed_splits(tiles),
        )


def summed_splits(tiles: Tiles) -> int:
    """How many splits a program of `sum_kernel` loads at a time."""
    return _SUMMED_TOGETHER // tiles.query


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Rows [n, dim], end to end, at an address from which the kernel may load several numbers at a time.

    torch allocates at such addresses, and slices of rows begin at others. A copy is made only of a view that
    begins within a row of something else."""
    rows = rows.contiguous()
    alignment = row_alignment(rows.shape[1] * rows.itemsize)
    return rows if rows.data_ptr() % alignment == 0 else rows.clone()


def _check_types(queries: torch.Tensor, documents: torch.Tensor, scales: torch.Tensor | None) -> None:
    if scales is not None:
        if documents.dtype != torch.int8:
            raise ValueError(f"documents with scales must be int8, not {documents.dtype}")
        if not queries.dtype.is_floating_point:
            raise ValueError(f"queries must be floating point numbers, not {queries.dtype}")
    elif documents.dtype != queries.dtype:
        raise ValueError(
            f"queries are {queries.dtype} and documents {documents.dtype}: convert either to the other"
        )
