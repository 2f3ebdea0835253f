"""The input of attention: a layer's queries, keys and values, and what the distance of a key from a query
adds to their product.

Tables of relative positions are by distance: the entry `reach + d` is for a key d positions after its
query."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

# Entries after the last distance, which the compiled kernel reads in blocks.
_BEHIND = 63


@dataclass(frozen=True, eq=False)
class PositionBias:
    """A number for each head and distance, added to scaled products: `by_distance`, float32 [heads, 2 * reach
    + 1]. Source: Raffel et al. 2020 (arXiv 1910.10683), section 2.1."""

    by_distance: torch.Tensor

    @property
    def reach(self) -> int:
        """The greatest distance with an entry."""
        return self.by_distance.shape[-1] // 2

    def terms(self, query: torch.Tensor, key: torch.Tensor, scaling: float, before: int = 0) -> torch.Tensor:
        """The addends [heads, n, m] to the scaled products of queries [..., heads, n, head_dim], from
        position `before` on, and keys [..., heads, m, head_dim]. Raises ValueError beyond the reach."""
        entries = _entries(self.by_distance, self.reach, query, key, before)
        return entries.unfold(1, key.shape[-2], 1).flip(1)  # one window of distances a query

    def divided(self, scaling: float) -> torch.Tensor:
        """The bias as the kernel adds it before scaling: float32 [heads, stride]."""
        if scaling not in self._divided:
            self._divided[scaling] = torch.nn.functional.pad(self.by_distance / scaling, (0, _BEHIND))
        return self._divided[scaling]

    @cached_property
    def _divided(self) -> dict[float, torch.Tensor]:
        return {}


@dataclass(frozen=True, eq=False)
class PositionContent:
    """For each head and distance, a row that queries are multiplied with and one for keys: `keys` and
    `queries`, [heads, 2 * reach + 1, head_dim].

    Source: DeBERTa's disentangled attention, He et al. 2021 (arXiv 2006.03654), equation 4."""

    keys: torch.Tensor
    queries: torch.Tensor

    @property
    def reach(self) -> int:
        """The greatest distance with an entry."""
        return self.keys.shape[1] // 2

    def terms(self, query: torch.Tensor, key: torch.Tensor, scaling: float, before: int = 0) -> torch.Tensor:
        """The addends [..., heads, n, m], as for a bias."""
        n, m = query.shape[-2], key.shape[-2]
        width = n + m - 1
        near_keys, near_queries = (  # [heads, width, head_dim]
            _entries(table, self.reach, query, key, before).to(query.dtype)
            for table in (self.keys, self.queries)
        )
        near_queries = near_queries.flip(1)
        # Products with all distances; those of a query and a key are shifted by one from row to row.
        of_queries = (query @ near_keys.transpose(1, 2)).contiguous()  # [..., heads, n, width]
        of_keys = (key @ near_queries.transpose(1, 2)).contiguous()  # [..., heads, m, width]
        shape, outer = (*query.shape[:-2], n, m), of_queries.stride()[:-2]
        to_positions = of_queries.as_strided(shape, (*outer, width - 1, 1), n - 1)
        from_positions = of_keys.as_strided(shape, (*of_keys.stride()[:-2], 1, width - 1), m - 1)
        return (to_positions + from_positions) * scaling

    @cached_property
    def units(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and queries for the kernel, 32 bits of a head at a time: [heads, units, stride]."""
        return _in_units(self.keys), _in_units(self.queries)


RelativePositions = PositionBias | PositionContent


def _entries(
    table: torch.Tensor, reach: int, query: torch.Tensor, key: torch.Tensor, before: int
) -> torch.Tensor:
    """The entries [heads, n + m - 1, ...] of all distances between n queries and m keys, least first."""
    first = reach - before - (query.shape[-2] - 1)
    last = reach - before + key.shape[-2] - 1
    if first < 0 or last > 2 * reach:
        raise ValueError(f"a query and a key are more than {reach} positions apart")
    return table[:, first : last + 1]


def _in_units(table: torch.Tensor) -> torch.Tensor:
    """A table [heads, distances, head_dim] with its head size rounded up to a multiple of 16."""
    rows = torch.nn.functional.pad(table, (0, -table.shape[-1] % 16, 0, _BEHIND)).contiguous()
    return rows.view(torch.int32).transpose(1, 2).contiguous()


class KV(NamedTuple):
    """Keys and values, [kv_heads, tokens, head_dim] each; values may have another head size."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class QKV:
    """`query` is [heads, rows, head_dim], `key` and `value` are [kv_heads, rows, head_dim].

    Products are multiplied by `scaling`. With a `window`, a query sees the keys that are fewer than `window`
    positions away. With `relative`, distances add to the products."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    window: int | None = None
    relative: RelativePositions | None = None

    def of_rows(self, rows: slice) -> "QKV":
        """The queries, keys and values of these rows, as views."""
        return replace(self, query=self.query[:, rows], key=self.key[:, rows], value=self.value[:, rows])

    def new_output(self) -> torch.Tensor:
        """Uninitialized memory for the result: [rows, heads, head_dim of the values]."""
        return self.query.new_empty(self.query.shape[1], self.query.shape[0], self.value.shape[-1])
