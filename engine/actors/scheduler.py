"""The actor that owns the queue and the open requests, and the watchdog over the device."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from maxsimd.engine.actors.actor import (
    Actor,
    ChooseStep,
    DropRequest,
    EndEarly,
    Mailbox,
    OpenRequest,
    RunnerMessage,
    SchedulerMessage,
    SetWeights,
    StepEnding,
    StepReport,
)
from maxsimd.engine.actors.turns import Turn
from maxsimd.engine.errors import RequestFailedError
from maxsimd.engine.metrics import EngineMetrics
from maxsimd.engine.requests import Value
from maxsimd.engine.scoring.scorer import RequestFailure
from maxsimd.scheduler import ResultSlot, Scheduler, ServiceRate, Share, Step, StepTimes

log = logging.getLogger(__name__)

# The next step is chosen when this share of the current step's time is left, within these bounds in seconds.
_SHARE_LEFT, _LEAST_LEFT, _MOST_LEFT = 0.25, 0.005, 0.02
# One message for all documents: there may be thousands.
_TOO_LARGE = "the numbers of its embedding or its query's are too large for a finite score; normalize them"
_TICK_SECONDS = 1.0
# A step that takes this many times longer than expected is stuck.
_BEYOND_EXPECTED = 20
# Before the first step is done the speed is unknown, and kernels may have to be compiled.
_BEYOND_TIMEOUT_AT_FIRST = 10


@dataclass(slots=True, eq=False)
class _InFlight:
    """A step on the device: its `work` in tokens, by tenant and by request, its unreported parts, and
    the `reported` work."""

    work: int
    parts_left: int
    tenants: dict[str, int]
    requests: dict[int, int]
    reported: int = 0


class SchedulerActor(Actor[SchedulerMessage]):
    """Owns the `Scheduler` and the open requests, and keeps up to `steps_in_flight` steps on the device.

    Others on its loop may read its properties, `rate`, `step_times` and `num_signs` (signs of life of the
    device), wait for `changed` and clear it, ask for `work_ahead` and `waiting_of`, and `post` requests. All
    else goes by message.
    """

    def __init__(
        self,
        mailbox: Mailbox[SchedulerMessage],
        scheduler: Scheduler,
        runner: Mailbox[RunnerMessage],
        steps_in_flight: int,
        metrics: EngineMetrics,
        precision: str = "float32",
    ) -> None:
        super().__init__(mailbox)
        self._not_finite = f"the model returned a number that is not finite in {precision}"
        other = "" if precision == "float32" else ", or load the model with dtype float32"
        self._not_finite += f"; leave this text out{other}"
        self._scheduler = scheduler
        self._runner = runner
        self._steps_in_flight = steps_in_flight
        self._metrics = metrics
        self._open: dict[int, OpenRequest] = {}
        # The steps on the device, and those in their last stage.
        self._in_flight: dict[int, _InFlight] = {}
        self._ending: set[int] = set()
        self._choose_at = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._posted: dict[int, OpenRequest] = {}
        self._posted_tokens = 0
        self._last_report = self._last_shared = 0.0
        self._shown = (-1, -1)  # waiting tokens and sequences in the metrics
        # Estimates since the last change, by share and size class.
        self._ahead: dict[tuple[Share, int], int] = {}
        small = scheduler.limits.beside_small
        # While small requests come, half of a short step is enough to tell the speed.
        self.rate = ServiceRate(scheduler.limits.tokens if small is None else small)
        # The rate of steps once they have their turn on a shared device.
        self.pace = ServiceRate(scheduler.limits.tokens if small is None else small)
        self.step_times = StepTimes()
        self.num_signs = 0
        # Set after each message, when fewer tokens may be waiting; cleared by the task that waits for it.
        self.changed = asyncio.Event()

    @property
    def waiting_tokens(self) -> int:
        """Tokens that wait for a step, posted requests included; cached documents at their price."""
        return self._scheduler.waiting_tokens + self._posted_tokens

    @property
    def waiting_sequences(self) -> int:
        return self._scheduler.waiting_sequences

    @property
    def waiting_cached(self) -> int:
        return self._scheduler.waiting_cached

    @property
    def open_requests(self) -> int:
        return len(self._open)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def running_work(self) -> int:
        """Unreported tokens on the device; cached documents at their price."""
        return sum(step.work - step.reported for step in self._in_flight.values())

    def work_ahead(self, tokens: int, share: Share) -> int:
        """About how many tokens run before the last one of a request of `tokens` that comes now, those on the
        device included. It is the same for requests of one size class."""
        like = (share, tokens.bit_length())
        if like not in self._ahead:
            posted = [(each.waiting.share, each.waiting.work) for each in self._posted.values()]
            ahead = self._scheduler.work_ahead(tokens, *share, coming=posted)
            self._ahead[like] = self.running_work + ahead
        return self._ahead[like]

    def waiting_of(self, tenant: str) -> int:
        posted = [each.waiting.work for each in self._posted.values() if each.options.tenant == tenant]
        return self._scheduler.waiting_of(tenant) + sum(posted)

    def post(self, message: OpenRequest) -> None:
        """Posts a request. Its tokens count as waiting at once. For senders on this actor's loop."""
        self._ahead.clear()
        self._posted[message.request_id] = message
        self._posted_tokens += message.waiting.work
        self.mailbox.tell(message)

    async def receive(self, message: SchedulerMessage) -> None:
        self._ahead.clear()
        match message:
            case OpenRequest():
                self._admit(message)
            case DropRequest():
                self._end(message.request_id)
            case EndEarly():
                if (request := self._end(message.request_id)) is not None:
                    request.finish()
            case SetWeights():
                self._scheduler.set_weights(message.weights)
            case StepEnding():
                self.num_signs += 1
                self._ending.add(message.step_id)
                self._choose_at = self._nearly_done(message.step_id)
            case ChooseStep():
                self._alarm = None
            case StepReport():
                self.num_signs += 1
                self._account(message)
        self._dispatch()
        self._show_queue()
        self.changed.set()

    def _show_queue(self) -> None:
        waiting = self._scheduler.waiting_tokens, self._scheduler.waiting_sequences
        if waiting != self._shown:
            self._shown = waiting
            self._metrics.queue_tokens.set(waiting[0])
            self._metrics.queue_sequences.set(waiting[1])

    def _admit(self, message: OpenRequest) -> None:
        request_id = message.request_id
        if self._posted.pop(request_id, None) is not None:
            self._posted_tokens -= message.waiting.work
        if message.future.done():  # cancelled before it got here
            return
        try:
            self._scheduler.enter(message.waiting)
        except ValueError as error:
            # Unreachable unless a sequence fits no step. Then its request alone fails.
            log.exception("request %d cannot be run", request_id)
            message.future.set_exception(RequestFailedError(f"this request cannot be run: {error}"))
            return
        self._open[request_id] = message
        if not message.missing:  # no document can be read
            self._resolve(request_id, 0.0)

    def _end(self, request_id: int) -> OpenRequest | None:
        """Forgets a request here and on the device. Returns it if it was open."""
        request = self._open.pop(request_id, None)
        if request is not None:
            self._scheduler.cancel(request_id)
            self._runner.post(DropRequest(request_id))
        return request

    def _dispatch(self) -> None:
        """Chooses the next step when all steps on the device are in their last stage and nearly done: late,
        so that new requests can still be in it, but in time to keep the device busy."""
        while len(self._ending) == len(self._in_flight) < self._steps_in_flight:
            early = self._choose_at - time.perf_counter()
            if self._in_flight and early > 0:
                if self._alarm is None:
                    loop = asyncio.get_running_loop()
                    self._alarm = loop.call_later(early, self.mailbox.tell, ChooseStep())
                return
            step = self._scheduler.schedule()
            if step is None:
                return
            work = step.num_tokens + step.other_price
            requests = self._work_by_request(step)
            tenants = self._work_by_tenant(requests)
            self._in_flight[step.step_id] = _InFlight(work, step.num_parts, tenants, requests)
            self._metrics.step_tokens.observe(step.num_tokens)
            self._metrics.step_sequences.observe(len(step.chunks))
            for request_id in step.request_ids:
                if (request := self._open.get(request_id)) is not None:
                    request.begin()
            self._runner.post(step)

    def _nearly_done(self, step_id: int) -> float:
        """The time (perf_counter) to choose the step after one in its last stage. On a GPU that is at once: a
        step takes no longer than an alarm may be late."""
        now = time.perf_counter()
        step = self._in_flight[step_id]
        expected = self.pace.seconds(step.work - step.reported)
        if self._scheduler.limits.beside_small is None or expected is None:
            return now
        return now + expected - min(max(_SHARE_LEFT * expected, _LEAST_LEFT), _MOST_LEFT)

    def _work_by_request(self, step: Step) -> dict[int, int]:
        work: dict[int, int] = {}
        parts = [(chunk.sequence.request_id, len(chunk) + chunk.scoring) for chunk in step.chunks]
        others = [(part.request_id, part.price) for part in step.others]
        for request_id, tokens in [*parts, *others]:
            work[request_id] = work.get(request_id, 0) + tokens
        return {request_id: tokens for request_id, tokens in work.items() if request_id in self._open}

    def _work_by_tenant(self, requests: dict[int, int]) -> dict[str, int]:
        work: dict[str, int] = {}
        for request_id, tokens in requests.items():
            tenant = self._open[request_id].options.tenant
            work[tenant] = work.get(tenant, 0) + tokens
        return work

    def _share_time(self, step: _InFlight, seconds: float) -> None:
        """Divides the time of a step, or of a stage of it, among its requests, by their work; shares of those
        that have ended are lost. Time that two steps overlap counts once."""
        if seconds <= 0:
            return
        now = time.perf_counter()
        new, self._last_shared = min(seconds, now - self._last_shared), now
        whole = sum(step.requests.values())
        for request_id, work in step.requests.items():
            if (request := self._open.get(request_id)) is not None:
                request.device_seconds += new * work / whole

    def _account(self, report: StepReport) -> None:
        step = self._in_flight[report.step_id]
        self._share_time(step, report.seconds)
        step.parts_left -= report.num_parts
        step.reported += report.num_tokens + report.other_price
        self._metrics.tokens.inc(report.num_tokens)
        if report.device_seconds is not None:
            self._metrics.device_seconds.inc(report.device_seconds)
        if step.parts_left <= 0:
            del self._in_flight[report.step_id]
            self._ending.discard(report.step_id)
            self._measure(step.reported, report.seconds, report.waited)
            for tenant, work in step.tenants.items():
                self._metrics.tenants.count_tokens(tenant, work)
        if report.out_of_memory:
            log.warning("the device ran out of memory; steps are smaller for a while")
            self._scheduler.reduce_budget()
        for failure in report.failures:
            self._lose(failure)
        for slot, value in report.results:
            self._store(slot, value)
        for request_id in dict.fromkeys(slot.request_id for slot, _ in report.results):
            self._resolve(request_id, report.score_seconds)

    def _measure(self, work: int, seconds: float, waited: float) -> None:
        """Measures a step's speed. The rate counts the time since the last report, for steps that overlap,
        and waits for other models, since the next steps will wait too."""
        now = time.perf_counter()
        since, self._last_report = now - self._last_report, now
        if work and seconds > 0:
            self._metrics.step_seconds.observe(seconds)
            self.rate.observe(work, min(seconds + waited, since))
            self.pace.observe(work, min(seconds, since))
            self.step_times.observe(work, seconds)

    def _store(self, slot: ResultSlot, value: Value) -> None:
        request = self._open.get(slot.request_id)
        if request is None:
            return
        index = slot.index
        if request.store(index, value):
            return
        refusal = request.refusal_of(index)
        if request.give_up((index,), self._not_finite if refusal is None else _TOO_LARGE):
            self._resolve(request.request_id, 0.0)
        elif refusal is not None:
            self._end(request.request_id)
            request.fail(refusal)
        else:
            self._fail(request.request_id, self._not_finite, value=index)

    def _lose(self, failure: RequestFailure) -> None:
        """Fails a request that cannot be completed, or marks its values as failed."""
        request = self._open.get(failure.request_id)
        if request is None:
            return
        if failure.indexes and request.give_up(failure.indexes, failure.reason):
            if failure.sequence_id is not None:
                self._scheduler.drop_sequence(failure.request_id, failure.sequence_id)
            self._resolve(failure.request_id, 0.0)
        else:
            only = failure.indexes[0] if len(failure.indexes) == 1 else None
            self._fail(failure.request_id, failure.reason, value=only)

    def _resolve(self, request_id: int, score_seconds: float) -> None:
        """Reports a request's progress, and finishes it once no value is missing."""
        request = self._open.get(request_id)
        if request is None:
            return
        request.score_seconds += score_seconds
        raised = request.tell_progress()
        if raised is not None:
            self._fail(request_id, f"the progress callback failed: {raised!r}", raised)
        elif not request.missing:
            if request.errors:  # the device may hold state for the failed parts
                self._end(request_id)
            else:
                del self._open[request_id]
            request.finish()

    def _fail(
        self, request_id: int, reason: str, cause: BaseException | None = None, value: int | None = None
    ) -> None:
        """Fails a request. `value` is the index of a value that is not finite, if that is why."""
        request = self._end(request_id)
        if request is not None:
            log.error("request %d failed: %s", request_id, reason)
            error = RequestFailedError(reason, value)
            error.__cause__ = cause
            request.fail(error)


