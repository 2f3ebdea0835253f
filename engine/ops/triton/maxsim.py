"""MaxSim on torch tensors, by Triton kernels: see `maxsim_kernels`."""

from dataclasses import dataclass

import torch
import triton

from maxsimd.engine.ops.triton.launch import limits
from maxsimd.engine.ops.triton.maxsim_kernels import maxsim_kernel, sum_kernel
from maxsimd.engine.ops.triton.maxsim_tiles import PairGroup, Tiles, choose_split_k, tiles_for

# Numbers that a program of `sum_kernel` loads at a time.
_SUMMED_TOGETHER = 2048


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
    """Which query is scored with which document: indices, int32 [pairs] each, on the device.

    `groups`, which `group_by_query_length` makes, says how long queries are; without it, all are taken to be
    as long as the longest."""

    queries: torch.Tensor
    documents: torch.Tensor
    groups: tuple[PairGroup, ...] | None = None


def maxsim(
    queries: PackedTokens,
    documents: PackedTokens,
    pairs: Pairs,
    empty_score: float,
    *,
    split_k: int | None = None,
) -> torch.Tensor:
    """Scores float32 [pairs], in one launch for each group of pairs; in two where a group's queries are
    longer than a tile, or its documents are split.

    The tokens of each document are divided among `split_k` programs, by default among as many as keep the
    device busy. A document without tokens scores `empty_score`, and one with a NaN scores NaN. Raises
    ValueError where queries and documents are of different types, unless documents are int8 with scales."""
    _check_types(queries, documents)
    scores = torch.empty(len(pairs.queries), dtype=torch.float32, device=documents.values.device)
    first = 0
    for group in pairs.groups or (PairGroup(len(scores), max(1, queries.longest)),):
        stop = first + group.count
        of_group = _Group(
            queries, documents, pairs.queries[first:stop], pairs.documents[first:stop], group.longest_query
        )
        if group.count:
            _score(of_group, empty_score, split_k, scores[first:stop])
        first = stop
    return scores


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Pairs whose queries have at most `longest_query` tokens, so that they have the same tiles."""

    queries: PackedTokens
    documents: PackedTokens
    pair_queries: torch.Tensor
    pair_documents: torch.Tensor
    longest_query: int


def _score(group: _Group, empty_score: float, split_k: int | None, scores: torch.Tensor) -> None:
    queries, documents, longest_query = group.queries, group.documents, group.longest_query
    values, dim = documents.values.contiguous(), documents.values.shape[1]
    device = limits(values.device)
    tiles = tiles_for(device, dim, queries.values.itemsize, values.itemsize, longest_query)
    query_tiles = triton.cdiv(longest_query, tiles.query)
    programs = len(scores) * query_tiles
    if split_k is None:
        split_k = choose_split_k(device.multiprocessors, programs, documents.longest // tiles.document)
    is_complete = query_tiles == split_k == 1
    best = scores
    if not is_complete:
        best = torch.empty(len(scores), split_k, longest_query, dtype=torch.float32, device=values.device)
    indices = (
        queries.starts,
        queries.stops,
        documents.starts,
        documents.stops,
        group.pair_queries,
        group.pair_documents,
    )
    maxsim_kernel[(programs, split_k)](
        queries.values.contiguous(),
        values,
        scores if documents.scales is None else documents.scales,
        *indices,
        best,
        scores,
        longest_query,
        split_k,
        EMPTY=empty_score,
        SCALED=documents.scales is not None,
        DIM=dim,
        BLOCK_Q=tiles.query,
        BLOCK_D=tiles.document,
        BLOCK_DIM=tiles.dim,
        FOLD=tiles.fold,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if not is_complete:
        sum_kernel[(len(scores),)](
            best,
            *indices,
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


def _check_types(queries: PackedTokens, documents: PackedTokens) -> None:
    of_queries, of_documents = queries.values.dtype, documents.values.dtype
    if documents.scales is not None:
        if of_documents != torch.int8 or not of_queries.is_floating_point:
            raise ValueError(f"documents with scales must be int8, not {of_documents}")
    elif of_documents != of_queries:
        raise ValueError(
            f"queries are {of_queries} and documents {of_documents}: convert either to the other"
        )
