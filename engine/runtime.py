"""What exists only while an engine runs: threads, actors, and the supervisor who ends them together."""

import asyncio
import gc
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, TypeAlias, TypeVar

from maxsimd.engine.actors.actor import Actor, Admit, Cancel, EndEarly, Mailbox, SchedulerMessage, SetWeights
from maxsimd.engine.actors.runner import RunnerActor, is_device_error
from maxsimd.engine.actors.scheduler import SchedulerActor, StuckDeviceError, Watchdog
from maxsimd.engine.actors.scoring import PoolingActor, ScoringActor
from maxsimd.engine.actors.turns import Turn
from maxsimd.engine.admission import Admission, AdmissionLimits
from maxsimd.engine.cache import EmbeddingCache
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.facts import facts_of
from maxsimd.engine.device.host import tokenizer_threads, usable_cores
from maxsimd.engine.device.load import DeviceModel, load_device_model, load_on_thread
from maxsimd.engine.device.shared import Seat
from maxsimd.engine.device.stores import open_score_cache
from maxsimd.engine.device.thread import Device, DeviceThread, num_left_behind, stacks
from maxsimd.engine.errors import (
    EngineDeadError,
    EngineNotReadyError,
    RequestFailedError,
    RequestTimeoutError,
)
from maxsimd.engine.execution.devices import beside_small_requests
from maxsimd.engine.metrics import DeviceStats, EngineMetrics, EngineStats
from maxsimd.engine.processors.processor import (
    Plan,
    PlanT,
    PrefixSharing,
    Processor,
    ProcessorContext,
    RequestIds,
    RequestT,
)
from maxsimd.engine.processors.registry import Processors, check_room
from maxsimd.engine.processors.text.builder import LengthLimits
from maxsimd.engine.requests import EmbedRequest, RunOptions, ScoreRequest, Timings, Value, Values
from maxsimd.engine.scoring.maxsim import MaxSim, choose_maxsim_spans, maxsim_apart_avx512
from maxsimd.engine.scoring.scorer import DocumentScorer, ScoringPrice
from maxsimd.engine.scoring.similarity import Hybrid
from maxsimd.engine.tenants import TenantLimits
from maxsimd.engine.workers import WithdrawnError, WorkerPool, take_short_slices
from maxsimd.scheduler import Scheduler, StepLimits, WaitingRequest

log = logging.getLogger(__name__)

# How long each of an engine's threads is waited for where a stuck device may keep it.
STUCK_SECONDS = 2.0


def end_threads(
    device: Device, pool: WorkerPool, cache: EmbeddingCache | None, seconds: float | None
) -> None:
    """Ends all threads and waits for that: briefly, where the device has not ended within `seconds`.

    It knows nothing of the model, so that the thread which calls this does not hold it."""
    if device.close(seconds):
        seconds = None
    else:
        log.error("the device's thread is stuck; it is left behind, and holds its model until it goes on")
        seconds = STUCK_SECONDS
    pool.close(seconds)
    if cache is not None:
        cache.close(seconds)


async def call_in_thread(function: Callable[[], object]) -> None:
    """Calls a function that blocks in a thread, or on this event loop if the interpreter is about to end and
    starts no thread."""
    try:
        call = asyncio.get_running_loop().run_in_executor(None, function)
    except RuntimeError:
        function()
    else:
        await call


log = logging.getLogger(__name__)

T = TypeVar("T")

# With the work of this many full steps waiting, the device is not idle soon if the next requests come slowly.
_ENOUGH_STEPS = 2
# About as many characters as are tokenised in half a millisecond.
_AT_ONCE = 2048
# Seconds within which they are for certain.
_MOMENT = 0.1
# Called with the values of a request that have come, None for the others, whenever some have.
ValuesArrived: TypeAlias = Callable[[PlanT, list[Value | None]], None]
# Told of an engine's death: the reason, and what stands against another start in this process, if anything.
Died = Callable[[str, str | None], None]


