"""The policy: which waiting tokens make up the next step.

Nothing here knows how a step is run, or what comes of it.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from maxsimd.scheduler.sequence import Chunk, Sequence, Step
from maxsimd.scheduler.waiting import WaitingRequest


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step may hold: `tokens` in all, `sequences` in number; `chunked` allows to cut a sequence."""

    tokens: int
    sequences: int
    chunked: bool

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.sequences < 1:
            raise ValueError("a step must hold at least one token and one sequence")


class Scheduler:
    """Owns all waiting sequences and forms steps from them. Not thread-safe: one owner calls it.

    A step is filled in four passes: the sequence that is mid-prefill; a turn for each request in rotation
    (deficit round robin by tokens, weighted by priority); then whatever still fits, charged to whom it
    belongs; and for a causal model at last one sequence cut to fill the step to the brim. The rotation
    moves on by one request a step, so that every request is first in turn and nothing starves: whoever is
    first finds the whole budget free.
    """

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self._requests: dict[int, WaitingRequest] = {}
        self._rotation: deque[int] = deque()
        self._partial: tuple[Sequence, int] | None = None
        self._steps = 0
        self._budget_divisor = 1
        self._reduced_steps = 0

    @property
    def waiting_tokens(self) -> int:
        partial = len(self._partial[0]) - self._partial[1] if self._partial else 0
        return partial + sum(request.tokens for request in self._requests.values())

    @property
    def waiting_sequences(self) -> int:
        return bool(self._partial) + sum(request.count for request in self._requests.values())

    def fits(self, sequence_tokens: int) -> bool:
        """Whether a sequence of that many tokens can ever be scheduled."""
        return self.limits.chunked or sequence_tokens <= self.limits.tokens

    def admit(self, request: int, sequences: Iterable[Sequence], priority: int = 0) -> None:
        """Takes a request's sequences into the queue. A lower `priority` means a larger share, by
        powers of two. Raises ValueError for a sequence that can never fit a step."""
        sequences = list(sequences)
        for sequence in sequences:
            if not self.fits(sequence.num_new_tokens):
                raise ValueError(
                    f"{sequence.num_new_tokens} tokens do not fit a step of {self.limits.tokens}"
                )
        if request not in self._requests:
            weight = 2.0 ** -max(-8, min(8, priority))
            self._requests[request] = WaitingRequest(request, weight)
            self._rotation.append(request)
        self._requests[request].add(sequences)

    def cancel(self, request: int) -> None:
        """Forgets everything of a request that no step has taken, also the rest of a partial prefill."""
        if self._requests.pop(request, None) is not None:
            self._rotation.remove(request)
        if self._partial is not None and self._partial[0].request_id == request:
            self._partial = None

    def reduce_budget(self, steps: int = 100) -> None:
        """Halves the token budget for the next `steps` steps, after the device ran out of memory.

        Whole sequences of a bidirectional model that no longer fit are still run, one a step."""
        self._budget_divisor = min(self._budget_divisor * 2, 64)
        self._reduced_steps = steps

    def schedule(self) -> Step | None:
        """Forms the next step, or returns None when nothing waits."""
        filling = _Filling(self._current_budget(), self.limits.sequences)
        self._continue_prefill(filling)
        self._give_turns(filling)
        self._fill_gaps(filling)
        if self.limits.chunked:
            self._cut_to_fill(filling)
        elif not filling.chunks:
            self._run_oversized(filling)
        if not filling.chunks:
            return None
        self._rotation.rotate(-1)
        self._forget_empty_requests()
        self._steps += 1
        return Step(self._steps, tuple(filling.chunks))

    def _current_budget(self) -> int:
        if self._reduced_steps == 0:
            self._budget_divisor = 1
            return self.limits.tokens
        self._reduced_steps -= 1
        return max(1, self.limits.tokens // self._budget_divisor)

    def _continue_prefill(self, filling: "_Filling") -> None:
        if self._partial is None:
            return
        sequence, done = self._partial
        # Others need not wait for a very long sequence: while they do, it gets half of each step.
        room = filling.room if not self._requests else max(1, filling.room // 2)
        stop = min(len(sequence), done + room)
        filling.add(Chunk(sequence, done, stop))
        self._note_progress(sequence, stop)

    def _note_progress(self, sequence: Sequence, stop: int) -> None:
        """Remembers how far a cut sequence has come; once it is complete, its documents may follow."""
        self._partial = (sequence, stop)
        if stop == len(sequence):
            self._partial = None
            if sequence.request_id in self._requests:
                self._requests[sequence.request_id].release(sequence)

    def _give_turns(self, filling: "_Filling") -> None:
        active = [self._requests[request] for request in self._rotation if self._requests[request].count]
        total_weight = sum(request.weight for request in active)
        for request in active:
            quantum = self.limits.tokens * request.weight / total_weight
            # What was not used cannot be saved up without end.
            request.deficit = min(request.deficit + quantum, 2.0 * self.limits.tokens)
            while filling.is_open and request.deficit > 0:
                if not self._take_from(request, filling):
                    break

    def _fill_gaps(self, filling: "_Filling") -> None:
        for key in self._rotation:
            while filling.is_open and self._take_from(self._requests[key], filling):
                pass

    def _take_from(self, request: WaitingRequest, filling: "_Filling") -> bool:
        sequence = request.take(filling.room)
        if sequence is None:
            return False
        request.deficit -= sequence.num_new_tokens
        filling.add(Chunk(sequence, sequence.shared_prefix_len, len(sequence)))
        return True

    def _cut_to_fill(self, filling: "_Filling") -> None:
        """Fills what nothing else fits into: with more of the sequence that is mid-prefill, and once that
        is complete with the beginning of another."""
        if self._partial is not None:
            sequence, _ = self._partial
            self._note_progress(sequence, filling.extend(sequence))
        if self._partial is not None or not filling.is_open:
            return
        for key in self._rotation:
            request = self._requests[key]
            longest = request.take_longest()
            if longest is not None:
                request.deficit -= longest.num_new_tokens
                stop = min(len(longest), longest.shared_prefix_len + filling.room)
                filling.add(Chunk(longest, longest.shared_prefix_len, stop))
                self._note_progress(longest, stop)
                return

    def _run_oversized(self, filling: "_Filling") -> None:
        """Runs one whole sequence alone that is longer than a reduced budget."""
        for key in self._rotation:
            request = self._requests[key]
            sequence = request.take_longest()
            if sequence is not None:
                filling.add(Chunk(sequence, 0, len(sequence)))
                request.release(sequence)
                return

    def _forget_empty_requests(self) -> None:
        for key in [key for key, request in self._requests.items() if not request.count]:
            del self._requests[key]
            self._rotation.remove(key)


class _Filling:
    """A step being filled: its chunks and the room that is left."""

    def __init__(self, budget: int, sequences: int) -> None:
        self.chunks: list[Chunk] = []
        self.room = budget
        self._sequences = sequences

    @property
    def is_open(self) -> bool:
        return self.room > 0 and len(self.chunks) < self._sequences

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.room -= len(chunk)

    def extend(self, sequence: Sequence) -> int:
        """Lengthens the first chunk, which is of `sequence`, into the room that is left; returns its end."""
        first = self.chunks[0]
        assert first.sequence is sequence
        more = min(self.room, len(sequence) - first.stop)
        self.chunks[0] = Chunk(sequence, first.start, first.stop + more)
        self.room -= more
        return first.stop + more
