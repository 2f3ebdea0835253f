"""A step while it is being filled: its limits, its parts and the room that is left.

Which part comes next is the policy's choice.
"""

from dataclasses import dataclass

from maxsimd.scheduler.image import ImageJob
from maxsimd.scheduler.sequence import CachedBatch, Chunk, Sequence, Step


@dataclass(frozen=True, slots=True)
class BesideSmall:
    """How many tokens of larger requests a step may have while small requests come, which have at most
    `without` tokens: `with_one` where the step has one of them, whose answer is waited for, and `without`
    where it has none, so that those that come meanwhile wait for short steps."""

    with_one: int
    without: int


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step may hold: `tokens` in all, cached batches and pictures counted at their price, and
    `sequences` in number, those not counted; `chunked` allows to cut a sequence. While small requests come, a
    step has less of the others' work, `beside_small`; None for no such limit. Pictures are encoded as long as
    those whose sequences are still to run have at most as many `features`, or there are none.

    Raises ValueError for a step that could hold nothing."""

    tokens: int
    sequences: int
    chunked: bool
    beside_small: BesideSmall | None = None
    features: int = 16_384

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.sequences < 1:
            raise ValueError("a step must hold at least one token and one sequence")
        small = self.beside_small
        if small is not None and not 1 <= small.with_one <= small.without <= self.tokens:
            raise ValueError(f"beside_small must be from 1 to {self.tokens} and not fall, not {small}")


class Filling:
    """The parts chosen so far. `room` is the number of tokens that are left of the budget; it is negative
    once something that is larger than the budget has been added alone."""

    def __init__(self, budget: int, max_sequences: int) -> None:
        self.room = budget
        self._max_sequences = max_sequences
        self._chunks: list[Chunk] = []
        self._cached: list[CachedBatch] = []
        self._images: list[ImageJob] = []

    @property
    def is_open(self) -> bool:
        """Whether tokens are left."""
        return self.room > 0

    @property
    def is_empty(self) -> bool:
        return not (self._chunks or self._cached or self._images)

    @property
    def takes_sequences(self) -> bool:
        """Whether one more sequence may be added."""
        return len(self._chunks) < self._max_sequences

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
                cost = len(part)
        self.room -= cost
        return cost

    def lengthen(self, sequence: Sequence, start: int, most: int) -> int:
        """Adds up to `most` tokens of a sequence from `start` on: to its chunk, where the step has one
        already, else as a chunk, where one more is allowed. Returns how many tokens it added."""
        more = min(most, self.room, len(sequence) - start)
        for i, chunk in enumerate(self._chunks):
            if chunk.sequence is sequence:
                self._chunks[i] = Chunk(sequence, chunk.start, start + more)
                self.room -= more
                return more
        return self.add(Chunk(sequence, start, start + more)) if self.takes_sequences else 0

    def step(self, step_id: int) -> Step:
        return Step(step_id, tuple(self._chunks), tuple(self._cached), tuple(self._images))
