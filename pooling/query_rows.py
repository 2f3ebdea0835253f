"""The embedding of an encoded query, to be scored later, here or in another process."""

from dataclasses import dataclass

import torch

from maxsimd.pooling.vectors import Vectors


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QueryRows(Vectors):
    """A query that `Engine.encode_query` has encoded: a torch tensor on the CPU, [tokens, dim] for late
    interaction and [1, dim] where a text has one vector, in the precision in which documents are compared.

    `tokens` is how many were run for it, as in usage, and `truncated` says whether it was truncated. Models
    with another `fingerprint` refuse it with InvalidRequestError. It can be pickled."""

    tokens: int
    truncated: bool
    fingerprint: str

    @property
    def rows(self) -> torch.Tensor:
        """The vectors, one per row."""
        return torch.as_tensor(self.values)

    def as_rows(self, dim: int) -> tuple[torch.Tensor, None]:
        """The rows as of `Vectors`. A query whose tokens are all left out of scoring has no row."""
        rows = self.rows
        if rows.shape == (0, dim):
            return rows, None
        return Vectors(rows).as_rows(dim)[0], None
