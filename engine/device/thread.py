"""The device thread: the only thread that touches the model and its tensors.

It runs an event loop of its own, on which the model runner, pooling and scoring live.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from maxsimd.engine.actors.actor import Actor, Mailbox
from maxsimd.engine.actors.messages import SchedulerMessage
from maxsimd.engine.actors.pooling import PoolingActor
from maxsimd.engine.actors.runner import RunnerActor
from maxsimd.engine.actors.scoring import ScoringActor
from maxsimd.engine.device.load import DeviceModel
from maxsimd.engine.scoring.document_scorer import DocumentScorer
from maxsimd.engine.stats import DeviceStats

T = TypeVar("T")


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


class DeviceActors:
    """The actors of the device's loop, wired to each other; `mailbox` is the door to them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        device_model: DeviceModel,
        scheduler: Mailbox[SchedulerMessage],
    ) -> None:
        model = device_model.model
        scorer = DocumentScorer(
            model.similarity,
            device_model.maxsim,
            device_model.device,
            device_model.prepared.dtype,
            takes_int8=device_model.maxsim_name == "triton",
            cache=device_model.cache,
        )
        scoring = ScoringActor(Mailbox(loop), scorer, len(model.labels))
        pooling = PoolingActor(Mailbox(loop), device_model.pooler)
        runner = RunnerActor(
            Mailbox(loop),
            device_model.prepared.runner,
            pooling.mailbox,
            scoring.mailbox,
            scheduler,
            device_model.cache,
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
            prefill_kv=self._device_model.prepared.runner.num_prefill_kv,
            pooling_states=self._device_model.pooler.num_states,
            staged_embeddings=0 if cache is None else cache.num_staged,
        )

    async def run(self) -> None:
        """Runs until cancelled; raises when an actor dies."""
        async with asyncio.TaskGroup() as group:
            for actor in self._actors:
                group.create_task(actor.run())
