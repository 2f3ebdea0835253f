"""The windows of documents that were too long for one sequence, until all of a document's are there."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch

from maxsimd.scheduler import Sequence, Window


@dataclass(slots=True, eq=False)
class _Document:
    """A document's windows by their sequence ids: their embeddings, how many tokens each has, and which were
    put by steps that are not committed yet."""

    request_id: int
    embeddings: dict[int, torch.Tensor] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    uncommitted: set[int] = field(default_factory=set)
    is_scored: bool = False


class WindowStore:
    """Holds each window's token embeddings until its document is complete.

    Putting a window twice has the effect of putting it once, so that a step may be retried. If a step fails
    and is retried in halves, a document can be scored with the first half although some of its windows come
    again with the second: those are expected, and not stored."""

    def __init__(self) -> None:
        self._documents: dict[int, _Document] = {}

    def __len__(self) -> int:
        return len(self._documents)

    def put(self, sequence: Sequence, window: Window, embedding: torch.Tensor) -> torch.Tensor | None:
        """The embeddings of the whole document [tokens, dim] once its last window is there, else None."""
        document = self._documents.setdefault(window.document_id, _Document(sequence.request_id))
        document.uncommitted.add(sequence.sequence_id)
        if document.is_scored:
            return None
        document.tokens[sequence.sequence_id] = len(sequence)
        # A clone, so that one window does not hold the whole step's tensor alive.
        document.embeddings[sequence.sequence_id] = embedding.clone()
        if len(document.embeddings) < window.num_windows:
            return None
        return torch.cat([document.embeddings[sequence_id] for sequence_id in sorted(document.embeddings)])

    def tokens(self, document_id: int) -> int:
        """How many tokens the windows of a document have that have arrived."""
        return sum(self._documents[document_id].tokens.values())

    def commit(self, document_id: int, sequence_ids: AbstractSet[int]) -> None:
        """Notes that the step that put these windows of a document is committed."""
        document = self._documents.get(document_id)
        if document is None:
            return
        document.uncommitted -= sequence_ids
        if document.is_scored and not document.uncommitted:
            del self._documents[document_id]

    def release(self, document_id: int) -> None:
        """Forgets a document that has been scored, but for windows that will come again."""
        document = self._documents.get(document_id)
        if document is None:
            return
        document.is_scored = True
        document.embeddings.clear()
        document.tokens.clear()
        self.commit(document_id, frozenset())

    def drop_request(self, request_id: int) -> None:
        """Forgets all windows of a request that has ended."""
        owned = [key for key, document in self._documents.items() if document.request_id == request_id]
        for document_id in owned:
            del self._documents[document_id]
