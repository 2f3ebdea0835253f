"""The embeddings of queries whose documents are still to come."""

from dataclasses import dataclass

import torch

from maxsimd.scheduler import TokenSequence


@dataclass(slots=True, eq=False)
class _StoredQuery:
    embedding: torch.Tensor
    request_id: int
    consumers_left: int


class QueryStore:
    """Holds each query's embedding [tokens, dim] until as many documents as it announced are scored.

    Putting a query twice has the effect of putting it once, so that a step may be retried."""

    def __init__(self) -> None:
        self._queries: dict[int, _StoredQuery] = {}

    def __len__(self) -> int:
        return len(self._queries)

    def put(self, query: TokenSequence, embedding: torch.Tensor) -> None:
        # A clone, so that one query does not hold the whole step's tensor alive.
        stored = _StoredQuery(embedding.clone(), query.request_id, query.num_consumers)
        self._queries[query.sequence_id] = stored

    def get(self, query_id: int) -> torch.Tensor:
        """The embedding of a query; KeyError when it is not stored, or no longer."""
        return self._queries[query_id].embedding

    def release(self, query_id: int, consumers: int = 1) -> None:
        """Counts `consumers` documents as scored; the query is forgotten after the last."""
        query = self._queries.get(query_id)
        if query is not None:
            query.consumers_left -= consumers
            if query.consumers_left <= 0:
                del self._queries[query_id]

    def drop_request(self, request_id: int) -> None:
        """Forgets all queries of a request that has ended."""
        owned = [query_id for query_id, query in self._queries.items() if query.request_id == request_id]
        for query_id in owned:
            del self._queries[query_id]
