"""The parts of a running engine: threads, actors, and the supervisor that ends them together."""

import asyncio
import gc
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, TypeAlias, TypeVar

from maxsimd.engine.actors.actor import Actor, DropRequest, EndEarly, Mailbox, OpenRequest, SchedulerMessage
from maxsimd.engine.actors.runner import PoolingActor, RunnerActor, ScoringActor, is_device_error
from maxsimd.engine.actors.scheduler import SchedulerActor, StuckDeviceError, Watchdog
from maxsimd.engine.actors.turns import Turn
from maxsimd.engine.admission import Admission, AdmissionLimits
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.facts import facts_of
from maxsimd.engine.device.host import tokenizer_threads, usable_cores
from maxsimd.engine.device.load import DeviceModel, load_device_model, load_on_thread
from maxsimd.engine.device.shared import Seat
from maxsimd.engine.device.stores import open_score_cache, open_texts
from maxsimd.engine.device.thread import Device, num_left_behind, stacks
from maxsimd.engine.errors import (
    EngineDeadError,
    EngineNotReadyError,
    RequestFailedError,
    RequestTimeoutError,
)
from maxsimd.engine.execution.devices import beside_small_requests
from maxsimd.engine.metrics import DeviceStats, EngineMetrics, EngineStats
from maxsimd.engine.processors.processor import (
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
from maxsimd.engine.scoring.maxsim import choose_maxsim_spans, maxsim_apart_avx512
from maxsimd.engine.scoring.scorer import DocumentScorer, ScoringPrice
from maxsimd.engine.scoring.similarity import Hybrid
from maxsimd.engine.tenants import TenantLimits
from maxsimd.engine.workers import WithdrawnError, WorkerPool
from maxsimd.scheduler import Scheduler, StepLimits, WaitingRequest

log = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds to wait for each of an engine's threads that a stuck device may keep.
_STUCK_SECONDS = 2.0
# With this many full steps of waiting work, the device has enough to do even if the next requests come
# slowly.
_ENOUGH_STEPS = 2
# Texts of this many characters are tokenized in about half a millisecond, and certainly within these seconds.
_SMALL_CHARACTERS, _SMALL_SECONDS = 2048, 0.1
# Before another start, the requests of an engine that died have this long to end.
_DEAD_SECONDS = 1.0
# Checks whether a dead engine is gone before another one loads.
_MOST_LOOKS = 5
# Called with a request's values whenever some have arrived; those that have not are None.
ValuesArrived: TypeAlias = Callable[[PlanT, list[Value | None]], None]
# Called when an engine dies, with the reason and the obstacle to another start in this process, if any.
Died = Callable[[str, str | None], None]


class DeviceActors:
    """The actors of the device's loop. `mailbox` is where they take steps."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        device_model: DeviceModel,
        scheduler: Mailbox[SchedulerMessage],
        turn: Turn | None = None,
    ) -> None:
        model, maxsim = device_model.model, device_model.maxsim
        scorer = DocumentScorer(
            model.similarity,
            Hybrid(model.hybrid_weights, maxsim) if model.similarity == "hybrid" else maxsim,
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
        """The state that the actors hold. May be read from any thread."""
        model = self._device_model
        return DeviceStats(
            queries=len(self._scorer.queries),
            documents=len(self._scorer.windows),
            cut_sequences=len(self._cut_sequences),
            prefill_kv=model.runner.num_prefill_kv,
            features=model.runner.num_features,
            pooling_states=model.pooler.num_states,
            staged_embeddings=0 if model.cache is None else model.cache.num_staged,
        )

    async def run(self) -> None:
        """Runs until cancelled; raises when an actor dies."""
        async with asyncio.TaskGroup() as group:
            for actor in self._actors:
                group.create_task(actor.run())


class Running:
    """The threads, actors and supervisor of an engine that runs.

    Raises ModelLoadError if not even the shortest sequence of some kind fits a step."""

    # While this is being closed: the end of the wait for open requests.
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
        model, budget = device_model.model, device_model.step_tokens
        chunked = device_model.runner.chunked
        self.tokenizer = device_model.tokenizer
        check_room(model, self.tokenizer, budget, chunked)
        self.device_model = device_model
        self._metrics = metrics
        # Holds embeddings, or scores for models that do not encode documents by themselves.
        self.cache = device_model.cache if device_model.cache is not None else open_score_cache(config, model)
        self.texts = open_texts(config)
        metrics.cache, metrics.texts = self.cache, self.texts
        self._sequence_ids: Iterator[int] = count()
        self._request_ids: Iterator[int] = count()
        self._most_tokens = config.max_request_tokens
        self._num_calls = self._num_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._pool = WorkerPool(
            config.tokenizer_threads
            or tokenizer_threads(device_model.device.type, config.threads or usable_cores().threads),
            lambda: self.scheduler.waiting_tokens > _ENOUGH_STEPS * budget,
        )
        self.max_tokens = model.max_tokens if chunked else min(model.max_tokens, budget)
        self.facts = facts_of(device_model, self.max_tokens)
        shares = chunked and config.prefix_sharing == "auto"
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
                device_model.scored_in,
                self.texts,
            )
        )
        self._device = device
        self._died = died
        self._reason = "the engine was stopped"
        self._awaited: set[asyncio.Future[Values]] = set()
        self._cache_dir = config.cache_dir
        self._process, self._loop = os.getpid(), asyncio.get_running_loop()
        mailbox: Mailbox[SchedulerMessage] = Mailbox(self._loop)
        actors = self._actors = DeviceActors(device.loop, device_model, mailbox, device.turn)
        small = beside_small_requests(budget, device_model.device)
        limits = StepLimits(budget, config.max_batch_sequences, chunked, small)
        self.scheduler = SchedulerActor(
            mailbox,
            Scheduler(limits, weights=tenants.weights),
            actors.mailbox,
            config.steps_in_flight,
            metrics,
            device_model.dtype_name,
        )
        self._tenants = tenants
        admission_limits = AdmissionLimits(
            queued_tokens=config.max_queued_tokens,
            request_tokens=config.max_request_tokens,
            wait_seconds=config.max_wait_seconds,
            sequence_tokens=self.max_tokens,
            step_tokens=budget,
            scoring=ScoringPrice.of(model),
        )
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
        """Prepares a request in the thread pool, queues it and waits for its values.

        `arrived` and `options.progress` are called on this loop when values arrive. Raises QueueFullError,
        RequestTooLargeError and RequestTimeoutError. A partial request times out only while it is prepared.
        Cancelling this cancels the work."""
        self._check_caller()
        options = self._tenants.applied(options)
        started = time.perf_counter()
        ids = RequestIds(next(self._request_ids), self._sequence_ids, self._most_tokens)
        values: asyncio.Future[Values] | None = None
        plan: PlanT | None = None
        self._num_inside += 1
        try:
            async with asyncio.timeout(options.timeout):
                plan, values, timings = await self._prepare_and_queue(
                    ids, processor, request, options, arrived
                )
                if options.on_timeout == "error":
                    await values
            if not values.done():
                left = None if options.timeout is None else options.timeout - (time.perf_counter() - started)
                try:
                    await asyncio.wait({values}, timeout=left)
                except asyncio.CancelledError:
                    values.cancel()
                    raise
            if not values.done():
                self.scheduler.mailbox.post(EndEarly(ids.request_id))
            result = (await values).with_preparation(timings)
            # Counted once the values are on their way.
            self._loop.call_soon(self._metrics.note_request, result.timings, time.perf_counter() - started)
            return plan, result
        except RequestFailedError as error:
            if plan is None or error.value is None:
                raise
            raise RequestFailedError(f"{plan.input_of(error.value)}: {error}") from None
        except (TimeoutError, asyncio.CancelledError) as error:
            self._metrics.cancelled.inc()
            self.scheduler.mailbox.post(DropRequest(ids.request_id))
            if options.timeout is None or isinstance(error, asyncio.CancelledError):
                raise
            raise RequestTimeoutError.after(options.timeout) from None
        finally:
            self._num_inside -= 1
            values = None  # it holds the error, which holds this frame

    async def read(self, read: Callable[[], T], request: ScoreRequest, options: RunOptions) -> T:
        """Reads a request, which takes part in others, once it may be prepared. Raises QueueFullError."""
        self._check_caller()
        with self.admission.permit(request, self._tenants.applied(options)) as permit:
            await self.admission.until_granted(permit)

            def check_and_read() -> T:
                permit.check()
                return read()

            return await self.in_pool(check_and_read, request.reading)

    async def check_readable(self, request: ScoreRequest) -> None:
        ids = RequestIds(next(self._request_ids), self._sequence_ids, self._most_tokens)
        request = replace(request, skip_unreadable=False)
        await self.in_pool(lambda: self.processors.scores.prepare(request, ids), request.reading)

    def stats(self) -> EngineStats:
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

    async def in_pool(self, function: Callable[[], T], size: int) -> T:
        """Runs a blocking function, which reads or writes about `size` characters, in the thread pool.
        Cancelling this withdraws the work. Raises EngineDeadError if the engine stops before it is done."""
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

    def check_loop(self) -> None:
        """Raises EngineNotReadyError while another event loop runs this."""
        if self._loop is not asyncio.get_running_loop() and not self._loop.is_closed():
            raise EngineNotReadyError("the engine runs on another event loop: stop it there")

    async def close(self, grace: float | None) -> None:
        """Waits at most `grace` seconds for open requests, then frees everything."""
        try:
            async with asyncio.timeout(grace) as self._grace:
                await self._empty.wait()
        except TimeoutError:
            log.warning("stopping with %d requests unfinished when the grace is over", self._num_calls)
        finally:
            self._grace = None
            end = self._end_of_threads()
            free = asyncio.create_task(self._free(end))
            # The end of the event loop cancels all tasks, also one that has not begun.
            free.add_done_callback(lambda done: end() if done.cancelled() else None)
            await asyncio.shield(free)

    def shorten_grace(self, grace: float | None) -> None:
        """While this is being closed: leaves open requests at most `grace` seconds from now."""
        if grace is None or self._grace is None or self._grace.expired():
            return
        end, until_now = self._loop.time() + grace, self._grace.when()
        if until_now is None or end < until_now:
            self._grace.reschedule(end)

    async def _free(self, end: Callable[..., None]) -> None:
        """Ends actors and threads, and then closes the cache."""
        self._supervisor.cancel()
        if not self._supervisor.done():  # the end of another event loop has ended it
            await asyncio.gather(self._supervisor, return_exceptions=True)
        self._metrics.cache = self._metrics.texts = None
        self.admission.close()
        await call_in_thread(partial(end, self._seconds_for_device()))

    def _seconds_for_device(self) -> float | None:
        """Seconds that the end waits for the device's thread; None for no limit."""
        allowed = self._watchdog.allowance
        return _STUCK_SECONDS if self._is_stuck else None if allowed == math.inf else allowed

    def _end_of_threads(self) -> Callable[..., None]:
        """A function that ends the threads when it is first called. It does not hold the model."""
        until_now = self._seconds_for_device()
        device, pool, cache, texts = self._device, self._pool, self.device_model.cache, self.texts
        begun = threading.Lock()

        def end(seconds: float | None = until_now) -> None:
            if not begun.acquire(blocking=False):
                return
            rest = None
            if not device.close(seconds):
                log.error(
                    "the device's thread is stuck; it is left behind, and holds its model until it goes on"
                )
                rest = _STUCK_SECONDS
            pool.close(rest)
            if cache is not None:
                cache.close(rest)
            if texts is not None:
                texts.close()

        return end

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

    async def _prepare_and_queue(
        self,
        ids: RequestIds,
        processor: Processor[RequestT, PlanT],
        request: RequestT,
        options: RunOptions,
        arrived: ValuesArrived[PlanT] | None,
    ) -> tuple[PlanT, asyncio.Future[Values], Timings]:
        """Returns when the request is queued, with a future of its values."""
        came = time.perf_counter()
        reading = request.reading
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

            # A small lone request is prepared on this loop, which is faster than handing it to a thread and
            # back. Not if that may read from a disk, or if the request may time out meanwhile.
            has_time = options.timeout is None or options.timeout > _SMALL_SECONDS
            is_small = reading <= _SMALL_CHARACTERS and has_time
            if is_small and self._num_inside == 1 and self._cache_dir is None:
                plan, waiting, timings = check_and_prepare()
            else:
                plan, waiting, timings = await self.in_pool(check_and_prepare, reading)
            self._metrics.preprocess_seconds.observe(timings.queue + timings.tokenise)
            self._metrics.truncated.inc(plan.truncated - plan.prior.truncated)
            more_tokens = request.more_tokens if isinstance(request, EmbedRequest) else 0
            self.admission.confirm(permit, waiting.work + more_tokens)
            values = self._future()
            self.scheduler.post(
                OpenRequest(
                    waiting,
                    plan.num_values,
                    options,
                    values,
                    None if arrived is None else partial(arrived, plan),
                    plan.refusal_of,
                )
            )
            self.admission.note_large(waiting, values)
            if not more_tokens:  # that work comes after the steps, and forecasts are of steps
                self.admission.compare(permit, values)
        self.admission.review()
        return plan, values, timings

    @contextmanager
    def open_call(self) -> Iterator[None]:
        """Counts a call until it has its answer, which is made of its requests' results. `close` waits for
        it, and so for the requests."""
        self._num_calls += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_calls -= 1
            if self._num_calls == 0:
                self._empty.set()

    def _future(self) -> asyncio.Future[Values]:
        """A future for a request's values, which fails when the engine dies. Raises EngineDeadError."""
        if self._supervisor.done():
            raise EngineDeadError(self._reason)
        future: asyncio.Future[Values] = asyncio.get_running_loop().create_future()
        self._awaited.add(future)
        future.add_done_callback(self._awaited.discard)
        return future

    async def _supervise(self, actors: DeviceActors) -> None:
        """Runs the actors of both loops. When one dies, all end, and callers get EngineDeadError."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.scheduler.run())
                group.create_task(self.admission.run())
                group.create_task(self._run_on_device(actors))
                group.create_task(self._watchdog.run())
        except* Exception as errors:
            cause: BaseException = errors
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            self._reason = f"the engine has died: {cause!r}"
            log.critical("%s", self._reason, exc_info=cause)
            self._is_stuck = isinstance(cause, StuckDeviceError)
            self._died(self._reason, self._restart_obstacle(cause))
            if self._is_stuck:
                self._device.declare_stuck()
        finally:
            self.admission.end_waits(self._reason)
            for future in list(self._awaited):
                if not future.done():
                    future.set_exception(EngineDeadError(self._reason))

    def _restart_obstacle(self, cause: BaseException) -> str | None:
        """Why another start in this process would not help after this death; None if it may."""
        if self.device_model.device.type != "cpu" and is_device_error(cause):
            return "after an error of the GPU itself nothing runs on it in this process any more"
        if self._is_stuck and num_left_behind():
            return "the device is stuck again, and the thread that was stuck before still holds its model"
        return None

    async def _run_on_device(self, actors: DeviceActors) -> None:
        await asyncio.wrap_future(self._device.run(actors.run()))


async def launch(
    config: EngineConfig, metrics: EngineMetrics, died: Died, tenants: TenantLimits, seat: Seat | None = None
) -> Running:
    """Loads the model and starts the actors: on a thread of its own, or on a seat of a shared device, which
    serves others meanwhile. Raises ModelLoadError."""
    used: Device | None = seat
    cache = None
    try:
        device: Device
        if seat is None:
            device, device_model = await load_on_thread(lambda: load_device_model(config))
        else:
            device, device_model = seat, await seat.load(config)
        used, cache = device, device_model.cache
        return Running(config, metrics, device, device_model, died, tenants)
    except BaseException as error:
        if cache is not None:
            cache.close()
        if seat is not None and isinstance(error, asyncio.CancelledError):
            seat.leave()
        elif used is not None:
            await asyncio.to_thread(used.close)
        raise


async def free_dead(dead: Running | None) -> None:
    """Frees what a dead engine has left, its model above all. The caller must not hold it."""
    if dead is None:
        return
    await dead.close(_DEAD_SECONDS)
    is_there = weakref.ref(dead)
    del dead
    for _ in range(_MOST_LOOKS):
        gc.collect()
        if is_there() is None:
            return
        await asyncio.sleep(0.01)  # threads and callbacks that are about to end still hold it


async def call_in_thread(function: Callable[[], object]) -> None:
    """Calls a blocking function in a thread, or on this event loop if the interpreter is about to end and
    starts no thread."""
    try:
        call = asyncio.get_running_loop().run_in_executor(None, function)
    except RuntimeError:
        function()
    else:
        await call
