"""The scheduler: which waiting work makes up the next step, and estimates of when it will be done."""

import math
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np

from maxsimd.scheduler.sequence import CachedBatch, Chunk, ImageJob, Step, TokenSequence
from maxsimd.scheduler.waiting import HeldFeatures, Share, Shares, WaitingRequest, share_of, size_class

# The most rounds of the estimate: the longer everything takes, the more the oldest requests get meanwhile.
_ROUNDS = 100
# After this many seconds (of steps, for a rate) a measurement counts half.
_HALF_LIFE = 10.0
# The number of latest steps that tell how long another may take.
_LATEST_STEPS = 16
# This many seconds of waits count as exactly forecast, beside those that were seen. Forecasts are corrected
# at most by this factor.
_TRUSTED_SECONDS, _MOST_TIMES = 2.0, 4.0
# The oldest request's share of the device, and its share once it is overdue: once as much has run since it
# came as waited with it then. Both were measured (docs/internals/scheduling.md).
OLDEST_SHARE, OVERDUE_SHARE = 1 / 8, 1 / 4
# More small requests are expected for this many steps after the last one: for seconds, on a CPU.
STEPS_BESIDE_SMALL = 256
# At most this many requests that do not fit are tried for a step, which bounds the time of forming it.
_MAX_MISSES = 64

Part: TypeAlias = TokenSequence | CachedBatch | ImageJob


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of a step: `tokens`, including the prices of cached batches and pictures, and the number of
    `sequences`. With `chunked`, sequences may be split.

    Requests of at most `beside_small` tokens are small. While small requests come, other requests get at most
    as many tokens of a step; None turns this off. Scheduled pictures whose sequences still wait have at most
    `features` features together, or those of one sequence. Raises ValueError for a step that could hold
    nothing."""

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


class StepBuilder:
    """A step while it is being filled.

    In a short step larger requests have at most `most_of_larger` tokens, or one longer sequence, cached batch
    or picture, and their pictures do not share it with their sequences. A request stays small or larger for
    the whole step, as first noted."""

    def __init__(self, budget: int, max_sequences: int, most_of_larger: int | None = None) -> None:
        self._budget = budget
        self._max_sequences = max_sequences
        self._most = most_of_larger
        self._small: dict[int, bool] = {}
        # The kinds of larger requests' parts in the step: Chunk, also for cached batches, or ImageJob.
        self._larger: set[type] = set()
        self._small_tokens = 0
        self._larger_tokens = 0
        self._chunks: list[Chunk] = []
        self._cached: list[CachedBatch] = []
        self._images: list[ImageJob] = []

    @property
    def room(self) -> int:
        """The tokens left for larger requests, and for all of them in a step that is not short. Negative once
        a part above the budget has been added alone."""
        left = self._budget - self._small_tokens - self._larger_tokens
        return left if self._most is None else min(left, self._most - self._larger_tokens)

    @property
    def room_for_small(self) -> int:
        """The tokens left for small requests. A short step runs them first, by themselves, so that they may
        have a part of it however long the rest is."""
        left = self._budget - self._small_tokens - self._larger_tokens
        return left if self._most is None else max(left, self._most - self._small_tokens)

    def room_of(self, request_id: int) -> int:
        return self.room_for_small if self._small[request_id] else self.room

    def may_have_more_images_of(self, request_id: int) -> bool:
        """Whether the step has a picture of the request, and no part above the budget."""
        return self.room >= 0 and any(image.request_id == request_id for image in self._images)

    def note(self, request_id: int, is_small: bool) -> bool:
        """Notes whether a request is small before any of it is added. Returns whether it counts as small."""
        return self._small.setdefault(request_id, is_small)

    def takes_oversized(self, request_id: int) -> bool:
        """Whether a part above the budget may be added: only to an empty step, or to a short step without
        parts of larger requests."""
        if self._most is not None and not self._small[request_id]:
            return not self._larger
        return not (self._chunks or self._cached or self._images)

    def takes_sequence(self, request_id: int) -> bool:
        return len(self._chunks) < self._max_sequences and self.takes_beside(request_id, ImageJob)

    def takes_beside(self, request_id: int, kind: type) -> bool:
        """Whether a part of a request may be added beside larger requests' parts of another kind."""
        return self._most is None or self._small[request_id] or kind not in self._larger

    def add(self, part: Chunk | CachedBatch | ImageJob) -> int:
        """Adds a part and returns its cost in tokens."""
        match part:
            case CachedBatch():
                self._cached.append(part)
                request_id, cost = part.request_id, part.price
            case ImageJob():
                self._images.append(part)
                request_id, cost = part.request_id, part.price
            case Chunk():
                self._chunks.append(part)
                request_id, cost = part.sequence.request_id, len(part) + part.scoring
        self._count(request_id, cost)
        if not self._small[request_id]:
            self._larger.add(ImageJob if isinstance(part, ImageJob) else Chunk)
        return cost

    def lengthen(self, sequence: TokenSequence, start: int, most: int) -> int:
        """Adds at most `most` tokens of a sequence from `start` on: to its chunk in the step, or as a new
        chunk if one more is allowed. Returns the number of tokens."""
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


