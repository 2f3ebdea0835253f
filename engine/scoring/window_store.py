"""The windows of documents that were too long for one sequence, until all of a document's are there."""

import torch

from maxsimd.scheduler import Sequence


class WindowRegistry:
    """Holds each window's token embeddings until its document is complete.

    Putting a window twice has the effect of putting it once, so that a step may be retried."""

    def __init__(self) -> None:
        self._held: dict[int, dict[int, torch.Tensor]] = {}
        self._requests: dict[int, int] = {}
        self._tokens: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def put(self, sequence: Sequence, embedding: torch.Tensor) -> torch.Tensor | None:
        """The embeddings of the whole document [tokens, dim] once its last window is there, else None."""
        assert sequence.document is not None
        windows = self._held.setdefault(sequence.document, {})
        self._requests[sequence.document] = sequence.request
        self._tokens.setdefault(sequence.document, {})[sequence.key] = len(sequence)
        # A clone, so that one window does not keep the whole step's tensor alive.
        windows[sequence.key] = embedding.clone()
        if len(windows) < sequence.windows:
            return None
        return torch.cat([windows[key] for key in sorted(windows)])

    def tokens(self, document: int) -> int:
        """How many tokens the windows of a document have that are here."""
        return sum(self._tokens[document].values())

    def release(self, document: int) -> None:
        """Lets go of a document that has been scored."""
        self._held.pop(document, None)
        self._requests.pop(document, None)
        self._tokens.pop(document, None)

    def drop_request(self, request: int) -> None:
        """Lets go of all windows of a request that has ended."""
        for document in [key for key, owner in self._requests.items() if owner == request]:
            self.release(document)
