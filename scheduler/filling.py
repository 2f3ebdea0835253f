"""A step while it is being filled: its limits, its parts and the room that is left.

Which part comes next is the policy's choice.
"""

from dataclasses import dataclass

from maxsimd.scheduler.image import ImageJob
from maxsimd.scheduler.sequence import CachedBatch, Chunk, Step, TokenSequence


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step may hold: `tokens` in all, cached batches and pictures counted at their price, and
    `sequences` in number, those not counted; `chunked` allows to cut a sequence. While small requests come,
    which have at most `beside_small` tokens, a step has at most as many of the others' work; None for no such
    limit. Pictures are encoded as long as those whose sequences are still to run have at most as many
    `features`, or there are none.

    Raises ValueError for a step that could hold nothing."""

    tokens: int
    sequences: int
    chunked: bool
    beside_small: int | None = None
    features: int = 16_384

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.sequences < 1:
            raise ValueError("a step must hold at least one token and one sequence")
        small = self.beside_small
        if small is not None and not 1 <= small <= self.tokens:
            raise ValueError(f"beside_small must be from 1 to {self.tokens}, not {small}")


class Filling:
    """The parts chosen so far.

    In a short step larger requests have at most `most_of_larger` tokens, or one sequence, cached batch or
    picture that has more, and their pictures do not share it with their sequences. A request is small or
    larger in all of a step, as it was noted first."""

    def __init__(self, budget: int, max_sequences: int, most_of_larger: int | None = None) -> None:
        self._budget = budget
        self._max_sequences = max_sequences
        self._most = most_of_larger
        self._small: dict[int, bool] = {}
        # What of larger requests is in the step: Chunk, also for cached batches, or ImageJob.
        self._larger: set[type] = set()
        self._small_tokens = 0
        self._larger_tokens = 0
        self._chunks: list[Chunk] = []
        self._cached: list[CachedBatch] = []
        self._images: list[ImageJob] = []

    @property
    def room(self) -> int:
        """The tokens that are left of the budget for larger requests, and where the step is not short for all
        of them. Negative once something that is larger than the budget has been added alone."""
        left = self._budget - self._small_tokens - self._larger_tokens
        return left if self._most is None else min(left, self._most - self._larger_tokens)

    @property
    def room_for_small(self) -> int:
        """What is left for small requests. In a short step they are run first, by themselves, so that they
        may have a part of it however long the rest is."""
        left = self._budget - self._small_tokens - self._larger_tokens
        return left if self._most is None else max(left, self._most - self._small_tokens)

    def room_of(self, request_id: int) -> int:
        """The tokens that are left for a request."""
        return self.room_for_small if self._small[request_id] else self.room

    def may_have_more_images_of(self, request_id: int) -> bool:
        """Whether it has a picture of a request, and nothing that is larger than the budget."""
        return self.room >= 0 and any(image.request_id == request_id for image in self._images)

    def note(self, request_id: int, is_small: bool) -> bool:
        """Notes whether a request is small, before anything of it is added; returns what it counts as."""
        return self._small.setdefault(request_id, is_small)

    def takes_oversized(self, request_id: int) -> bool:
        """Whether what is larger than the budget may be added: nothing is in the step, or nothing of a larger
        request in a short one."""
        if self._most is not None and not self._small[request_id]:
            return not self._larger
        return not (self._chunks or self._cached or self._images)

    def takes_sequence(self, request_id: int) -> bool:
        """Whether one more sequence of a request may be added."""
        return len(self._chunks) < self._max_sequences and self._takes(request_id, ImageJob)

    def takes_cached(self, request_id: int) -> bool:
        """Whether one more cached batch of a request may be added."""
        return self._takes(request_id, ImageJob)

    def takes_image(self, request_id: int) -> bool:
        """Whether one more picture of a request may be added."""
        return self._takes(request_id, Chunk)

    def _takes(self, request_id: int, other: type) -> bool:
        return self._most is None or self._small[request_id] or other not in self._larger

    def add(self, part: Chunk | CachedBatch | ImageJob) -> int:
        """Adds a part and returns what it costs, in tokens."""
        match part:
            case CachedBatch():
                self._cached.append(part)
                cost = part.price
            case ImageJob():
                self._images.append(part)
                cost = part.price
            case Chunk():
                self._chunks.append(part)
                cost = len(part) + part.scoring
        self._count(_request_of(part), cost)
        if not self._small[_request_of(part)]:
            self._larger.add(ImageJob if isinstance(part, ImageJob) else Chunk)
        return cost

    def lengthen(self, sequence: TokenSequence, start: int, most: int) -> int:
        """Adds up to `most` tokens of a sequence from `start` on: to its chunk, where the step has one
        already, else as a chunk, where one more is allowed. Returns how many tokens it added."""
        more = min(most, self.room_of(sequence.request_id), len(sequence) - start)
        for i, chunk in enumerate(self._chunks):
            if chunk.sequence is sequence:
                self._chunks[i] = Chunk(sequence, chunk.start, start + more)
                self._count(sequence.request_id, more + self._chunks[i].scoring)
                return more
        if not self.takes_sequence(sequence.request_id):
            return 0
        self.add(Chunk(sequence, start, start + more))
        return more

    def step(self, step_id: int) -> Step:
        small = frozenset(request_id for request_id, is_small in self._small.items() if is_small)
        first = small if self._most is not None and self._larger else frozenset()
        return Step(step_id, tuple(self._chunks), tuple(self._cached), tuple(self._images), first)

    def _count(self, request_id: int, tokens: int) -> None:
        if self._small[request_id]:
            self._small_tokens += tokens
        else:
            self._larger_tokens += tokens


def _request_of(part: Chunk | CachedBatch | ImageJob) -> int:
    return part.sequence.request_id if isinstance(part, Chunk) else part.request_id
