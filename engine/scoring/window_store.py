"""The windows of documents that were too long for one sequence, until all of a document's are there."""

from collections.abc import Collection

import torch

from maxsimd.scheduler import TokenSequence, Window


class WindowStore:
    """Holds each window's token embeddings until its document is complete.

    Where a step is tried again, its windows are forgotten first: a document is complete exactly once."""

    def __init__(self) -> None:
        self._held: dict[int, dict[int, torch.Tensor]] = {}
        self._requests: dict[int, int] = {}
        self._tokens: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def put(self, sequence: TokenSequence, window: Window, embedding: torch.Tensor) -> torch.Tensor | None:
        """The embeddings of the whole document [tokens, dim] once its last window is there, else None."""
        self._requests[window.document_id] = sequence.request_id
        document = self._held.setdefault(window.document_id, {})
        self._tokens.setdefault(window.document_id, {})[sequence.sequence_id] = len(sequence)
        # A clone, so that one window does not hold the whole step's tensor alive.
        document[sequence.sequence_id] = embedding.clone()
        if len(document) < window.num_windows:
            return None
        return torch.cat([document[sequence_id] for sequence_id in sorted(document)])

    def tokens(self, document_id: int) -> int:
        """How many tokens the windows of a document have that have arrived."""
        return sum(self._tokens[document_id].values())

    def forget(self, sequence_ids: Collection[int]) -> None:
        """Forgets the windows with these sequence ids, as if they had not been put."""
        for document_id, windows in list(self._held.items()):
            for sequence_id in [found for found in windows if found in sequence_ids]:
                del windows[sequence_id]
                del self._tokens[document_id][sequence_id]
            if not windows:
                self.release(document_id)

    def release(self, document_id: int) -> None:
        """Forgets a document that has been scored."""
        self._held.pop(document_id, None)
        self._requests.pop(document_id, None)
        self._tokens.pop(document_id, None)

    def drop_request(self, request_id: int) -> None:
        """Forgets all windows of a request that has ended."""
        owned = [document for document, owner in self._requests.items() if owner == request_id]
        for document_id in owned:
            self.release(document_id)
