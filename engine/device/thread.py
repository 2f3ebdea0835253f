"""The device thread: the only thread that touches the model and its tensors.

It runs an event loop of its own, on which the model runner, pooling and scoring live.
"""

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from maxsimd.engine.actors.actor import Actor, Mailbox
from maxsimd.engine.actors.messages import SchedulerMessage
from maxsimd.engine.actors.pooling import PoolingActor
from maxsimd.engine.actors.runner import RunnerActor
from maxsimd.engine.actors.scoring import ScoringActor
from maxsimd.engine.actors.turns import Turn
from maxsimd.engine.device.load import DeviceModel
from maxsimd.engine.scoring.document_scorer import DocumentScorer
from maxsimd.engine.scoring.hybrid import Hybrid
from maxsimd.engine.scoring.maxsim import MaxSim, choose_maxsim_spans, maxsim_apart_avx512
from maxsimd.engine.stats import DeviceStats

T = TypeVar("T")

# How all threads of an engine are called.
_PREFIX = "maxsimd-"
_left_behind: list[threading.Thread] = []


class Device(Protocol):
    """Where an engine's device runs: a thread of its own, or a seat on one that it shares. Where it is
    shared, a step needs a `turn`."""

    loop: asyncio.AbstractEventLoop
    turn: Turn | None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]: ...

    def close(self, seconds: float | None = None) -> bool: ...

    def declare_stuck(self) -> None: ...


class DeviceThread:
    """A thread with an event loop; coroutines are handed to it and awaited from elsewhere."""

    turn: Turn | None = None

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self.is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"{_PREFIX}device", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the device thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def call(self, function: Callable[[], T]) -> T:
        """Runs a plain function on the device thread and waits for it."""

        async def run() -> T:
            return function()

        return await asyncio.wrap_future(self.run(run()))

    def close(self, seconds: float | None = None) -> bool:
        """Cancels what still runs there and joins the thread, for at most that long; says whether it ended.

        One that did not is left behind with all that it holds. It ends if ever it goes on."""
        self.end_soon()
        if not self.join(seconds):
            _left_behind.append(self._thread)
        return not self.is_alive

    def end_soon(self) -> None:
        """Has the thread end once it has done what was handed to it before, without waiting for that."""
        self.is_closing = True
        self.loop.call_soon_threadsafe(self.loop.stop)

    def join(self, seconds: float | None = None) -> bool:
        """Waits for the thread's end, for at most that long; says whether it ended."""
        self._thread.join(seconds)
        return not self.is_alive

    def declare_stuck(self) -> None:
        """Nobody else waits for this thread."""

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.get_loop().run_forever()


def num_left_behind() -> int:
    """How many device threads of this process are stuck and were left behind."""
    _left_behind[:] = [thread for thread in _left_behind if thread.is_alive()]
    return len(_left_behind)


def stacks() -> str:
    """Where the threads of all engines in this process stand."""
    names = {thread.ident: thread.name for thread in threading.enumerate() if thread.name.startswith(_PREFIX)}
    shown = [
        f"{names[ident]}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident in names
    ]
    return "\n".join(sorted(shown))


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
