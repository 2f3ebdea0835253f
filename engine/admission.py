"""Admission: which requests may come in, by their cost and by the work that already waits.

A request is checked before it is prepared, when a thread starts to prepare it, and once its tokens are
counted. Without `max_wait_seconds` it is not refused, but waits for a permit before it is prepared.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from maxsimd.engine.actors.scheduler import SchedulerActor
from maxsimd.engine.errors import EngineDeadError, QueueFullError, RequestTooLargeError
from maxsimd.engine.metrics import EngineMetrics
from maxsimd.engine.requests import EmbedRequest, LabelRequest, RunOptions, ScoreRequest, Values
from maxsimd.engine.scoring.scorer import EXPLAINED, ScoringPrice
from maxsimd.engine.tenants import TenantLimits
from maxsimd.pooling.vectors import Vectors
from maxsimd.scheduler import Share, WaitErrors, WaitingRequest
from maxsimd.scheduler.waiting import part_of, weight_of

# Any request may wait this many times its own run time (batch requests longer), and this many steps: the
# steps in flight and the next one. With less, a busy device would let nearly nothing in.
_WAITS_PER_RUN, _WAITS_PER_BATCH, _WAITED_STEPS = 1, 8, 2
# Requests that take longer than this count as batch, whatever their priority: nobody waits at a screen for
# them.
_BATCH_SECONDS = 5.0
# Requests of more than one step leave this share of the queue to smaller ones.
_KEPT_FOR_SMALL = 0.25
# Largest share of the queue that one request counts for when it waits for a permit. Smaller requests are
# prepared and run beside a large one; a second large one has no room.
_MOST_COUNTED = 0.5
# Estimates may be too low or too high by this factor. A request that the count would refuse even then is
# refused at once.
_ESTIMATED_WITHIN = 1.25
# At most this many requests hold permits where requests wait for them. More would not help: fewer threads
# prepare requests. Those that wait stay in order, and every count improves their estimates.
_MOST_PREPARING = 32
# Tokens per character until some are counted, and how much of the older counts each new one keeps.
_FIRST_RATIO, _REMAINING = 0.25, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """The limits of a queue, in tokens: `queued_tokens` in all, `request_tokens` per request,
    `sequence_tokens` per sequence, `step_tokens` per step. Requests whose estimated wait exceeds
    `wait_seconds` are refused; with None they wait for a permit instead. `scoring` prices scoring."""

    queued_tokens: int
    request_tokens: int
    wait_seconds: float | None
    sequence_tokens: int
    step_tokens: int
    scoring: ScoringPrice


@dataclass(slots=True, eq=False)
class Permit:
    """A request that may be prepared once its permit is granted. Owned by `Admission`.

    `tokens` is an estimate from the request's `size` until `Admission.confirm`. It includes `vector_tokens`,
    which are exact. A request with a `refusal` is refused when it is next checked."""

    size: int
    tokens: int
    vector_tokens: int
    options: RunOptions
    deadline: float | None
    share: Share
    refusal: QueueFullError | None = None
    forecast: float | None = None

    @property
    def tenant(self) -> str:
        return self.options.tenant

    @property
    def must_finish(self) -> bool:
        """Whether all of it must be done before the deadline. Partial requests only have to start."""
        return self.options.on_timeout == "error"

    def check(self) -> None:
        """Raises QueueFullError if the queue has become full. Called by the thread that prepares it."""
        if self.refusal is not None:
            raise self.refusal


@dataclass(slots=True, eq=False)
class _Group:
    """The waiting requests of one tenant and priority, in order of arrival. `virtual_time` is the tokens
    granted to them divided by their weight."""

    virtual_time: float
    turns: OrderedDict[Permit, asyncio.Future[None]] = field(default_factory=OrderedDict)


class PermitQueue:
    """The requests that wait for permits, in order. Owned by `Admission`, which decides when there is room.

    Requests of one tenant and priority are served first come, first served. The next group is the one that
    has been granted least for its weight, as in the scheduler's `Shares` (start-time fair queueing). No
    request passes the next one, so large requests do not starve."""

    def __init__(self) -> None:
        self._groups: dict[Share, _Group] = {}
        # The start of the last granted request, and the virtual times of groups that left ahead of the
        # others.
        self._now = 0.0
        self._ahead: dict[Share, float] = {}
        self._end: str | None = None

    def __len__(self) -> int:
        return sum(len(group.turns) for group in self._groups.values())

    def join(self, permit: Permit) -> asyncio.Future[None]:
        """Adds a request. The returned future is done when its permit is granted. It raises EngineDeadError
        at `close`, and so does this after `close`."""
        if self._end is not None:
            raise EngineDeadError(self._end)
        group = self._groups.get(permit.share)
        if group is None:
            start = max(self._now, self._ahead.pop(permit.share, 0.0))
            group = self._groups[permit.share] = _Group(start)
        turn = group.turns[permit] = asyncio.get_running_loop().create_future()
        return turn

    def leave(self, permit: Permit) -> None:
        """Removes a request if it waits."""
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
        """The first request of each group, the next one first."""
        ordered = sorted(self._groups.values(), key=lambda group: group.virtual_time)
        return [next(iter(group.turns)) for group in ordered]

    def grant(self, permit: Permit, weights: Mapping[str, float]) -> bool:
        """Removes the first request of a group and wakes it. Returns whether it still waited; it may have
        been cancelled in the same turn of the event loop."""
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
        """Ends all waits with EngineDeadError, and refuses later requests."""
        self._end = reason
        for group in self._groups.values():
            for turn in group.turns.values():
                if not turn.done():
                    turn.set_exception(EngineDeadError(reason))
                    turn.exception()  # marks it as retrieved, for a request that is cancelled now


class Admission:
    """Admits requests for `Running`, on the caller's event loop.

    A lone request is never refused for waiting work. Requests above `max_request_tokens`, or longer than
    their own timeout, are always refused. A request counts towards its tenant's request rate unless waiting
    work refuses it; its tokens count once it is admitted.

    The cost of a request is unknown until the cache has been checked. Until then, new requests see an
    estimate, capped at the wait that any request is allowed: it refuses nobody alone, and few requests are
    prepared in vain."""

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
        # Requests that wait for permits, and requests that have one and are being prepared.
        self._waiting = PermitQueue()
        self._permits: set[Permit] = set()
        self._preparing_tokens = 0
        # Queued requests that count as fewer tokens than they have.
        self._large: set[WaitingRequest] = set()
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
        """Detaches the gauges, which would keep this alive. They are 0 from now on."""
        for gauge in self._gauges:
            gauge.set_function(lambda: 0)

    @property
    def waiting_requests(self) -> int:
        return len(self._waiting)

    async def run(self) -> None:
        """Grants permits when room becomes free, until cancelled."""
        while True:
            await self._scheduler.changed.wait()
            self._scheduler.changed.clear()
            self._grant_permits()

    def end_waits(self, reason: str) -> None:
        """Ends all waits for permits with EngineDeadError."""
        self._waiting.close(reason)

    def check_rate(self, tenant: str) -> None:
        """Raises QueueFullError if a tenant has used up a rate, before its request is read."""
        refusal = self._tenants.request_refusal(tenant)
        if refusal is not None:
            self._metrics.tenants.count_request(tenant)
            self._count_refusal(tenant, refusal.reason)
            raise refusal

    @contextmanager
    def permit(
        self, request: ScoreRequest | EmbedRequest | LabelRequest, options: RunOptions
    ) -> Iterator[Permit]:
        """The permit of a request while it is prepared. Raises QueueFullError if too much waits."""
        vector_tokens = self._price_of_vectors(request)
        estimate = self._estimate(request) + vector_tokens
        deadline = None if options.timeout is None else self.clock() + options.timeout
        permit = Permit(request.size, estimate, vector_tokens, options, deadline, options.share)
        tenant = options.tenant
        self._metrics.tenants.count_request(tenant)
        permit.refusal = self._tenants.request_refusal(tenant)
        if not self._waits:
            wait = self._wait_of_new(permit, estimate)
            permit.refusal = permit.refusal or self._refusal(permit, permit.tokens, wait, is_counted=False)
            self._enter(permit)
        self._tenants.charge(tenant, "requests_per_minute", 1)
        try:
            permit.check()
            yield permit
        except QueueFullError as error:
            self._tenants.charge(tenant, "requests_per_minute", -1)
            self._count_refusal(tenant, error.reason)
            raise
        except RequestTooLargeError:
            self._count_refusal(tenant, "size")
            raise
        except (asyncio.CancelledError, EngineDeadError):
            if permit not in self._permits:  # it only waited
                self._tenants.charge(tenant, "requests_per_minute", -1)
            raise
        finally:
            self._waiting.leave(permit)
            if permit in self._permits:
                self._permits.remove(permit)
                self._preparing_tokens -= estimate
            if self._waiting:
                self._scheduler.changed.set()

    async def until_granted(self, permit: Permit) -> None:
        """Waits for the permit, if requests do. Raises EngineDeadError if the engine ends before."""
        if self._waits:
            turn = self._waiting.join(permit)
            self._grant_permits()
            await turn

    def confirm(self, permit: Permit, tokens: int) -> None:
        """Admits a request once its tokens are counted. Raises QueueFullError and RequestTooLargeError."""
        self._counted_size = self._counted_size * _REMAINING + permit.size
        self._counted_tokens = self._counted_tokens * _REMAINING + max(0, tokens - permit.vector_tokens)
        self._check_price(permit, tokens)
        permit.tokens, permit.forecast = tokens, self._forecast(permit, tokens)
        refusal = self._refusal(permit, tokens, self._wait(permit, tokens), is_counted=True)
        if refusal is not None:
            raise refusal
        self._tenants.charge(permit.tenant, "tokens_per_minute", tokens)

    def compare(self, permit: Permit, values: asyncio.Future[Values]) -> None:
        """Compares the forecast with the real wait once the values of a queued request arrive. Skips requests
        that may end early, and short queues."""
        forecast, run = permit.forecast, self._scheduler.rate.seconds(permit.tokens)
        step = self._scheduler.rate.seconds(self._limits.step_tokens)
        if not forecast or run is None or step is None or forecast < step or not permit.must_finish:
            return
        queued = self.clock()

        def observe(values: asyncio.Future[Values]) -> None:
            if not values.cancelled() and values.exception() is None:
                now = self.clock()
                self._wait_errors.observe(permit.tokens, forecast, now - queued - run, now)

        values.add_done_callback(observe)

    def note_large(self, request: WaitingRequest, values: asyncio.Future[Values]) -> None:
        """Keeps a part of the queue for others while a large request is queued, until its values arrive."""
        if self._waits and request.work > self._counted(request.work):
            self._large.add(request)
            values.add_done_callback(lambda _: self._large.discard(request))

    def review(self) -> None:
        """Refuses requests that are not prepared yet, if others have taken the room for them."""
        if self._waits:
            return
        waits: dict[tuple[Share, int], float | None] = {}
        for permit in self._permits:
            if permit.refusal is None:
                like = (permit.share, permit.tokens.bit_length())
                if like not in waits:
                    waits[like] = self._wait(permit, permit.tokens)
                permit.refusal = self._refusal(permit, permit.tokens, waits[like], is_counted=False)

    def _count_refusal(self, tenant: str, reason: str) -> None:
        self._metrics.refused.labels(reason).inc()
        self._metrics.tenants.count_refusal(tenant, reason)

    @property
    def _waits(self) -> bool:
        """Whether requests wait for permits, and waiting work refuses none."""
        return self._limits.wait_seconds is None

    def _enter(self, permit: Permit) -> None:
        self._permits.add(permit)
        self._preparing_tokens += permit.tokens

    def _grant_permits(self) -> None:
        """Grants permits in order while there is room for the next request."""
        weights = self._tenants.weights if self._waiting else {}
        while (first := self._next_permit()) is not None and self._has_room(first):
            if self._waiting.grant(first, weights):
                # The tenant may have used up its rate since the request came.
                first.refusal = self._tenants.token_refusal(first.tenant)
                self._enter(first)

    def _next_permit(self) -> Permit | None:
        """The next request to admit. A tenant above its own limit holds back only its own requests."""
        held: set[str] = set()
        for permit in self._waiting.firsts():
            tenant = permit.tenant
            if tenant not in held and self._tenant_has_room(permit):
                return permit
            held.add(tenant)
        return None

    def _has_room(self, permit: Permit) -> bool:
        """Whether the queue has room for a request. It always has room for a lone one, however large."""
        if len(self._permits) >= _MOST_PREPARING:
            return False
        tokens = [*(each.tokens for each in self._permits), *(each.work for each in self._large)]
        excess = sum(each - self._counted(each) for each in tokens)
        used = self._scheduler.waiting_tokens + self._preparing_tokens - excess
        return not used or used + self._counted(permit.tokens) <= self._most_queued(permit.tokens)

    def _counted(self, tokens: int) -> int:
        """The part of the queue that a request of `tokens` takes up for others that wait for permits."""
        if tokens <= self._limits.step_tokens:
            return tokens
        return min(tokens, max(1, int(self._limits.queued_tokens * _MOST_COUNTED)))

    def _tenant_has_room(self, permit: Permit) -> bool:
        """Whether a request fits its tenant's limit. A tenant's lone request always does."""
        tenant = permit.tenant
        most = self._tenants[tenant].max_queued_tokens
        if most is None:
            return True
        used = sum(each.tokens for each in self._permits if each.tenant == tenant)
        used += self._scheduler.waiting_of(tenant)
        return not used or used + permit.tokens <= most

    def _most_queued(self, tokens: int) -> int:
        """The most tokens that may wait, including those of a request of `tokens`."""
        most = self._limits.queued_tokens
        return most if tokens <= self._limits.step_tokens else int(most * (1 - _KEPT_FOR_SMALL))

    def _refusal(
        self, permit: Permit, tokens: int, wait: float | None, *, is_counted: bool
    ) -> QueueFullError | None:
        """Why a request that would `wait` so many seconds is refused, or None. Before its tokens are counted,
        only waiting work counts."""
        waiting, wait_seconds = self._scheduler.waiting_tokens, self._limits.wait_seconds
        refusal = self._tenants.token_refusal(permit.tenant)
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
        waits = _WAITS_PER_BATCH if is_batch else _WAITS_PER_RUN
        longest = max(wait_seconds, waits * run, steps)
        if wait > longest:
            return QueueFullError(
                f"this request would wait for about {wait:.1f} seconds, more than the {longest:.1f} that it "
                "may (max_wait_seconds); try again later",
                retry_after=max(1.0, wait - longest),
                reason="wait",
            )
        needed = wait + (run if is_counted and permit.must_finish else 0.0)
        left = math.inf if permit.deadline is None else permit.deadline - self.clock()
        if needed > left:
            return QueueFullError(
                f"this request would take about {needed:.1f} seconds with what waits before it, more than is "
                f"left of its timeout ({max(0.0, left):.1f}); try again later or allow more time",
                retry_after=max(1.0, needed - left),
                reason="timeout",
            )
        return None

    def _tenant_refusal(self, permit: Permit, tokens: int, *, is_counted: bool) -> QueueFullError | None:
        """Why a request does not fit its tenant's limit, or None. A tenant's lone request always fits."""
        tenant = permit.tenant
        most = self._tenants[tenant].max_queued_tokens
        waiting = 0 if most is None else self._scheduler.waiting_of(tenant)
        if most is None or not waiting:
            return None
        excess = waiting + (tokens if is_counted else 1) - most
        if excess <= 0:
            return None
        # Meanwhile others are served too, in proportion to their waiting work.
        beside = self._scheduler.waiting_tokens / waiting
        return QueueFullError(
            f"{waiting} tokens of the tenant {tenant!r} wait already and this request has about {tokens}, "
            f"together more than the {most} that it may have; try again later, or have max_queued_tokens "
            "of the tenant raised",
            retry_after=max(1.0, self._scheduler.rate.seconds(round(excess * beside)) or 0.0),
            reason="queue",
        )

    def _check_price(self, permit: Permit, tokens: int) -> None:
        """Raises RequestTooLargeError for a request that is too large by itself."""
        most, raised = self._limits.request_tokens, "raise max_request_tokens"
        own = self._tenants[permit.tenant].max_request_tokens
        if own is not None and own < most:
            most, raised = own, f"have max_request_tokens of the tenant {permit.tenant!r} raised"
        if tokens > most:
            raise RequestTooLargeError(
                f"this request has {tokens} tokens, more than the {most} that one may have; send it in "
                f"parts, truncate texts to fewer tokens, or {raised}"
            )
        seconds, timeout = self._scheduler.rate.seconds(tokens), permit.options.timeout
        if permit.must_finish and seconds is not None and timeout is not None and seconds > timeout:
            raise RequestTooLargeError(
                f"this request takes about {seconds:.1f} seconds by itself, more than its timeout of "
                f"{timeout:g}; allow more time or send fewer documents"
            )

    def _wait_of_new(self, permit: Permit, estimate: int) -> float | None:
        """Upper estimate, in seconds, of the wait of a new request: its tokens are an estimate, and requests
        that are being prepared come before it. None if the speed is unknown."""
        least, most = round(estimate / _ESTIMATED_WITHIN), round(estimate * _ESTIMATED_WITHIN)
        forecast = self._forecast(permit, most)
        if not forecast:
            return forecast
        now = self.clock()
        wait = forecast * max(self._wait_errors.factor(least, now), self._wait_errors.factor(most, now))
        before = min(self._preparing_tokens, _WAITED_STEPS * self._limits.step_tokens)
        return wait + (self._scheduler.rate.seconds(before) or 0.0)

    def _wait(self, permit: Permit, tokens: int) -> float | None:
        """The estimated wait of a request of `tokens`, in seconds; None if the speed is unknown."""
        forecast = self._forecast(permit, tokens)
        return forecast and forecast * self._wait_errors.factor(tokens, self.clock())

    def _forecast(self, permit: Permit, tokens: int) -> float | None:
        """The same from waiting work alone, without the correction by earlier errors."""
        if not self._scheduler.waiting_tokens:
            return 0.0
        return self._scheduler.rate.seconds(self._scheduler.work_ahead(tokens, permit.share))

    def _wait_of_a_step(self) -> float:
        ahead = self._scheduler.work_ahead(self._limits.step_tokens, ("", 0))
        return self._scheduler.rate.seconds(ahead) or 0.0

    def _price_of_vectors(self, request: ScoreRequest | EmbedRequest | LabelRequest) -> int:
        """The price, in tokens, of scoring documents that were sent as embeddings, or of work on vectors. It
        is known before anything is prepared; a text query counts as an average one."""
        if isinstance(request, EmbedRequest):
            return request.more_tokens
        if isinstance(request, LabelRequest) or not request.has_vectors:
            return 0
        times = 1 + EXPLAINED if request.explain else 1
        queries = [len(each) if isinstance(each, Vectors) else 1 for each in request.queries]
        rows = [
            self._limits.scoring.rows(queries[request.query_of(i)], len(document), times)
            for i, document in enumerate(request.documents)
            if isinstance(document, Vectors)
        ]
        return self._limits.scoring.tokens(sum(rows), len(rows))

    def _estimate(self, request: ScoreRequest | EmbedRequest | LabelRequest) -> int:
        tokens = round(request.size * self._counted_tokens / self._counted_size)
        if isinstance(request, LabelRequest) or not request.truncation.windows:
            tokens = min(tokens, request.num_texts * self._limits.sequence_tokens)
        return max(1, tokens)