class StuckDeviceError(Exception):
    """The steps on the device have made no progress for far longer than steps take."""


class Watchdog:
    """Raises StuckDeviceError once the steps on the device give no sign of life for `timeout` seconds and
    many times their expected time; never if `timeout` is 0.

    It counts its own ticks, each at its nominal length: time in which this event loop did not run (a machine
    that slept, a stopped process) proves nothing. Other models' turns on the device do not count either.
    `stacks` describes the threads' stacks, for the error."""

    def __init__(
        self,
        timeout: float,
        scheduler: SchedulerActor,
        stacks: Callable[[], str],
        turn: Turn | None = None,
    ) -> None:
        self._timeout = timeout
        self._scheduler = scheduler
        self._stacks = stacks
        self._turn = turn
        self._num_signs = 0
        self._seconds = 0.0

    @property
    def allowance(self) -> float:
        """Seconds that the steps on the device may take without progress."""
        if self._timeout == 0:
            return math.inf
        expected = self._scheduler.step_times.most_seconds(self._scheduler.running_work)
        if expected is None:
            return _BEYOND_TIMEOUT_AT_FIRST * self._timeout
        return max(self._timeout, _BEYOND_EXPECTED * expected)

    async def run(self) -> None:
        seconds = min(_TICK_SECONDS, self._timeout / 10)
        while seconds:
            await asyncio.sleep(seconds)
            self.tick(seconds)

    def tick(self, seconds: float) -> None:
        """Checks the device, `seconds` after the last check."""
        if self._scheduler.in_flight == 0 or self._scheduler.num_signs != self._num_signs:
            self._num_signs, self._seconds = self._scheduler.num_signs, 0.0
            return
        if self._turn is not None and self._turn.is_anothers:
            self._seconds = 0.0
            return
        self._seconds += seconds
        if self._seconds >= self.allowance:
            stuck = StuckDeviceError(f"a step has made no progress for {self._seconds:.0f} seconds")
            stuck.add_note(self._stacks())
            raise stuck
