"""The door to the engine: which requests may come in, by what they cost and by what waits already.

A request is looked at before it is prepared, again when a thread begins to prepare it, and once its tokens
are counted. Without `max_wait_seconds` it waits for a permit instead, before it is prepared. How a step is
filled is not decided here.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from maxsimd.engine.actors.scheduler import SchedulerActor
from maxsimd.engine.errors import EngineDeadError, QueueFullError, RequestTooLargeError
from maxsimd.engine.metrics import EngineMetrics
from maxsimd.engine.requests import EmbedRequest, RunOptions, ScoreRequest, Values
from maxsimd.engine.scoring.scorer import EXPLAINED, ScoringPrice
from maxsimd.engine.tenants import TenantLimits
from maxsimd.pooling.vectors import Vectors
from maxsimd.scheduler import Share, WaitErrors
from maxsimd.scheduler.waiting import part_of, weight_of

# Any request may wait this many times as long as it runs (that of a batch longer), and this many steps, which
# are in flight or next: with less, next to nothing would be let in while the device is busy.
_WAITS_A_RUN, _WAITS_A_BATCH, _WAITED_STEPS = 1, 8, 2
# What takes longer than this by itself is a batch, whatever its priority: nobody sits and waits for it.
_BATCH_SECONDS = 5.0
# Requests of more than one step leave this share of the queue to smaller ones.
_KEPT_FOR_SMALL = 0.25
# Estimates may be this many times too low or too high. Who would be refused then once its tokens are counted
# is refused at once.
_ESTIMATED_WITHIN = 1.25
# Where requests wait for permits, at most this many have one. More bring nothing, because fewer threads
# prepare requests. Those that wait stay in order, and what is counted corrects their estimates.
_MOST_PREPARING = 32
# Tokens a character of text until some have been counted, and what each request leaves of those before it.
_FIRST_RATIO, _REMAINING = 0.25, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """What a queue takes: at most `queued_tokens` in all and `request_tokens` in a request, and no request
    whose wait is estimated at more than `wait_seconds`. If that is None, requests wait for a permit and none
    is refused for what waits. No sequence has more than `sequence_tokens`, and a step has `step_tokens`.
    Scoring costs what `scoring` says."""

    queued_tokens: int
    request_tokens: int
    wait_seconds: float | None
    sequence_tokens: int
    step_tokens: int
    scoring: ScoringPrice


class Permit:
    """A request's leave to be prepared, once it is `granted`. `tokens` is an estimate; the request is refused
    once it has a `refusal`."""

    def __init__(
        self, admission: "Admission", size: int, tokens: int, options: RunOptions, vector_tokens: int = 0
    ) -> None:
        """`tokens` includes `vector_tokens`, which are known; the rest is an estimate from the `size`."""
        self._admission = admission
        self._size = size
        self._vector_tokens = vector_tokens
        self._deadline = None if options.timeout is None else admission.clock() + options.timeout
        self.tokens = tokens
        self.timeout = options.timeout
        # What is to have a partial result need not be done in its time, only begun.
        self.must_be_done = options.on_timeout == "error"
        self.share: Share = options.share
        self.refusal: QueueFullError | None = None
        self.forecast: float | None = None

    async def granted(self) -> None:
        """Returns when the request may be prepared: at once, unless requests wait for their permits. Raises
        EngineDeadError if the engine ends before."""
        await self._admission.granted(self)

    @property
    def seconds_left(self) -> float | None:
        """Until its timeout; None where it has none."""
        return None if self._deadline is None else self._deadline - self._admission.clock()

    def check(self) -> None:
        """Raises QueueFullError if the queue has become full meanwhile. For the thread that prepares it."""
        if self.refusal is not None:
            raise self.refusal

    def confirm(self, tokens: int) -> None:
        """Asks for the queue, now that the tokens are counted. Raises QueueFullError and
        RequestTooLargeError."""
        self._admission.confirm(self, self._size, tokens, self._vector_tokens)

    def compare(self, values: asyncio.Future[Values]) -> None:
        """Has the wait that was forecast compared with when the values come, once the request is queued."""
        self._admission.compare(self, values)


@dataclass(slots=True, eq=False)
class _Group:
    """The waiting requests of one tenant and priority, first come first. `virtual_time` is what they have
    been granted, in tokens divided by their weight."""

    virtual_time: float
    number: int
    turns: OrderedDict[Permit, asyncio.Future[None]] = field(default_factory=OrderedDict)

    @property
    def first(self) -> Permit:
        return next(iter(self.turns))


class PermitQueue:
    """The requests that wait for their permits, and their order. Owned by `Admission`, which decides when
    there is room.

    Requests of one tenant and priority are served in the order in which they come. The group that has been
    granted least for its weight is next, as in the scheduler's `Shares` (start-time fair queueing). No
    request passes the next one, so large ones do not starve."""

    def __init__(self) -> None:
        self._groups: dict[Share, _Group] = {}
        # The start of the last request that was granted, and who was ahead of it when they left.
        self._now = 0.0
        self._ahead: dict[Share, float] = {}
        self._numbered = 0
        self._end: str | None = None

    def __len__(self) -> int:
        return sum(len(group.turns) for group in self._groups.values())

    def join(self, permit: Permit) -> asyncio.Future[None]:
        """Takes in a request, whose future is done when it is granted its permit. It fails with
        EngineDeadError at `close`, and this raises the same afterwards."""
        if self._end is not None:
            raise EngineDeadError(self._end)
        group = self._groups.get(permit.share)
        if group is None:
            start = max(self._now, self._ahead.pop(permit.share, 0.0))
            group = self._groups[permit.share] = _Group(start, self._numbered)
            self._numbered += 1
        turn = group.turns[permit] = asyncio.get_running_loop().create_future()
        return turn

    def leave(self, permit: Permit) -> None:
        """Forgets a request, if it waits."""
        group = self._groups.get(permit.share)
        if group is None or group.turns.pop(permit, None) is None or group.turns:
            return
        del self._groups[permit.share]
        if not self._groups:
            self._ahead.clear()
            self._now = 0.0
        elif group.virtual_time > self._now:
            self._ahead[permit.share] = group.virtual_time

    def firsts(self) -> list[Permit]:
        """The first request of each tenant and priority, the next one first."""
        ordered = sorted(self._groups.values(), key=lambda group: (group.virtual_time, group.number))
        return [group.first for group in ordered]

    def grant(self, permit: Permit, weights: Mapping[str, float]) -> bool:
        """Takes out the first request of a group and wakes it; says whether it still waited. A request that
        is cancelled in the same turn of the event loop does not."""
        group = self._groups[permit.share]
        turn = group.turns[permit]
        is_waiting = not turn.done()
        if is_waiting:
            turn.set_result(None)
            tenant, priority = permit.share
            together = sum(part_of(other) for name, other in self._groups if name == tenant)
            weight = weight_of(weights.get(tenant, 1.0), priority, together)
            self._now = max(self._now, group.virtual_time)
            group.virtual_time += permit.tokens / weight
            self._ahead = {share: time for share, time in self._ahead.items() if time > self._now}
        self.leave(permit)
        return is_waiting

    def close(self, reason: str) -> None:
        """Ends all waits with EngineDeadError, and refuses requests that come later."""
        self._end = reason
        for group in self._groups.values():
            for turn in group.turns.values():
                if not turn.done():
                    turn.set_exception(EngineDeadError(reason))
                    turn.exception()  # a request that is cancelled now never asks for it


class Admission:
    """Owned by `Running`, on the caller's event loop. A lone request is never refused for what waits. One
    that is dearer than a request may be, or takes longer than its own timeout, always is refused. Requests
    count in their tenant's rate unless they are refused for what waits, tokens once the request is let in.

    How much work it is that is being prepared cannot be known, because documents may be cached. It counts for
    those who come, by estimate, as what any request may wait for and no more: nobody is refused for it alone,
    and few are prepared and refused then."""

    def __init__(
        self,
        limits: AdmissionLimits,
        scheduler: SchedulerActor,
        metrics: EngineMetrics,
        tenants: TenantLimits,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self._limits = limits
        self._scheduler = scheduler
        self._metrics = metrics
        self._tenants = tenants
        # Those that wait for their permits, and those that have them: these are being prepared.
        self._waiting = PermitQueue()
        self._permits: set[Permit] = set()
        self._preparing_tokens = 0
        self._counted_tokens = _FIRST_RATIO
        self._counted_size = 1.0
        self._wait_errors = WaitErrors()
        self._gauges = (
            *(metrics.waiting_requests, metrics.preparing_requests),
            *(metrics.preparing_tokens, metrics.wait_seconds),
        )
        metrics.waiting_requests.set_function(lambda: len(self._waiting))
        metrics.preparing_requests.set_function(lambda: len(self._permits))
        metrics.preparing_tokens.set_function(lambda: self._preparing_tokens)
        metrics.wait_seconds.set_function(self._wait_of_a_step)

    def close(self) -> None:
        """Lets the metrics forget the door, and with it all that it leads to: 0 from now on."""
        for gauge in self._gauges:
            gauge.set_function(lambda: 0)

    @property
    def waiting_requests(self) -> int:
        """Requests that wait for their permits."""
        return len(self._waiting)

    async def run(self) -> None:
        """Grants permits as room comes free, until cancelled."""
        while True:
            await self._scheduler.changed.wait()
            self._scheduler.changed.clear()
            self._grant_permits()

    def end_waits(self, reason: str) -> None:
        """Ends all waits for permits with EngineDeadError: the engine has died, or was stopped."""
        self._waiting.close(reason)

    def check_rate(self, tenant: str) -> None:
        """Refuses a request that is not read yet, where its tenant has used up a rate."""
        refusal = self._tenants.request_refusal(tenant)
        if refusal is not None:
            self._metrics.tenants.count_request(tenant)
            self._count_refusal(tenant, refusal.reason)
            raise refusal

    @contextmanager
    def permit(self, request: ScoreRequest | EmbedRequest, options: RunOptions) -> Iterator[Permit]:
        """Leave to prepare a request and to queue it, once it is granted. Raises QueueFullError where too
        much waits."""
        vector_tokens = self._price_of_vectors(request)
        estimate = self._estimate(request) + vector_tokens
        permit = Permit(self, request.size, estimate, options, vector_tokens)
        tenant = options.tenant
        self._metrics.tenants.count_request(tenant)
        permit.refusal = self._tenants.request_refusal(tenant)
        if not self._waits:
            wait = self._wait_of_new(permit, estimate)
            permit.refusal = permit.refusal or self._refusal(permit, permit.tokens, wait, is_counted=False)
            self._enter(permit)
        self._tenants.charge_requests(tenant, 1)
        try:
            permit.check()
            yield permit
        except QueueFullError as error:
            self._tenants.charge_requests(tenant, -1)
            self._count_refusal(tenant, error.reason)
            raise
        except RequestTooLargeError:
            self._count_refusal(tenant, "size")
            raise
        except (asyncio.CancelledError, EngineDeadError):
            if permit not in self._permits:  # it only waited
                self._tenants.charge_requests(tenant, -1)
            raise
        finally:
            self._waiting.leave(permit)
            if permit in self._permits:
                self._permits.remove(permit)
                self._preparing_tokens -= estimate
            if self._waiting:
                self._scheduler.changed.set()

    async def granted(self, permit: Permit) -> None:
        """See `Permit`."""
        if self._waits:
            turn = self._waiting.join(permit)
            self._grant_permits()
            await turn

    def confirm(self, permit: Permit, size: int, tokens: int, vector_tokens: int) -> None:
        """See `Permit`."""
        self._counted_size = self._counted_size * _REMAINING + size
        self._counted_tokens = self._counted_tokens * _REMAINING + max(0, tokens - vector_tokens)
        self._check_price(permit, tokens)
        permit.tokens, permit.forecast = tokens, self._forecast(permit, tokens)
        refusal = self._refusal(permit, tokens, self._wait(permit, tokens), is_counted=True)
        if refusal is not None:
            raise refusal
        self._tenants.charge_tokens(permit.share[0], tokens)

    def compare(self, permit: Permit, values: asyncio.Future[Values]) -> None:
        """See `Permit`."""
        forecast, run = permit.forecast, self._scheduler.rate.seconds(permit.tokens)
        step = self._scheduler.rate.seconds(self._limits.step_tokens)
        if not forecast or run is None or step is None or forecast < step or not permit.must_be_done:
            # Nothing is learnt where next to nothing waits, nor of what may end before it is done.
            return
        queued = self.clock()

        def observe(values: asyncio.Future[Values]) -> None:
            if not values.cancelled() and values.exception() is None:
                now = self.clock()
                self._wait_errors.observe(permit.tokens, forecast, now - queued - run, now)

        values.add_done_callback(observe)

    def _count_refusal(self, tenant: str, reason: str) -> None:
        self._metrics.refused.labels(reason).inc()
        self._metrics.tenants.count_refusal(tenant, reason)

    def review(self) -> None:
        """Refuses requests that are not prepared yet and came while there was room that others have taken."""
        if self._waits:
            return
        waits: dict[tuple[Share, int], float | None] = {}
        for permit in self._permits:
            if permit.refusal is None:
                like = (permit.share, permit.tokens.bit_length())
                if like not in waits:
                    waits[like] = self._wait(permit, permit.tokens)
                permit.refusal = self._refusal(permit, permit.tokens, waits[like], is_counted=False)

    @property
    def _waits(self) -> bool:
        """Whether requests wait for their permits, and none is refused for what waits."""
        return self._limits.wait_seconds is None

    def _enter(self, permit: Permit) -> None:
        self._permits.add(permit)
        self._preparing_tokens += permit.tokens

    def _grant_permits(self) -> None:
        """Lets in those that wait, one after the other, for as long as there is room for the next."""
        weights = self._tenants.weights if self._waiting else {}
        while (first := self._next_permit()) is not None and self._has_room(first):
            if self._waiting.grant(first, weights):
                # The tenant may have used up its rate since the request came.
                first.refusal = self._tenants.token_refusal(first.share[0])
                self._enter(first)

    def _next_permit(self) -> Permit | None:
        """The request that is let in next. A tenant above its own limit holds back no other, but its own."""
        held: set[str] = set()
        for permit in self._waiting.firsts():
            tenant = permit.share[0]
            if tenant not in held and self._tenant_has_room(permit):
                return permit
            held.add(tenant)
        return None

    def _has_room(self, permit: Permit) -> bool:
        """Whether the queue has room for a request. It always has for one that is alone, however large."""
        if len(self._permits) >= _MOST_PREPARING:
            return False
        used = self._scheduler.waiting_tokens + self._preparing_tokens
        return not used or used + permit.tokens <= self._most_queued(permit.tokens)

    def _tenant_has_room(self, permit: Permit) -> bool:
        """Whether a request's tenant may have it waiting; one that is alone it may."""
        tenant = permit.share[0]
        most = self._tenants[tenant].max_queued_tokens
        if most is None:
            return True
        used = sum(each.tokens for each in self._permits if each.share[0] == tenant)
        used += self._scheduler.waiting_of(tenant)
        return not used or used + permit.tokens <= most

    def _most_queued(self, tokens: int) -> int:
        """How many tokens may wait, with those of a request that has so many."""
        most = self._limits.queued_tokens
        return most if tokens <= self._limits.step_tokens else int(most * (1 - _KEPT_FOR_SMALL))

    def _refusal(
        self, permit: Permit, tokens: int, wait: float | None, *, is_counted: bool
    ) -> QueueFullError | None:
        """Why a request has to be refused that would `wait` that many seconds; None for one that need not.
        Before its tokens are counted only for what waits already."""
        waiting, wait_seconds = self._scheduler.waiting_tokens, self._limits.wait_seconds
        refusal = self._tenants.token_refusal(permit.share[0])
        if refusal is not None or wait_seconds is None or not waiting:
            return refusal
        if (refusal := self._tenant_refusal(permit, tokens, is_counted=is_counted)) is not None:
            return refusal
        most = self._most_queued(tokens)
        excess = waiting + (tokens if is_counted else 1) - most
        if excess > 0:
            return QueueFullError(
                f"{waiting} tokens wait already and this request has about {tokens}, together more than the "
                f"{most} that the queue has for requests of its size (max_queued_tokens); try again later",
                retry_after=max(1.0, self._scheduler.rate.seconds(excess) or 0.0),
                reason="queue",
            )
        run = self._scheduler.rate.seconds(tokens)
        if wait is None or run is None:
            return None
        steps = self._scheduler.rate.seconds(_WAITED_STEPS * self._limits.step_tokens) or 0.0
        is_batch = permit.share[1] > 0 or run > _BATCH_SECONDS
        waits = _WAITS_A_BATCH if is_batch else _WAITS_A_RUN
        longest = max(wait_seconds, waits * run, steps)
        if wait > longest:
            return QueueFullError(
                f"this request would wait for about {wait:.1f} seconds, more than the {longest:.1f} that it "
                "may (max_wait_seconds); try again later",
                retry_after=max(1.0, wait - longest),
                reason="wait",
            )
        needed, left = wait + (run if is_counted and permit.must_be_done else 0.0), permit.seconds_left
        if left is not None and needed > left:
            return QueueFullError(
                f"this request would take about {needed:.1f} seconds with what waits before it, more than is "
                f"left of its timeout ({max(0.0, left):.1f}); try again later or allow more time",
                retry_after=max(1.0, needed - left),
                reason="timeout",
            )
        return None

    def _tenant_refusal(self, permit: Permit, tokens: int, *, is_counted: bool) -> QueueFullError | None:
        """Why the tenant may have no more waiting. As with the whole queue, what is lone is let in."""
        tenant = permit.share[0]
        most = self._tenants[tenant].max_queued_tokens
        waiting = 0 if most is None else self._scheduler.waiting_of(tenant)
        if most is None or not waiting:
            return None
        excess = waiting + (tokens if is_counted else 1) - most
        if excess <= 0:
            return None
        # Until then others are served too, by estimate as much as they have waiting beside it.
        beside = self._scheduler.waiting_tokens / waiting
        return QueueFullError(
            f"{waiting} tokens of the tenant {tenant!r} wait already and this request has about {tokens}, "
            f"together more than its max_queued_tokens of {most}; try again later, or have it raised",
            retry_after=max(1.0, self._scheduler.rate.seconds(round(excess * beside)) or 0.0),
            reason="queue",
        )

    def _check_price(self, permit: Permit, tokens: int) -> None:
        """Refuses what is too much by itself."""
        most, raised = self._limits.request_tokens, "raise max_request_tokens"
        own = self._tenants[permit.share[0]].max_request_tokens
        if own is not None and own < most:
            most, raised = own, f"have max_request_tokens of the tenant {permit.share[0]!r} raised"
        if tokens > most:
            raise RequestTooLargeError(
                f"this request has {tokens} tokens, more than the {most} that one may have; send it in "
                f"parts, let texts be cut shorter, or {raised}"
            )
        seconds, timeout = self._scheduler.rate.seconds(tokens), permit.timeout
        if permit.must_be_done and seconds is not None and timeout is not None and seconds > timeout:
            raise RequestTooLargeError(
                f"this request takes about {seconds:.1f} seconds by itself, more than its timeout of "
                f"{timeout:g}; allow more time or send fewer documents"
            )

    def _wait_of_new(self, permit: Permit, estimate: int) -> float | None:
        """About how many seconds a request would wait that is not prepared: the longest that it may be, since
        its tokens are an estimate, and behind what is being prepared. None where that is not known."""
        least, most = round(estimate / _ESTIMATED_WITHIN), round(estimate * _ESTIMATED_WITHIN)
        forecast = self._forecast(permit, most)
        if not forecast:
            return forecast
        now = self.clock()
        wait = forecast * max(self._wait_errors.factor(least, now), self._wait_errors.factor(most, now))
        before = min(self._preparing_tokens, _WAITED_STEPS * self._limits.step_tokens)
        return wait + (self._scheduler.rate.seconds(before) or 0.0)

    def _wait(self, permit: Permit, tokens: int) -> float | None:
        """About how many seconds a request of that many tokens would wait; None where that is not known."""
        forecast = self._forecast(permit, tokens)
        return forecast and forecast * self._wait_errors.factor(tokens, self.clock())

    def _forecast(self, permit: Permit, tokens: int) -> float | None:
        """The same, by what waits now and nothing else."""
        if not self._scheduler.waiting_tokens:
            return 0.0
        return self._scheduler.rate.seconds(self._scheduler.work_ahead(tokens, permit.share))

    def _wait_of_a_step(self) -> float:
        ahead = self._scheduler.work_ahead(self._limits.step_tokens, ("", 0))
        return self._scheduler.rate.seconds(ahead) or 0.0

    def _price_of_vectors(self, request: ScoreRequest | EmbedRequest) -> int:
        """Returns the price, in tokens, of scoring documents that were sent as embeddings, or of what is made
        of vectors. It is known before anything is prepared; a query that is a text counts as a usual one."""
        if isinstance(request, EmbedRequest):
            return request.more_tokens
        times = 1 + EXPLAINED if request.explain else 1
        queries = [len(each) if isinstance(each, Vectors) else 1 for each in request.queries]
        rows = [
            self._limits.scoring.rows(queries[request.query_of(i)], len(document), times)
            for i, document in enumerate(request.documents)
            if isinstance(document, Vectors)
        ]
        return self._limits.scoring.tokens(sum(rows), len(rows)) if rows else 0

    def _estimate(self, request: ScoreRequest | EmbedRequest) -> int:
        """About how many tokens there will be."""
        tokens = round(request.size * self._counted_tokens / self._counted_size)
        if not request.truncation.windows:
            tokens = min(tokens, request.num_texts * self._limits.sequence_tokens)
        return max(1, tokens)
