"""The door to the engine: which requests may come in, by what they cost and by what waits already.

A request is looked at before it is prepared, again when a thread begins to prepare it, and once its tokens
are counted. How a step is filled is not decided here.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from maxsimd.engine.actors.scheduler import SchedulerActor
from maxsimd.engine.errors import QueueFullError, RequestTooLargeError
from maxsimd.engine.metrics import EngineMetrics
from maxsimd.engine.requests import EmbedRequest, RunOptions, ScoreRequest, Values
from maxsimd.engine.scoring.price import EXPLAINED, ScoringPrice
from maxsimd.engine.tenants import TenantLimits
from maxsimd.pooling.vectors import Vectors
from maxsimd.scheduler import Share, WaitErrors

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
# Tokens a character of text until some have been counted, and what each request leaves of those before it.
_FIRST_RATIO, _REMAINING = 0.25, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """What a queue takes: at most `queued_tokens` in all and `request_tokens` in a request, and no request
    whose wait is estimated at more than `wait_seconds`. No sequence has more than `sequence_tokens`, and a
    step has `step_tokens`. Scoring costs what `scoring` says."""

    queued_tokens: int
    request_tokens: int
    wait_seconds: float
    sequence_tokens: int
    step_tokens: int
    scoring: ScoringPrice


class Permit:
    """A request's leave to be prepared. `tokens` is an estimate; the request is refused once it has a
    `refusal`."""

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
        self._permits: set[Permit] = set()
        self._preparing_tokens = 0
        self._counted_tokens = _FIRST_RATIO
        self._counted_size = 1.0
        self._wait_errors = WaitErrors()
        self._gauges = (metrics.preparing_requests, metrics.preparing_tokens, metrics.wait_seconds)
        metrics.preparing_requests.set_function(lambda: len(self._permits))
        metrics.preparing_tokens.set_function(lambda: self._preparing_tokens)
        metrics.wait_seconds.set_function(self._wait_of_a_step)

    def close(self) -> None:
        """Lets the metrics forget the door, and with it all that it leads to: 0 from now on."""
        for gauge in self._gauges:
            gauge.set_function(lambda: 0)

    def check_rate(self, tenant: str) -> None:
        """Refuses a request that is not read yet, where its tenant has used up a rate."""
        refusal = self._tenants.request_refusal(tenant)
        if refusal is not None:
            self._metrics.tenants.count_request(tenant)
            self._count_refusal(tenant, refusal.reason)
            raise refusal

    @contextmanager
    def permit(self, request: ScoreRequest | EmbedRequest, options: RunOptions) -> Iterator[Permit]:
        """Leave to prepare a request and to queue it. Raises QueueFullError where too much waits."""
        vector_tokens = self._price_of_vectors(request)
        estimate = self._estimate(request) + vector_tokens
        permit = Permit(self, request.size, estimate, options, vector_tokens)
        tenant = options.tenant
        self._metrics.tenants.count_request(tenant)
        wait = self._wait_of_new(permit, estimate)
        permit.refusal = self._tenants.request_refusal(tenant)
        permit.refusal = permit.refusal or self._refusal(permit, permit.tokens, wait, is_counted=False)
        self._permits.add(permit)
        self._preparing_tokens += estimate
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
        finally:
            self._permits.remove(permit)
            self._preparing_tokens -= estimate

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
        waits: dict[tuple[Share, int], float | None] = {}
        for permit in self._permits:
            if permit.refusal is None:
                like = (permit.share, permit.tokens.bit_length())
                if like not in waits:
                    waits[like] = self._wait(permit, permit.tokens)
                permit.refusal = self._refusal(permit, permit.tokens, waits[like], is_counted=False)

    def _refusal(
        self, permit: Permit, tokens: int, wait: float | None, *, is_counted: bool
    ) -> QueueFullError | None:
        """Why a request has to be refused that would `wait` that many seconds; None for one that need not.
        Before its tokens are counted only for what waits already."""
        waiting = self._scheduler.waiting_tokens
        refusal = self._tenants.token_refusal(permit.share[0])
        if refusal is not None or not waiting:
            return refusal
        if (refusal := self._tenant_refusal(permit, tokens, is_counted=is_counted)) is not None:
            return refusal
        most = self._limits.queued_tokens
        if tokens > self._limits.step_tokens:
            most = int(most * (1 - _KEPT_FOR_SMALL))
        excess = waiting + (tokens if is_counted else 1) - most
        if excess > 0:
            return QueueFullError(
                f"{waiting} tokens wait already and this request has about {tokens}, together more than the "
                f"{most} that the queue has for requests of its size; try again later",
                retry_after=max(1.0, self._scheduler.rate.seconds(excess) or 0.0),
                reason="queue",
            )
        run = self._scheduler.rate.seconds(tokens)
        if wait is None or run is None:
            return None
        steps = self._scheduler.rate.seconds(_WAITED_STEPS * self._limits.step_tokens) or 0.0
        is_batch = permit.share[1] > 0 or run > _BATCH_SECONDS
        waits = _WAITS_A_BATCH if is_batch else _WAITS_A_RUN
        longest = max(self._limits.wait_seconds, waits * run, steps)
        if wait > longest:
            return QueueFullError(
                f"this request would wait for about {wait:.1f} seconds, more than the {longest:.1f} that it "
                "may; try again later",
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
