"""Everything that exists only while an engine runs: threads, actors and the one who watches over them."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count

from maxsimd.engine.actor import Mailbox
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device import DeviceActors, DeviceThread, OnDevice
from maxsimd.engine.errors import EngineDeadError
from maxsimd.engine.messages import SchedulerMessage, Value
from maxsimd.engine.metrics import EngineMetrics
from maxsimd.engine.preprocess import Preprocessor
from maxsimd.engine.scheduler_actor import SchedulerActor
from maxsimd.engine.tokenization import TextTokenizer
from maxsimd.scheduler import Scheduler, StepLimits

log = logging.getLogger(__name__)


class Running:
    """Everything that exists only while an engine runs; complete when made."""

    def __init__(
        self,
        config: EngineConfig,
        metrics: EngineMetrics,
        device: DeviceThread,
        on_device: OnDevice,
        died: Callable[[str], None],
    ) -> None:
        model, prepared = on_device.model, on_device.prepared
        self.on_device = on_device
        self.keys: Iterator[int] = count()
        self._owners: Iterator[int] = count()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self.pool = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="maxsimd-pool")
        budget = config.max_batch_tokens
        if budget is None:
            budget = 16_384 if on_device.device.type == "cuda" else 2_048
            if not prepared.runner.chunked:
                budget = max(budget, model.max_tokens)
        self.max_tokens = model.max_tokens if prepared.runner.chunked else min(model.max_tokens, budget)
        self.tokenizer = TextTokenizer(model.tokenizer)
        self.preprocessor = Preprocessor(model, self.tokenizer, self.max_tokens, config.window_overlap)
        limits = StepLimits(budget, config.max_batch_sequences, prepared.runner.chunked)
        self._device = device
        self._died = died
        self._reason = "the engine was stopped"
        self._awaited: set[asyncio.Future[list[Value]]] = set()
        loop = asyncio.get_running_loop()
        mailbox: Mailbox[SchedulerMessage] = Mailbox(loop)
        actors = DeviceActors(device.loop, on_device, mailbox)
        self.scheduler = SchedulerActor(
            mailbox, Scheduler(limits), actors.mailbox, config.steps_in_flight, metrics
        )
        self._supervisor = asyncio.create_task(self._supervise(actors), name="maxsimd-supervisor")

    @contextmanager
    def request(self) -> Iterator[int]:
        """Covers a request from its arrival to its result, and gives it a number of its own."""
        self._inside += 1
        self._empty.clear()
        try:
            yield next(self._owners)
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._empty.set()

    def values(self) -> asyncio.Future[list[Value]]:
        """A future for one request's values; it fails when the engine dies before they are there.

        Raises EngineDeadError when it has died already."""
        if self._supervisor.done():
            raise EngineDeadError(self._reason)
        future: asyncio.Future[list[Value]] = asyncio.get_running_loop().create_future()
        self._awaited.add(future)
        future.add_done_callback(self._awaited.discard)
        return future

    async def close(self, grace: float | None) -> None:
        """Waits until all requests are done, for at most `grace` seconds, and frees everything."""
        try:
            async with asyncio.timeout(grace):
                await self._empty.wait()
        except TimeoutError:
            log.warning("stopping with %d requests unfinished after %s seconds", self._inside, grace)
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)
        await asyncio.to_thread(self._device.close)
        self.pool.shutdown(wait=False, cancel_futures=True)

    async def _supervise(self, actors: DeviceActors) -> None:
        """Runs the actors of both loops; when one dies, all do, and every waiting caller is told."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.scheduler.run())
                group.create_task(self._run_on_device(actors))
        except* Exception as errors:
            cause = _first_cause(errors)
            self._reason = f"the engine has died: {cause!r}"
            log.critical("%s", self._reason, exc_info=cause)
            self._died(self._reason)
        finally:
            for future in list(self._awaited):
                if not future.done():
                    future.set_exception(EngineDeadError(self._reason))

    async def _run_on_device(self, actors: DeviceActors) -> None:
        await asyncio.wrap_future(self._device.run(actors.run()))


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
