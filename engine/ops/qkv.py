"""The input of an attention kernel: one layer's queries, keys and values, and how they are compared."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch


class KV(NamedTuple):
    """Keys and values, [kv_heads, tokens, head_dim] each; the heads of values may have a size of their
    own."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class QKV:
    """`query` is [heads, rows, head_dim], `key` and `value` are [kv_heads, rows, head_dim].

    Products of queries and keys are multiplied by `scaling`. With a `window`, a query sees only the keys that
    are fewer than `window` positions away. With `slopes`, float32 [heads], a product then loses the slope of
    its head for each position that query and key are apart, in either direction (ALiBi; Press, Smith & Lewis
    2022, arXiv 2108.12409)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    window: int | None = None
    slopes: torch.Tensor | None = None

    def of_rows(self, rows: slice) -> "QKV":
        """The queries, keys and values of these rows alone, as views."""
        return replace(self, query=self.query[:, rows], key=self.key[:, rows], value=self.value[:, rows])

    def new_output(self) -> torch.Tensor:
        """Memory for what attention gives: [rows, heads, head_dim of the values], not initialised."""
        return self.query.new_empty(self.query.shape[1], self.query.shape[0], self.value.shape[-1])
