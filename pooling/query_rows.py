"""The embedding of a query that an engine has made, to be scored later: there or in another process."""

from dataclasses import dataclass

import torch

from maxsimd.pooling.vectors import Vectors


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QueryRows(Vectors):
    """What `Engine.encode_query` makes of a query, to be given in the query's place: a torch tensor on the
    CPU, [tokens, dim] for late interaction and [1, dim] where a text has one vector, in the precision in
    which documents are compared with it, so that nothing is rounded twice.

    `tokens` is how many were run for it, as usage counts them, and `truncated` says whether it was cut. The
    `fingerprint` is its model's: another one refuses it with InvalidRequestError. It can be pickled."""

    tokens: int
    truncated: bool
    fingerprint: str

    @property
    def rows(self) -> torch.Tensor:
        """The vectors, one a row."""
        return torch.as_tensor(self.values)

    def as_rows(self, dim: int) -> tuple[torch.Tensor, None]:
        """As of `Vectors`, but for a query all of whose tokens are left out of scoring, which has no row."""
        rows = self.rows
        if rows.shape == (0, dim):
            return rows, None
        return Vectors(rows).as_rows(dim)[0], None
