"""The device thread: the only thread that touches the model and its tensors.

It runs an event loop of its own, on which the model runner, pooling and scoring live.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from maxsimd.engine.actor import Actor, Mailbox
from maxsimd.engine.allocators import settle_allocators
from maxsimd.engine.cache import EmbeddingCache, open_cache
from maxsimd.engine.checkpoint import LoadedModel, load_model
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.document_scorer import DocumentScorer
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.messages import SchedulerMessage
from maxsimd.engine.niceness import give_way
from maxsimd.engine.packed import PreparedModel, choose_device, choose_dtype, prepare
from maxsimd.engine.pooling_actor import PoolingActor
from maxsimd.engine.runner_actor import RunnerActor
from maxsimd.engine.scoring_actor import ScoringActor
from maxsimd.pooling.dispatch import DispatchPooler
from maxsimd.pooling.maxsim import MaxSim, choose_maxsim
from maxsimd.pooling.methods import METHODS

T = TypeVar("T")

# How much longer a start may take so that what was kept before it is in memory.
_WARMING_SECONDS = 0.5


class DeviceThread:
    """A thread with an event loop; coroutines are handed to it and awaited from elsewhere."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="maxsimd-device", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the device thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def call(self, function: Callable[[], T]) -> T:
        """Runs a plain function on the device thread and waits for it."""

        async def run() -> T:
            return function()

        return await asyncio.wrap_future(self.run(run()))

    def close(self) -> None:
        """Cancels what still runs there and joins the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.get_loop().run_forever()


@dataclass(frozen=True, slots=True, eq=False)
class OnDevice:
    """The model as it stands ready on its device."""

    model: LoadedModel
    prepared: PreparedModel
    device: torch.device
    maxsim_name: str
    maxsim: MaxSim
    cache: EmbeddingCache | None


def load_on_device(config: EngineConfig) -> OnDevice:
    """Loads and prepares the model; to be called on the device thread. Raises ModelLoadError."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = choose_device(config.device)
    if device.type == "cpu":
        settle_allocators()
        give_way()
    try:
        maxsim_name, maxsim = choose_maxsim(config.maxsim, device, config.kernels == "auto")
    except ValueError as error:
        raise ModelLoadError(str(error)) from error
    model = load_model(config, device)
    cache = open_cache(config, model, choose_dtype(config.dtype, device))
    prepared = prepare(model, config, device)
    if cache is not None:
        cache.wait_until_warm(_WARMING_SECONDS)
    return OnDevice(model, prepared, device, maxsim_name, maxsim, cache)


class DeviceActors:
    """The actors of the device's loop, wired to each other; `mailbox` is the door to them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_device: OnDevice,
        scheduler: Mailbox[SchedulerMessage],
    ) -> None:
        model = on_device.model
        pooler = DispatchPooler(
            {name: METHODS[task.pooling](task.head) for name, task in model.tasks.items()},
            model.token_pooling,
        )
        scorer = DocumentScorer(
            model.similarity,
            on_device.maxsim,
            on_device.device,
            on_device.prepared.dtype,
            on_device.cache,
        )
        scoring = ScoringActor(Mailbox(loop), scorer, len(model.labels), scheduler)
        pooling = PoolingActor(Mailbox(loop), pooler, scoring.mailbox)
        runner = RunnerActor(
            Mailbox(loop), on_device.prepared.runner, pooling.mailbox, scheduler, on_device.cache
        )
        self.mailbox = runner.mailbox
        self._actors: list[Actor[Any]] = [runner, pooling, scoring]

    async def run(self) -> None:
        """Runs until cancelled; raises when an actor dies."""
        async with asyncio.TaskGroup() as group:
            for actor in self._actors:
                group.create_task(actor.run())
