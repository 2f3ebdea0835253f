"""The policy: which waiting work makes up the next step.

Nothing here knows how a step is run, or what comes of it.
"""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from maxsimd.scheduler.forecast import work_ahead
from maxsimd.scheduler.sequence import CachedBatch, Chunk, ImageJob, Step, TokenSequence
from maxsimd.scheduler.waiting import HeldFeatures, Share, Shares, WaitingRequest, share_of


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


# For how many steps after the last small request the next is expected: for seconds, on a CPU.
STEPS_BESIDE_SMALL = 256


class SmallRequests:
    """A request is small while `most` tokens or fewer of it wait; none is where `most` is None."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._steps_left = 0

    def include(self, request: WaitingRequest) -> bool:
        return self._most is not None and request.work <= self._most

    def note(self, request: WaitingRequest) -> None:
        """Notes that something of a request has come: after a small one, more are expected for a while."""
        if self.include(request):
            self._steps_left = STEPS_BESIDE_SMALL

    def next_step(self, budget: int) -> int:
        """How much of the next step's budget larger requests may use."""
        if self._most is None or not self._steps_left:
            return budget
        self._steps_left -= 1
        return min(budget, self._most)


class StepBudget:
    """As many `tokens`, or for a while a part of them, after the device ran out of memory."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._divisor = 1
        self._steps = 0

    def halve(self, steps: int) -> None:
        """Halves it for the next `steps` steps; again if it is halved already, down to a 64th."""
        self._divisor = min(self._divisor * 2, 64)
        self._steps = steps

    def next_step(self) -> int:
        if self._steps == 0:
            self._divisor = 1
            return self._tokens
        self._steps -= 1
        return max(1, self._tokens // self._divisor)


# What the oldest request gets of each step. By `maxsimd bench order-of-work --oldest-share`, with one giant
# in a hundred requests at a load of 0.95 and seed 1, shares of 1/16, 1/8, 1/4 and 1/2 have mean latencies of
# 0.52, 0.52, 0.56 and 0.81 s (round robin: 0.76) and p99 of 1.3, 1.4, 1.8 and 4.9 s (2.8). So 1/8 costs next
# to nothing, and who must wait for a turn as the oldest waits half as long as with 1/16.
OLDEST_SHARE = 1 / 8
# What it gets once it is overdue: once as much has been run since it came as waited with it then. By the same
# command with `--overdue-share`, shares of 1/8, 1/4 and 1/2 have p99 of 4.5, 3.7 and 3.0 s for requests of 20
# docstrings at twice the load that can be served; with one giant in a hundred at a load of 0.95, they have
# mean latencies of 0.52, 0.54 and 0.66 s and p99 of 1.4, 1.7 and 4.4 s.
OVERDUE_SHARE = 1 / 4
Part: TypeAlias = TokenSequence | CachedBatch | ImageJob

# How many requests of which nothing fits are looked at to fill a step; it bounds the time of a step.
_MAX_MISSES = 64


class Scheduler:
    """Owns all waiting work and forms steps from it. Not thread-safe: one owner calls it.

    Which request is served first, `Shares` says: weighted shares between tenants and priorities, then the
    class of what a request has left, then arrival. A step is filled in four passes:

    1. The oldest request gets its part: `oldest_share` of the budget over time, taken as twice that in every
       other step, so that in the steps between a long sequence finds the whole budget free. Once it is
       overdue, because later ones have passed it, that is `overdue_share`, as far as it is at most half of
       what its tenant and priority are due by their weight.
    2. In those steps, the first request of which nothing fitted the step before is given one part.
    3. All requests in order, as much of each as fits; of a causal model the first of which nothing fits any
       more is cut to fill the step. At most one sequence is mid-prefill at a time.
    4. What room is left goes to the sequence that is mid-prefill.

    While small requests come (`StepLimits.beside_small`), steps are short: these passes have a smaller
    budget, or one sequence or picture of larger requests, whose pictures and sequences do not share a step.
    Only small requests use what is left of the whole budget, and but for pictures they are run first.

    Cached batches are scheduled like sequences and cost their price. So do pictures, each before the sequence
    that has it, which runs in a later step; they are run behind the step's sequences, and the last few of a
    request come along with others, up to half a budget more. What is larger than the whole budget and cannot
    be cut makes up a step alone, when its request's turn comes and the step is still empty.

    So nothing starves: a request of T tokens that is admitted while Q tokens wait is scheduled completely
    within (Q + T) / (oldest_share * budget) steps; to this add, once, what the step before and the request's
    longest part took beyond the share, and what is left of the sequence that was mid-prefill.

    `weights` are those of tenants, 1 for each that it does not name. `oldest_share` is above 0, and both
    shares are at most 0.5; an `overdue_share` below `oldest_share` changes nothing. Raises ValueError for
    other values.
    """

    def __init__(
        self,
        limits: StepLimits,
        *,
        weights: Mapping[str, float] | None = None,
        oldest_share: float = OLDEST_SHARE,
        overdue_share: float = OVERDUE_SHARE,
    ) -> None:
        if not 0 < oldest_share <= 0.5:
            raise ValueError(f"oldest_share must be above 0 and at most 0.5, not {oldest_share}")
        if not 0 <= overdue_share <= 0.5:
            raise ValueError(f"overdue_share must be from 0 to 0.5, not {overdue_share}")
        self.limits = limits
        self.oldest_share = oldest_share
        self.overdue_share = overdue_share
        self._shares = Shares(weights or {}, limits.tokens)
        self._requests: dict[int, WaitingRequest] = {}
        self._arrivals = 0
        self._tokens = 0
        self._scheduled_tokens = 0
        self._sequences = 0
        self._cached = 0
        self._features = HeldFeatures(limits.features)
        self._partial: WaitingRequest | None = None
        # The oldest request, while it has to wait until another's sequence is no longer mid-prefill.
        self._next_partial: WaitingRequest | None = None
        self._passed_over: WaitingRequest | None = None
        self._oldest_credit = 0.0
        self._steps = 0
        self._budget = StepBudget(limits.tokens)
        self._small = SmallRequests(limits.beside_small)

    @property
    def waiting_tokens(self) -> int:
        """Tokens not scheduled yet, and the prices of cached batches and pictures not scheduled yet."""
        return self._tokens

    @property
    def waiting_sequences(self) -> int:
        """Sequences not scheduled to their end."""
        return self._sequences

    @property
    def waiting_cached(self) -> int:
        """Cached batches not scheduled yet."""
        return self._cached

    @property
    def held_features(self) -> int:
        """Features of pictures that have been scheduled, and whose sequences have not."""
        return self._features.number

    @property
    def waiting_requests(self) -> int:
        """Requests of which something is not scheduled yet."""
        return len(self._requests)

    @property
    def is_mid_prefill(self) -> bool:
        """Whether a sequence has been scheduled in part; there is at most one."""
        return self._partial is not None

    def work_ahead(
        self, tokens: int, tenant: str = "", priority: int = 0, coming: Iterable[tuple[Share, int]] = ()
    ) -> int:
        """About how many tokens are run before the last of a request of `tokens` that were admitted now.
        Those `coming` before it are not admitted yet: whose they are, and their tokens."""
        waiting = chain(((request.share, request.work) for request in self._requests.values()), coming)
        share = share_of(tenant, priority)
        weights, oldest_share = self._shares.weights, self._share_of_oldest()
        return work_ahead(tokens, share, waiting, weights, oldest_share, self.limits.tokens)

    def waiting_of(self, tenant: str) -> int:
        """Tokens of a tenant that are not scheduled yet, and the prices of its cached batches."""
        return sum(request.work for request in self._requests.values() if request.share[0] == tenant)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Changes what tenants weigh, those whose requests wait included; 1 for each that is not named.
        Raises ValueError, and changes nothing, for a weight that is not positive and finite."""
        self._shares.set_weights(weights)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of which `num_tokens` tokens are to be run can ever be scheduled."""
        return self.limits.chunked or num_tokens <= self.limits.tokens

    def admit(
        self,
        request_id: int,
        sequences: Iterable[TokenSequence],
        cached: Iterable[CachedBatch] = (),
        priority: int = 0,
        tenant: str = "",
        *,
        images: Iterable[ImageJob] = (),
        in_order: bool = False,
    ) -> None:
        """Takes a request's sequences, cached batches and pictures into the queue. Queries, prefixes and
        pictures must be in the same call as what waits for them, or in an earlier one of the same request.

        Among the waiting requests of a tenant, those with a lower `priority` (cut to -8 to 8) get a larger
        share, by powers of two; a priority above 0 also lets other tenants pass. What is added to a waiting
        request stays under the tenant and priority of the first call. Its sequences are run in steps that are
        full, or `in_order`, as they were given in the first call. Raises ValueError, and takes nothing, for a
        sequence that can never fit a step."""
        sequences, cached = list(sequences), list(cached)
        request = self._requests.get(request_id)
        if request is None:
            request = WaitingRequest(request_id, share_of(tenant, priority), in_order)
            request.add(sequences, cached, images)
            self.enter(request)
            return
        self._check_fits(max((sequence.num_new_tokens for sequence in sequences), default=0))
        before = request.work
        request.add(sequences, cached, images)
        self._tokens += request.work - before
        self._sequences += len(sequences)
        self._cached += len(cached)
        self._small.note(request)
        self._shares.charge(request, 0)

    def enter(self, request: WaitingRequest) -> None:
        """Takes a request with all its work into the queue: what `admit` does, in a moment however much it
        is. Nothing with its id waits yet. Raises ValueError, and does not take it, if it has a sequence that
        can never fit a step."""
        self._check_fits(request.longest)
        if not request.work:
            return
        if not self._requests:  # an empty queue has saved up nothing for the oldest, and owes nothing
            self._oldest_credit = 0.0
        request.arrival = self._arrivals
        self._arrivals += 1
        self._requests[request.request_id] = request
        self._tokens += request.work
        request.due = self._scheduled_tokens + self._tokens
        self._sequences += request.num_sequences
        self._cached += request.num_cached
        self._small.note(request)
        self._shares.join(request)

    def cancel(self, request_id: int) -> None:
        """Forgets everything of a request that no step has taken, also the rest of a partial prefill. Does
        nothing for a request that does not wait."""
        request = self._requests.get(request_id)
        if request is None:
            return
        self._tokens -= request.work
        self._sequences -= request.num_sequences
        self._cached -= request.num_cached
        self._forget(request)

    def reduce_budget(self, steps: int = 100) -> None:
        """Halves the token budget for the next `steps` steps, after the device ran out of memory; again if it
        is halved already, down to a 64th.

        What no longer fits and cannot be cut is still run, alone in its step."""
        self._budget.halve(steps)

    def schedule(self) -> Step | None:
        """Forms the next step, or returns None when nothing waits."""
        if not self._requests:
            return None
        budget = self._budget.next_step()
        most = self._small.next_step(budget)
        filling = Filling(budget, self.limits.sequences, most if most < budget else None)
        if not self._serve_oldest(filling):
            self._serve_passed_over(filling)
        self._serve_in_order(filling)
        while filling.room > 0 and self._fill_gap(filling):
            self._shares.restore()
            self._serve_in_order(filling)
        self._shares.restore()
        if most < budget:
            self._serve_small(filling)
        elif budget == self.limits.tokens:
            self._take_last_pictures(filling)
        self._features.end_step()
        self._steps += 1
        return filling.step(self._steps)

    def _check_fits(self, longest: int) -> None:
        if not self.fits(longest):
            raise ValueError(f"{longest} tokens do not fit a step of {self.limits.tokens}")

    def _serve_oldest(self, filling: Filling) -> bool:
        """Gives the oldest request its part, if it is due one; says whether it was."""
        part = self._share_of_oldest() * filling.room
        self._oldest_credit = min(self._oldest_credit + part, self.limits.tokens)
        if self._oldest_credit <= 0:
            return False
        while self._requests and filling.room > 0 and self._oldest_credit > -part:
            oldest, most = next(iter(self._requests.values())), math.ceil(self._oldest_credit + part)
            given = self._give(oldest, filling, most)
            if not given and filling.takes_oversized(oldest.request_id):
                self._next_partial = oldest
                given = self._continue_partial(filling, most)
            if not given:
                break
            self._oldest_credit -= given
        return True

    def _oldest(self) -> WaitingRequest | None:
        return next(iter(self._requests.values()), None)

    def _share_of_oldest(self) -> float:
        oldest = self._oldest()
        if oldest is None or self._scheduled_tokens <= oldest.due:
            return self.oldest_share
        return max(self.oldest_share, min(self.overdue_share, self._shares.part(oldest) / 2))

    def _serve_passed_over(self, filling: Filling) -> None:
        request, self._passed_over = self._passed_over, None
        if request is not None and not self._give(request, filling):
            self._continue_partial(filling)

    def _serve_in_order(self, filling: Filling) -> None:
        misses = 0
        while filling.room > 0 and misses < _MAX_MISSES and (request := self._shares.first()) is not None:
            if self._give(request, filling):
                continue
            if self._passed_over is None:
                self._passed_over = request
            self._shares.set_aside(request)
            misses += 1

    def _serve_small(self, filling: Filling) -> None:
        misses = 0
        while filling.room_for_small > 0 and misses < _MAX_MISSES and (request := self._shares.first()):
            is_small = filling.note(request.request_id, self._small.include(request))
            if not is_small or not self._give(request, filling):
                self._shares.set_aside(request)
                misses += 1
        self._shares.restore()

    def _take_last_pictures(self, filling: Filling) -> None:
        request = self._shares.first()
        if request is not None and filling.may_have_more_images_of(request.request_id):
            for image in self._features.take_last(request, self.limits.tokens // 2, self._oldest()):
                self._add(request, image, filling)

    def _fill_gap(self, filling: Filling) -> bool:
        """Fills what nothing else fits into; says whether it could."""
        if self._partial is None and self._next_partial is not None:
            return self._give(self._next_partial, filling) > 0
        return self._continue_partial(filling) > 0

    def _give(self, request: WaitingRequest, filling: Filling, most: int = sys.maxsize) -> int:
        """Adds to the step what of a request best uses the room, but at most `most` tokens of a sequence that
        has to be cut. Returns its cost in tokens: 0 when nothing could be added."""
        filling.note(request.request_id, self._small.include(request))
        if request is self._partial and (given := self._continue_partial(filling, most)):
            return given
        part = self._take(request, filling)
        takes_sequence = filling.takes_sequence(request.request_id)
        if part is None and takes_sequence and self._may_cut(request) and request.start_partial():
            self._partial = request
            self._next_partial = None
            return self._continue_partial(filling, most)
        if part is None and filling.takes_image(request.request_id):
            part = self._features.take(request, filling.room_of(request.request_id), self._oldest())
        if part is None and filling.takes_oversized(request.request_id):
            part = self._take_oversized(request, takes_sequence)
        return 0 if part is None else self._add(request, part, filling)

    def _take(self, request: WaitingRequest, filling: Filling) -> Part | None:
        room = filling.room_of(request.request_id)
        if filling.takes_sequence(request.request_id):
            return request.take(room)
        return request.take_cached(room) if filling.takes_cached(request.request_id) else None

    def _may_cut(self, request: WaitingRequest) -> bool:
        reserved = self._next_partial
        # One that waits for its pictures would keep others from being cut whose features these wait for.
        is_reserved = reserved is not None and reserved is not request and reserved.has_sequence
        return self.limits.chunked and self._partial is None and not is_reserved

    def _take_oversized(self, request: WaitingRequest, may_be_sequence: bool) -> Part | None:
        """What is larger than the whole budget and cannot be cut."""
        sequence = request.take_longest() if may_be_sequence and not self.limits.chunked else None
        if sequence is not None:
            return sequence
        image = self._features.take(request, None, self._oldest())
        return request.take_cached() if image is None else image

    def _add(self, request: WaitingRequest, part: Part, filling: Filling) -> int:
        match part:
            case CachedBatch():
                self._cached -= 1
                given = filling.add(part)
            case ImageJob():
                given = filling.add(part)
            case TokenSequence():
                self._sequences -= 1
                given = filling.add(Chunk(part, part.shared_prefix_len, len(part)))
        self._account(request, given)
        return given

    def _continue_partial(self, filling: Filling, most: int = sys.maxsize) -> int:
        """Adds to the step up to `most` tokens of the sequence that is mid-prefill; returns how many."""
        request = self._partial
        if request is None or request.partial is None:
            return 0
        filling.note(request.request_id, self._small.include(request))
        given = filling.lengthen(*request.partial, most)
        if not given:
            return 0
        sequence = request.partial[0]
        if request.advance(given):
            self._partial = None
            self._sequences -= 1
            given += sequence.scoring
        self._account(request, given)
        return given

    def _account(self, request: WaitingRequest, given: int) -> None:
        self._tokens -= given
        self._scheduled_tokens += given
        self._shares.charge(request, given)
        if not request.work:
            self._forget(request)

    def _forget(self, request: WaitingRequest) -> None:
        self._features.forget(request)
        del self._requests[request.request_id]
        self._shares.leave(request)
        if self._partial is request:
            self._partial = None
        if self._next_partial is request:
            self._next_partial = None
        if self._passed_over is request:
            self._passed_over = None