def _comparing(device_model: DeviceModel) -> MaxSim:
    """MaxSim, or what scores all embeddings of a text together."""
    model = device_model.model
    if model.similarity != "hybrid":
        return device_model.maxsim
    return Hybrid(model.hybrid_weights, device_model.maxsim)


class DeviceActors:
    """The actors of the device's loop, wired to each other; `mailbox` is the door to them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        device_model: DeviceModel,
        scheduler: Mailbox[SchedulerMessage],
        turn: Turn | None = None,
    ) -> None:
        model = device_model.model
        scorer = DocumentScorer(
            model.similarity,
            _comparing(device_model),
            device_model.device,
            device_model.scored_in,
            takes_int8=device_model.maxsim_name == "triton",
            maxsim_apart=maxsim_apart_avx512 if device_model.maxsim_name == "avx512" else None,
            maxsim_spans=choose_maxsim_spans(device_model.maxsim_name),
            cache=device_model.cache,
        )
        scoring = ScoringActor(Mailbox(loop), scorer, len(model.labels))
        pooling = PoolingActor(Mailbox(loop), device_model.pooler)
        runner = RunnerActor(
            Mailbox(loop),
            device_model.runner,
            pooling.mailbox,
            scoring.mailbox,
            scheduler,
            device_model.cache,
            device_model.device,
            turn=turn,
        )
        self.mailbox = runner.mailbox
        self._device_model = device_model
        self._scorer = scorer
        self._cut_sequences = runner.cut_sequences
        self._actors: list[Actor[Any]] = [runner, pooling, scoring]

    def stats(self) -> DeviceStats:
        """What the actors hold. May be read from any thread."""
        cache = self._device_model.cache
        return DeviceStats(
            queries=len(self._scorer.queries),
            documents=len(self._scorer.windows),
            cut_sequences=len(self._cut_sequences),
            prefill_kv=self._device_model.runner.num_prefill_kv,
            features=self._device_model.runner.num_features,
            pooling_states=self._device_model.pooler.num_states,
            staged_embeddings=0 if cache is None else cache.num_staged,
        )

    async def run(self) -> None:
        """Runs until cancelled; raises when an actor dies."""
        async with asyncio.TaskGroup() as group:
            for actor in self._actors:
                group.create_task(actor.run())


class Running:
    """Everything that exists only while an engine runs; complete when made.

    Raises ModelLoadError where not even the shortest sequence of some kind can be run."""

    # While this is being closed and requests are waited for: until when.
    _grace: asyncio.Timeout | None = None

    def __init__(
        self,
        config: EngineConfig,
        metrics: EngineMetrics,
        device: Device,
        device_model: DeviceModel,
        died: Died,
        tenants: TenantLimits,
    ) -> None:
        model = device_model.model
        budget = device_model.step_tokens
        self.tokenizer = device_model.tokenizer
        check_room(model, self.tokenizer, budget, device_model.runner.chunked)
        self.device_model = device_model
        self._metrics = metrics
        # Of embeddings, or of scores where documents are not encoded by themselves.
        self.cache = device_model.cache if device_model.cache is not None else open_score_cache(config, model)
        metrics.watch(self.cache)
        self._sequence_ids: Iterator[int] = count()
        self._request_ids: Iterator[int] = count()
        self._most_tokens = config.max_request_tokens
        self._num_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._pool = WorkerPool(
            config.tokenizer_threads
            or tokenizer_threads(device_model.device.type, config.threads or usable_cores().threads),
            take_short_slices,
            lambda: self.scheduler.waiting_tokens > _ENOUGH_STEPS * budget,
        )
        self.max_tokens = model.max_tokens if device_model.runner.chunked else min(model.max_tokens, budget)
        self.facts = facts_of(device_model, self.max_tokens)
        shares = device_model.runner.chunked and config.prefix_sharing == "auto"
        length_limits = LengthLimits(
            min(model.max_tokens, self.max_tokens),
            config.window_overlap,
            model.truncation_side,
            config.max_vectors,
        )
        self.processors = Processors(
            ProcessorContext(
                model,
                self.tokenizer,
                length_limits,
                self.cache,
                PrefixSharing(device_model.launch_tokens) if shares else None,
                device_model.calibration,
            )
        )
        small = beside_small_requests(budget, device_model.device)
        limits = StepLimits(budget, config.max_batch_sequences, device_model.runner.chunked, small)
        self._device = device
        self._died = died
        self._reason = "the engine was stopped"
        self._awaited: set[asyncio.Future[Values]] = set()
        self._cache_dir = config.cache_dir
        self._process, loop = os.getpid(), asyncio.get_running_loop()
        self._loop = loop
        mailbox: Mailbox[SchedulerMessage] = Mailbox(loop)
        actors = self._actors = DeviceActors(device.loop, device_model, mailbox, device.turn)
        policy = Scheduler(limits, weights=tenants.weights)
        self.scheduler = SchedulerActor(
            mailbox,
            policy,
            actors.mailbox,
            config.steps_in_flight,
            metrics,
            device_model.dtype_name,
        )
        self._tenants = tenants
        admission_limits = _admission_limits(config, self.max_tokens, budget, model)
        self.admission = Admission(admission_limits, self.scheduler, metrics, tenants)
        self._watchdog = Watchdog(config.step_timeout_seconds, self.scheduler, stacks, device.turn)
        self._is_stuck = False
        self._supervisor = asyncio.create_task(self._supervise(actors), name="maxsimd-supervisor")

    async def run(
        self,
        processor: Processor[RequestT, PlanT],
        request: RequestT,
        options: RunOptions,
        arrived: ValuesArrived[PlanT] | None = None,
    ) -> tuple[PlanT, Values]:
        """Has the processor prepare a request in the thread pool, queues it and waits for its values.

        `arrived` and `options.progress` are called on this loop whenever some have come. Raises
        QueueFullError, RequestTooLargeError and RequestTimeoutError; when it is cancelled, so is its work.
        A request with `on_timeout` "partial" times out only while it is device_model."""
        self._check_caller()
        options = self._tenants.applied(options)
        with self._new_request() as ids:
            try:
                return await self._run(ids, processor, request, options, arrived)
            except TimeoutError:
                self._abandon(ids.request_id)
                assert options.timeout is not None
                raise RequestTimeoutError.after(options.timeout) from None
            except asyncio.CancelledError:
                self._abandon(ids.request_id)
                raise

    async def check_readable(self, request: ScoreRequest) -> None:
        """Prepares a request and leaves it at that. Raises InvalidRequestError and RequestTooLargeError."""
        ids = RequestIds(next(self._request_ids), self._sequence_ids, self._most_tokens)
        request = replace(request, skip_unreadable=False)
        await self.in_pool(lambda: self.processors.scores.prepare(request, ids), request.reading)

    def _check_caller(self) -> None:
        """Raises EngineNotReadyError where no answer would ever come: in a forked process, which has none of
        the engine's threads, and on another event loop."""
        if os.getpid() != self._process:
            raise EngineNotReadyError(
                "the engine runs in the process that this one was forked from; start one in each, and have "
                'processes started anew: multiprocessing.set_start_method("spawn")'
            )
        if asyncio.get_running_loop() is not self._loop:
            raise EngineNotReadyError(
                "the engine runs on another event loop, and each asyncio.run makes a new one: start and use "
                "it within one, or use SyncEngine"
            )

    def set_weights(self, tenants: Mapping[str, float]) -> None:
        """Changes the weights of tenants, for what waits already too."""
        self.scheduler.mailbox.tell(SetWeights(tenants))

    def stats(self) -> EngineStats:
        """What the engine holds at the moment."""
        return EngineStats(
            requests=self._num_inside,
            waiting_requests=self.admission.waiting_requests,
            open_requests=self.scheduler.open_requests,
            waiting_tokens=self.scheduler.waiting_tokens,
            waiting_sequences=self.scheduler.waiting_sequences,
            waiting_cached=self.scheduler.waiting_cached,
            steps_in_flight=self.scheduler.in_flight,
            device=self._actors.stats(),
        )

    async def close(self, grace: float | None) -> None:
        """Waits until all requests are done, for at most `grace` seconds, and frees everything."""
        try:
            async with asyncio.timeout(grace) as self._grace:
                await self._empty.wait()
        except TimeoutError:
            log.warning("stopping with %d requests unfinished when the grace is over", self._num_inside)
        finally:
            self._grace = None
            end = self._end_of_threads()
            free = asyncio.create_task(self._free(end))
            # The end of the event loop cancels all tasks, also one that has not begun.
            free.add_done_callback(lambda done: end() if done.cancelled() else None)
            await asyncio.shield(free)

    def shorten_grace(self, grace: float | None) -> None:
        """While this is being closed: gives the requests that are not done `grace` seconds from now, unless
        they have less."""
        if grace is None or self._grace is None or self._grace.expired():
            return
        end, until_now = self._loop.time() + grace, self._grace.when()
        if until_now is None or end < until_now:
            self._grace.reschedule(end)

    async def in_pool(self, function: Callable[[], T], size: int) -> T:
        """Runs something that blocks, and reads or writes about `size` characters, in the thread pool. When
        this is cancelled, the work is withdrawn. Raises EngineDeadError where the engine is stopped before it
        is done."""
        self._check_caller()
        work = self._pool.submit(function, size)
        try:
            return await asyncio.wrap_future(work.future)
        except WithdrawnError:
            raise EngineDeadError(self._reason) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                work.withdraw()
                raise
            raise EngineDeadError(self._reason) from None
        finally:
            del work  # it holds the error, which holds this frame

    async def _soon(self, function: Callable[[], T], size: int, timeout: float | None) -> T:
        """As `in_pool`, but a small request that is alone is prepared on this loop: to hand it to a thread
        and its result back takes as long as the work. Not where that may read from a disk, nor where the
        time may be up before it is done."""
        has_time = timeout is None or timeout > _MOMENT
        if size <= _AT_ONCE and has_time and self._num_inside == 1 and self._cache_dir is None:
            return function()
        return await self.in_pool(function, size)

    async def _free(self, end: Callable[[], None]) -> None:
        """Ends actors and threads, and closes the cache once nothing reads it any more."""
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)
        self._metrics.watch(None)
        self.admission.close()
        await call_in_thread(end)

    def _end_of_threads(self) -> Callable[[], None]:
        """Returns a function that ends the threads when it is first called. It holds nothing of the model."""
        allowed = self._watchdog.allowance
        seconds = STUCK_SECONDS if self._is_stuck else None if allowed == math.inf else allowed
        device, pool, cache = self._device, self._pool, self.device_model.cache
        begun = threading.Lock()

        def end() -> None:
            if begun.acquire(blocking=False):
                end_threads(device, pool, cache, seconds)

        return end

    async def _run(
        self,
        ids: RequestIds,
        processor: Processor[RequestT, PlanT],
        request: RequestT,
        options: RunOptions,
        arrived: ValuesArrived[PlanT] | None,
    ) -> tuple[PlanT, Values]:
        """Raises TimeoutError, where nothing of a partial result is wanted or there is nothing yet."""
        started = time.perf_counter()
        values: asyncio.Future[Values] | None = None
        plan: PlanT | None = None
        try:
            async with asyncio.timeout(options.timeout):
                plan, values, timings = await self._prepare_and_queue(
                    ids, processor, request, options, arrived
                )
                if options.on_timeout == "error":
                    return plan, self._noted((await values).with_preparation(timings), started)
            left = None if options.timeout is None else options.timeout - (time.perf_counter() - started)
            try:
                await asyncio.wait({values}, timeout=left)
            except asyncio.CancelledError:
                values.cancel()
                raise
            if not values.done():
                self.scheduler.mailbox.post(EndEarly(ids.request_id))
            return plan, self._noted((await values).with_preparation(timings), started)
        except RequestFailedError as error:
            if plan is None or error.value is None:
                raise
            raise RequestFailedError(f"{plan.input_of(error.value)}: {error}") from None
        finally:
            values = None  # it holds the error, which holds this frame

    def _noted(self, values: Values, started: float) -> Values:
        """The same; where the request's time went is noted once they are on their way."""
        self._loop.call_soon(self._metrics.note_request, values.timings, time.perf_counter() - started)
        return values

    async def _prepare_and_queue(
        self,
        ids: RequestIds,
        processor: Processor[RequestT, PlanT],
        request: RequestT,
        options: RunOptions,
        arrived: ValuesArrived[PlanT] | None,
    ) -> tuple[PlanT, asyncio.Future[Values], Timings]:
        """Returns when the request is queued; its values will be in the future."""
        came = time.perf_counter()
        with self.admission.permit(request, options) as permit:
            await self.admission.until_granted(permit)

            def check_and_prepare() -> tuple[PlanT, WaitingRequest, Timings]:
                permit.check()
                begun = time.perf_counter()
                plan = processor.prepare(request, ids)
                waiting = WaitingRequest(ids.request_id, options.share, options.on_timeout == "partial")
                waiting.add(plan.sequences, plan.cached, plan.images)
                timings = Timings(queue=begun - came, tokenise=time.perf_counter() - begun)
                return plan, waiting, timings

            plan, waiting, timings = await self._soon(check_and_prepare, request.reading, options.timeout)
            self._metrics.preprocess_seconds.observe(timings.queue + timings.tokenise)
            self._metrics.truncated.inc(plan.newly_truncated)
            more_tokens = request.more_tokens if isinstance(request, EmbedRequest) else 0
            self.admission.confirm(permit, waiting.work + more_tokens)
            values = self._queue(waiting, plan, options, None if arrived is None else partial(arrived, plan))
            if not more_tokens:  # that work comes after the steps, by which forecasts are made
                self.admission.compare(permit, values)
        self.admission.review()
        return plan, values, timings

    def _queue(
        self,
        request: WaitingRequest,
        plan: Plan,
        options: RunOptions,
        arrived: Callable[[list[Value | None]], None] | None,
    ) -> asyncio.Future[Values]:
        """Queues a request that is prepared; its values will be in the future."""
        values = self._future()
        self.scheduler.post(
            Admit(
                request=request,
                num_results=plan.num_values,
                options=options,
                values=values,
                arrived=arrived,
                refusal_of=plan.refusal_of,
            )
        )
        return values

    def _abandon(self, request_id: int) -> None:
        self._metrics.cancelled.inc()
        self.scheduler.mailbox.post(Cancel(request_id))

    @contextmanager
    def _new_request(self) -> Iterator[RequestIds]:
        """Covers a request from its arrival to its result, and gives it a number of its own."""
        self._num_inside += 1
        self._empty.clear()
        try:
            yield RequestIds(next(self._request_ids), self._sequence_ids, self._most_tokens)
        finally:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._empty.set()

    def _future(self) -> asyncio.Future[Values]:
        """A future for one request's values; it fails when the engine dies before they are there.

        Raises EngineDeadError when it has died already."""
        if self._supervisor.done():
            raise EngineDeadError(self._reason)
        future: asyncio.Future[Values] = asyncio.get_running_loop().create_future()
        self._awaited.add(future)
        future.add_done_callback(self._awaited.discard)
        return future

    async def _supervise(self, actors: DeviceActors) -> None:
        """Runs the actors of both loops; when one dies, all do, and callers get EngineDeadError."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.scheduler.run())
                group.create_task(self.admission.run())
                group.create_task(self._run_on_device(actors))
                group.create_task(self._watchdog.run())
        except* Exception as errors:
            cause = _first_cause(errors)
            self._reason = f"the engine has died: {cause!r}"
            log.critical("%s", self._reason, exc_info=cause)
            self._is_stuck = isinstance(cause, StuckDeviceError)
            self._died(self._reason, self._obstacle(cause))
            if self._is_stuck:
                self._device.declare_stuck()
        finally:
            self.admission.end_waits(self._reason)
            for future in list(self._awaited):
                if not future.done():
                    future.set_exception(EngineDeadError(self._reason))

    def _obstacle(self, cause: BaseException) -> str | None:
        """What stands against another start in this process after a death of this cause."""
        if self.device_model.device.type != "cpu" and is_device_error(cause):
            return "after an error of the GPU itself nothing runs on it in this process any more"
        if self._is_stuck and num_left_behind():
            return "the device is stuck again, and the thread that was stuck before still holds its model"
        return None

    async def _run_on_device(self, actors: DeviceActors) -> None:
        await asyncio.wrap_future(self._device.run(actors.run()))


def _admission_limits(
    config: EngineConfig, sequence_tokens: int, step_tokens: int, model: LoadedModel
) -> AdmissionLimits:
    return AdmissionLimits(
        queued_tokens=config.max_queued_tokens,
        request_tokens=config.max_request_tokens,
        wait_seconds=config.max_wait_seconds,
        sequence_tokens=sequence_tokens,
        step_tokens=step_tokens,
        scoring=ScoringPrice.of(model),
    )


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# Before another start, what the requests of an engine that died still do has this long to end.
_DEAD_SECONDS = 1.0
# How often is looked whether it is gone, before another is loaded beside it.
_MOST_LOOKS = 5


async def launch(config: EngineConfig, metrics: EngineMetrics, died: Died, tenants: TenantLimits) -> Running:
    """Loads the model on a thread of its own and starts the actors. Raises ModelLoadError."""
    device, device_model = await load_on_thread(lambda: load_device_model(config))
    try:
        return _running(config, metrics, device, device_model, died, tenants)
    except BaseException:
        device.close()
        raise


async def launch_beside(
    seat: Seat, config: EngineConfig, metrics: EngineMetrics, died: Died, tenants: TenantLimits
) -> Running:
    """The same on a device that others use: the model is loaded while they are served. Raises
    ModelLoadError."""
    try:
        device_model = await seat.load(config)
        return _running(config, metrics, seat, device_model, died, tenants)
    except asyncio.CancelledError:
        seat.leave()
        raise
    except BaseException:
        await asyncio.to_thread(seat.close)
        raise


def _running(
    config: EngineConfig,
    metrics: EngineMetrics,
    device: DeviceThread | Seat,
    device_model: DeviceModel,
    died: Died,
    tenants: TenantLimits,
) -> Running:
    """Starts the actors; the model's cache is closed where that fails."""
    try:
        return Running(config, metrics, device, device_model, died, tenants)
    except BaseException:
        if device_model.cache is not None:
            device_model.cache.close()
        raise


async def free_dead(dead: Running | None) -> None:
    """Frees what an engine that died has left, its model above all, before another is loaded. The caller must
    not hold it any more."""
    if dead is None:
        return
    await dead.close(_DEAD_SECONDS)
    is_there = weakref.ref(dead)
    del dead
    for _ in range(_MOST_LOOKS):
        gc.collect()
        if is_there() is None:
            return
        await asyncio.sleep(0.01)  # threads and callbacks that are about to end still know it


__all__ = ["Running", "ValuesArrived", "call_in_thread", "free_dead", "launch", "launch_beside"]
