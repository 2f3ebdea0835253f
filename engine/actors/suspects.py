"""Which sequences have lately broken a step by themselves, so that the next step with one runs it alone."""

import hashlib
from collections import Counter, OrderedDict

from maxsimd.scheduler import Chunk, Step, TokenSequence

# How many sequences are remembered; those that broke a step longest ago are forgotten first.
_MOST = 1_024


class Suspects:
    """Digests of what sequences have the model read. Owned by the runner actor.

    While there are none nothing is computed, and else only for sequences as long as one of them."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._lengths_by_digest: OrderedDict[bytes, int] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._lengths_by_digest)

    def add(self, sequence: TokenSequence) -> None:
        """Remembers a sequence that has broken a step alone."""
        self.discard(sequence)
        self._lengths_by_digest[_digest(sequence)] = len(sequence)
        self._lengths[len(sequence)] += 1
        if len(self) > self._most:
            self._forget(next(iter(self._lengths_by_digest)))

    def discard(self, sequence: TokenSequence) -> None:
        """Forgets a sequence that has run well, if it was one of them."""
        if sequence in self:
            self._forget(_digest(sequence))

    def __contains__(self, sequence: TokenSequence) -> bool:
        return len(sequence) in self._lengths and _digest(sequence) in self._lengths_by_digest

    def isolate(self, stage: Step) -> list[Step]:
        """A stage in parts, in the order in which to run them: each suspect stands alone.

        A suspect that others wait for comes first; those of them that are in the stage follow together, since
        they fail if it does. The other suspects come last, because they may wait for any of the rest."""
        if not self or stage.num_parts == 1:
            return [stage]
        suspects = {chunk.sequence.sequence_id for chunk in stage.chunks if chunk.sequence in self}
        if not suspects:
            return [stage]
        first, behind, rest, last = list[Chunk](), list[Chunk](), list[Chunk](), list[Chunk]()
        for chunk in stage.chunks:
            sequence = chunk.sequence
            if sequence.sequence_id in suspects:
                (first if sequence.num_consumers else last).append(chunk)
            else:
                waits = sequence.waits_for in suspects or sequence.prefix_id in suspects
                (behind if waits else rest).append(chunk)
        groups = [*([chunk] for chunk in first), behind, rest, *([chunk] for chunk in last)]
        return [Step(stage.step_id, tuple(group)) for group in groups if group]

    def _forget(self, digest: bytes) -> None:
        length = self._lengths_by_digest.pop(digest)
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]


def _digest(sequence: TokenSequence) -> bytes:
    tokens = sequence.tokens
    digest = hashlib.blake2b(f"{sequence.payload.role} {sequence.payload.task} ".encode(), digest_size=16)
    digest.update(f"{tokens.num_attended} ".encode())
    digest.update(tokens.ids.tobytes())
    if tokens.type_ids is not None:
        digest.update(tokens.type_ids.tobytes())
    for image in tokens.images:
        digest.update(image.digest)
    return digest.digest()