class Scheduler:
    """Owns all waiting work and forms steps from it. Not thread-safe.

    `Shares` orders the requests: weighted shares between tenants and priorities, then the class of the
    remaining work, then arrival. A step is filled in four passes:

    1. The oldest request gets its part: `oldest_share` of the budget over time, taken as twice that in every
       other step, so that in the steps between a long sequence finds the whole budget free. Once it is
       overdue, because later ones have passed it, that is `overdue_share`, as far as it is at most half of
       what its tenant and priority are due by their weight.
    2. In the other steps, the first request that did not fit the step before gets one part.
    3. All requests in order, as much of each as fits. With chunking, the first sequence that does not fit any
       more is split to fill the step. At most one sequence is mid-prefill at a time.
    4. The remaining room goes to the sequence that is mid-prefill.

    While small requests come (`StepLimits.beside_small`), steps are short: these passes have a smaller
    budget, or one sequence or picture of larger requests, whose pictures and sequences do not share a step.
    Only small requests use the rest of the whole budget. They run first, except for pictures.

    Cached batches are scheduled like sequences and cost their price. So do pictures, which come in an earlier
    step than their sequence. They run behind the step's sequences. The last pictures of a request come along
    with others, up to half a budget more. A part above the whole budget that cannot be split makes up a step
    alone, when its request's turn comes and the step is empty.

    Nothing starves: a request of T tokens that is admitted while Q tokens wait is scheduled completely within
    (Q + T) / (oldest_share * budget) steps, plus once the excess of the step before and of the request's
    longest part beyond the share, and the rest of the sequence that was mid-prefill.

    `weights` are the tenants' weights, 1 by default. `oldest_share` is above 0, and both shares are at most
    0.5; an `overdue_share` below `oldest_share` changes nothing. Raises ValueError for other values.
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
        # Unscheduled tokens, with the prices of cached batches and pictures; sequences that are not
        # completely scheduled; unscheduled cached batches.
        self.waiting_tokens = self.waiting_sequences = self.waiting_cached = 0
        self._scheduled_tokens = 0
        self._features = HeldFeatures(limits.features)
        # The request with a sequence that is scheduled in part; there is at most one.
        self._partial: WaitingRequest | None = None
        # The oldest request, while it waits for another's sequence that is mid-prefill.
        self._next_partial: WaitingRequest | None = None
        self._passed_over: WaitingRequest | None = None
        self._oldest_credit = 0.0
        self._steps = 0
        # The budget is divided by this for some steps after the device ran out of memory.
        self._divisor, self._divided_steps = 1, 0
        self._short_steps = 0

    def work_ahead(
        self, tokens: int, tenant: str = "", priority: int = 0, coming: Iterable[tuple[Share, int]] = ()
    ) -> int:
        """About how many tokens run before the last one of a request of `tokens` that is admitted now.
        `coming` are the shares and tokens of requests that are admitted before it.

        Requests of the same share and the same or a lower size class (`size_class`) run before it. Other
        shares run beside it by weight. The requests get `oldest_share` of everything in turn, oldest first;
        the part that goes to larger requests of the same share delays it."""
        share, budget = share_of(tenant, priority), self.limits.tokens
        own_class = size_class(tokens, budget)
        own, beside = tokens, dict[Share, int]()
        # The tokens given to the oldest requests, and how many of them to larger ones of the same share.
        given, to_larger = [0], [0]
        for each, work in chain(
            ((request.share, request.work) for request in self._requests.values()), coming
        ):
            is_larger = each == share and size_class(work, budget) > own_class
            if each != share:
                beside[each] = beside.get(each, 0) + work
            elif not is_larger:
                own += work
            given.append(given[-1] + work)
            to_larger.append(to_larger[-1] + work * is_larger)
        weight, oldest_share = self._shares.weights_of({share, *beside}), self._share_of_oldest()
        larger, total = 0.0, 0.0
        for _ in range(_ROUNDS):
            group = own + larger
            others = sum(min(work, group * weight[each] / weight[share]) for each, work in beside.items())
            before, total = total, group + others
            larger = float(np.interp(total * oldest_share, given, to_larger))
            if total - before < 1:
                break
        return round(total) - tokens

    def waiting_of(self, tenant: str) -> int:
        """The part of `waiting_tokens` that is a tenant's."""
        return sum(request.work for request in self._requests.values() if request.share[0] == tenant)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Changes the tenants' weights, for waiting requests too. Raises ValueError for invalid ones."""
        self._shares.set_weights(weights)

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
        """Queues a request of these parts, as `enter` does.

        A tenant's requests with a lower `priority` (limited to -8 to 8) get a larger share, by powers of two.
        A priority above 0 also lets other tenants pass."""
        request = WaitingRequest(request_id, share_of(tenant, priority), in_order)
        request.add(sequences, cached, images)
        self.enter(request)

    def enter(self, request: WaitingRequest) -> None:
        """Queues a complete request in constant time. No request with its id may wait. Raises ValueError, and
        does not queue it, if it has a sequence that can never fit a step."""
        if not self.limits.chunked and request.longest > self.limits.tokens:
            raise ValueError(f"{request.longest} tokens do not fit a step of {self.limits.tokens}")
        if not request.work:
            return
        if not self._requests:  # an empty queue has saved up nothing for the oldest, and owes nothing
            self._oldest_credit = 0.0
        request.arrival = self._arrivals
        self._arrivals += 1
        self._requests[request.request_id] = request
        self.waiting_tokens += request.work
        request.due = self._scheduled_tokens + self.waiting_tokens
        self.waiting_sequences += request.num_sequences
        self.waiting_cached += request.num_cached
        if self._is_small(request):  # more small ones are expected
            self._short_steps = STEPS_BESIDE_SMALL
        self._shares.join(request)

    def cancel(self, request_id: int) -> None:
        """Forgets the unscheduled rest of a request, if it waits."""
        request = self._requests.get(request_id)
        if request is None:
            return
        self.waiting_tokens -= request.work
        self.waiting_sequences -= request.num_sequences
        self.waiting_cached -= request.num_cached
        self._forget(request)

    def drop_sequence(self, request_id: int, sequence_id: int) -> None:
        """Forgets the rest of a sequence that is mid-prefill, if it is."""
        request = self._partial
        if request is None or request.request_id != request_id or request.partial is None:
            return
        sequence, start = request.partial
        if sequence.sequence_id == sequence_id:
            before = request.work
            request.advance(len(sequence) - start)
            self._partial = None
            self.waiting_sequences -= 1
            self.waiting_tokens -= before - request.work
            self._shares.charge(request, 0)
            if not request.work:
                self._forget(request)

    def reduce_budget(self, steps: int = 100) -> None:
        """Halves the token budget for the next `steps` steps after the device ran out of memory, down to a
        64th if called again. Parts that no longer fit and cannot be split still run, alone in their step."""
        self._divisor, self._divided_steps = min(self._divisor * 2, 64), steps

    def schedule(self) -> Step | None:
        """Forms the next step, or returns None when nothing waits."""
        if not self._requests:
            return None
        budget, small = self._next_budget(), self.limits.beside_small
        is_short = small is not None and self._short_steps > 0 and small < budget
        self._short_steps = max(0, self._short_steps - 1)
        builder = StepBuilder(budget, self.limits.sequences, small if is_short else None)
        if not self._serve_oldest(builder):
            request, self._passed_over = self._passed_over, None
            if request is not None and not self._give(request, builder):
                self._continue_partial(builder)
        self._serve_in_order(builder)
        while builder.room > 0 and self._fill_gap(builder):
            self._shares.restore()
            self._serve_in_order(builder)
        self._shares.restore()
        if is_short:
            self._serve_small(builder)
        elif budget == self.limits.tokens:
            self._take_last_pictures(builder)
        self._features.end_step()
        self._steps += 1
        return builder.step(self._steps)

    def _next_budget(self) -> int:
        if self._divided_steps == 0:
            self._divisor = 1
            return self.limits.tokens
        self._divided_steps -= 1
        return max(1, self.limits.tokens // self._divisor)

    def _is_small(self, request: WaitingRequest) -> bool:
        small = self.limits.beside_small
        return small is not None and request.work <= small

    def _serve_oldest(self, builder: StepBuilder) -> bool:
        """Gives the oldest request its part, if it is due one. Returns whether it was."""
        part = self._share_of_oldest() * builder.room
        self._oldest_credit = min(self._oldest_credit + part, self.limits.tokens)
        if self._oldest_credit <= 0:
            return False
        while self._requests and builder.room > 0 and self._oldest_credit > -part:
            oldest, most = next(iter(self._requests.values())), math.ceil(self._oldest_credit + part)
            given = self._give(oldest, builder, most)
            if not given and builder.takes_oversized(oldest.request_id):
                self._next_partial = oldest
                given = self._continue_partial(builder, most)
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

    def _serve_in_order(self, builder: StepBuilder) -> None:
        misses = 0
        while builder.room > 0 and misses < _MAX_MISSES and (request := self._shares.first()) is not None:
            if self._give(request, builder):
                continue
            if self._passed_over is None:
                self._passed_over = request
            self._shares.hide(request)
            misses += 1
        if misses == _MAX_MISSES:
            self._serve_holders(builder)

    def _serve_holders(self, builder: StepBuilder) -> None:
        """Serves the requests that pictures of others wait for. They may rank behind all that were tried."""
        for request in self._features.holders():
            while request.work and builder.room > 0 and self._give(request, builder):
                pass

    def _serve_small(self, builder: StepBuilder) -> None:
        misses = 0
        while builder.room_for_small > 0 and misses < _MAX_MISSES and (request := self._shares.first()):
            is_small = builder.note(request.request_id, self._is_small(request))
            if not is_small or not self._give(request, builder):
                self._shares.hide(request)
                misses += 1
        self._shares.restore()

    def _take_last_pictures(self, builder: StepBuilder) -> None:
        """Takes the next request's last pictures: one pass of a tower takes less time than two."""
        request = self._shares.first()
        if request is None or request.work > self.limits.tokens // 2:
            return
        if builder.may_have_more_images_of(request.request_id):
            while (image := self._features.take(request, None, self._oldest())) is not None:
                self._add(request, image, builder)

    def _fill_gap(self, builder: StepBuilder) -> bool:
        """Fills room that nothing fits into. Returns whether it could."""
        if self._partial is None and self._next_partial is not None:
            return self._give(self._next_partial, builder) > 0
        return self._continue_partial(builder) > 0

    def _give(self, request: WaitingRequest, builder: StepBuilder, most: int = sys.maxsize) -> int:
        """Adds the part of a request that best uses the room, with at most `most` tokens of a split sequence.
        Returns its cost in tokens, 0 if nothing fits."""
        builder.note(request.request_id, self._is_small(request))
        if request is self._partial and (given := self._continue_partial(builder, most)):
            return given
        room, takes_sequence = builder.room_of(request.request_id), builder.takes_sequence(request.request_id)
        part: Part | None = None
        if takes_sequence:
            part = request.take(room)
        elif builder.takes_beside(request.request_id, ImageJob):
            part = request.take_cached(room)
        if part is None and takes_sequence and self._may_split(request) and request.start_partial():
            self._partial = request
            self._next_partial = None
            return self._continue_partial(builder, most)
        if part is None and builder.takes_beside(request.request_id, Chunk):
            part = self._features.take(request, room, self._oldest())
        if part is None and builder.takes_oversized(request.request_id):
            part = self._take_oversized(request, takes_sequence)
        return 0 if part is None else self._add(request, part, builder)

    def _may_split(self, request: WaitingRequest) -> bool:
        reserved = self._next_partial
        # A reserved request that waits for pictures does not count: it may wait for features that others
        # hold.
        is_reserved = reserved is not None and reserved is not request and reserved.has_sequence
        return self.limits.chunked and self._partial is None and not is_reserved

    def _take_oversized(self, request: WaitingRequest, may_be_sequence: bool) -> Part | None:
        """Takes a part above the whole budget that cannot be split."""
        sequence = request.take_longest() if may_be_sequence and not self.limits.chunked else None
        if sequence is not None:
            return sequence
        image = self._features.take(request, None, self._oldest())
        return request.take_cached() if image is None else image

    def _add(self, request: WaitingRequest, part: Part, builder: StepBuilder) -> int:
        match part:
            case CachedBatch():
                self.waiting_cached -= 1
                given = builder.add(part)
            case ImageJob():
                given = builder.add(part)
            case TokenSequence():
                self.waiting_sequences -= 1
                given = builder.add(Chunk(part, part.shared_prefix_len, len(part)))
        self._account(request, given)
        return given

    def _continue_partial(self, builder: StepBuilder, most: int = sys.maxsize) -> int:
        """Adds at most `most` tokens of the sequence that is mid-prefill. Returns how many."""
        request = self._partial
        if request is None or request.partial is None:
            return 0
        builder.note(request.request_id, self._is_small(request))
        given = builder.lengthen(*request.partial, most)
        if not given:
            return 0
        sequence = request.partial[0]
        if request.advance(given):
            self._partial = None
            self.waiting_sequences -= 1
            given += sequence.scoring
        self._account(request, given)
        return given

    def _account(self, request: WaitingRequest, given: int) -> None:
        self.waiting_tokens -= given
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


class ServiceRate:
    """The tokens per second of a device with enough work: an average over steps, in which newer ones count
    more. Steps of less than half of `budget` tokens do not count."""

    def __init__(self, budget: int) -> None:
        self._least = budget / 2
        self._tokens = 0.0
        self._seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        if tokens < self._least or seconds <= 0:
            return
        remaining = 0.5 ** (seconds / _HALF_LIFE)
        self._tokens = self._tokens * remaining + tokens
        self._seconds = self._seconds * remaining + seconds

    @property
    def tokens_per_second(self) -> float | None:
        """None until a step was at least half full."""
        return self._tokens / self._seconds if self._seconds else None

    def seconds(self, tokens: int) -> float | None:
        """The time for that many tokens; None until the rate is known."""
        rate = self.tokens_per_second
        return None if rate is None else tokens / rate


class WaitErrors:
    """By how much waits exceed their forecasts, by size class. A forecast knows only the work that already
    waits: smaller requests that come later pass large ones, and not every step is full. Newer waits count
    more, and without new ones forecasts are trusted again."""

    def __init__(self) -> None:
        # By size class: seconds forecast, seconds waited, and the time of the last wait.
        self._seen: dict[int, tuple[float, float, float]] = {}

    def observe(self, tokens: int, forecast: float, waited: float, now: float) -> None:
        before = self._since(tokens, now)
        self._seen[tokens.bit_length()] = before[0] + forecast, before[1] + max(0.0, waited), now

    def factor(self, tokens: int, now: float) -> float:
        """The factor that corrects a forecast for a request of `tokens`: at least 1."""
        forecast, waited = self._since(tokens, now)
        times = (waited + _TRUSTED_SECONDS) / (forecast + _TRUSTED_SECONDS)
        return max(1.0, min(_MOST_TIMES, times))

    def _since(self, tokens: int, now: float) -> tuple[float, float]:
        forecast, waited, seen = self._seen.get(tokens.bit_length(), (0.0, 0.0, now))
        remaining = 0.5 ** (max(0.0, now - seen) / _HALF_LIFE)
        return forecast * remaining, waited * remaining


class StepTimes:
    """An upper bound of a step's time, from the latest steps: no longer than any of them for as many tokens
    or fewer, and in proportion for more."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, float]] = deque(maxlen=_LATEST_STEPS)

    def observe(self, tokens: int, seconds: float) -> None:
        self._latest.append((tokens, seconds))

    def most_seconds(self, tokens: int) -> float | None:
        """The longest time for a step of `tokens`; None before the first step."""
        return min((seconds * max(1.0, tokens / each) for each, seconds in self._latest), default=None)
