"""Which sequences have left state on the device for later steps: keys and values, and pooled rows; and which
pictures their features."""

from maxsimd.scheduler import Step


class CutSequences:
    """The sequences that are cut between steps, by request, the prefixes that other sequences run behind, and
    the pictures that sequences wait for.

    Owned by the runner actor. Noting a step again, when it is retried, does no harm."""

    def __init__(self) -> None:
        self._of_request: dict[int, set[int]] = {}
        self._consumers_left: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of_request.values()))

    def note(self, step: Step) -> None:
        """Notes what will have state once the step has run."""
        for image in step.images:
            self._of_request.setdefault(image.request_id, set()).add(image.image_id)
        for chunk in step.chunks:
            sequence = chunk.sequence
            if chunk.is_prefix:
                self._consumers_left.setdefault(sequence.sequence_id, sequence.num_consumers)
            if chunk.is_prefix or not chunk.is_whole:
                self._of_request.setdefault(sequence.request_id, set()).add(sequence.sequence_id)

    def finish(self, step: Step) -> frozenset[int]:
        """The ids of sequences and pictures whose state is not needed once the step is delivered; forgets
        them."""
        finished: set[int] = set()
        for chunk in step.chunks:
            sequence = chunk.sequence
            for image in sequence.tokens.images if chunk.is_last else ():
                self._forget(sequence.request_id, image.image_id)
                finished.add(image.image_id)
            if not chunk.is_last or chunk.is_first or chunk.is_prefix:
                continue
            self._forget(sequence.request_id, sequence.sequence_id)
            finished.add(sequence.sequence_id)
            prefix_id = sequence.prefix_id
            if prefix_id is not None and self._count_consumer(prefix_id):
                self._forget(sequence.request_id, prefix_id)
                finished.add(prefix_id)
        return frozenset(finished)

    def drop_request(self, request_id: int) -> frozenset[int]:
        """The ids of all sequences and pictures of a request that have state; forgets them."""
        dropped = frozenset(self._of_request.pop(request_id, ()))
        for sequence_id in dropped:
            self._consumers_left.pop(sequence_id, None)
        return dropped

    def _count_consumer(self, prefix_id: int) -> bool:
        """Counts a sequence that has run behind a prefix; True after the last."""
        left = self._consumers_left.get(prefix_id, 0) - 1
        self._consumers_left[prefix_id] = left
        if left > 0:
            return False
        del self._consumers_left[prefix_id]
        return True

    def _forget(self, request_id: int, sequence_id: int) -> None:
        cut = self._of_request.get(request_id, set())
        cut.discard(sequence_id)
        if not cut:
            self._of_request.pop(request_id, None)
