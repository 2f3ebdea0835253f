"""The embeddings of queries whose documents are still to come."""

from dataclasses import dataclass

import torch

from maxsimd.scheduler import Sequence


@dataclass(slots=True, eq=False)
class _Held:
    embedding: torch.Tensor
    request: int
    uses: int


class QueryRegistry:
    """Holds each query's embedding [tokens, dim] until as many documents as it announced have used it."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def put(self, query: Sequence, embedding: torch.Tensor) -> None:
        # A clone, so that one query does not keep the whole step's tensor alive.
        self._held[query.key] = _Held(embedding.clone(), query.request, query.uses)

    def get(self, key: int) -> torch.Tensor:
        """The embedding of a query; KeyError when it is not, or no longer, held."""
        return self._held[key].embedding

    def release(self, key: int, uses: int = 1) -> None:
        """Counts `uses` documents as done with the query, which goes after the last."""
        held = self._held.get(key)
        if held is not None:
            held.uses -= uses
            if held.uses <= 0:
                del self._held[key]

    def drop_request(self, request: int) -> None:
        """Lets go of all queries of a request that has ended."""
        for key in [key for key, held in self._held.items() if held.request == request]:
            del self._held[key]
