"""Several models in one process, by name."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, Unpack

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from maxsimd.engine.actors.turns import check_weight
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.load import free_memory
from maxsimd.engine.device.shared import Seat, SharedDevices
from maxsimd.engine.device.stores import MIB, memory_limit
from maxsimd.engine.engine import Engine
from maxsimd.engine.errors import (
    EngineNotReadyError,
    EngineRunningError,
    MaxsimdError,
    ModelDroppedError,
    ModelFailedError,
    UnknownModelError,
)
from maxsimd.engine.parameters import complete_docstring
from maxsimd.engine.requests import Scorable
from maxsimd.engine.runtime import Running, launch
from maxsimd.engine.several.cascade import CascadeOptions, CascadeResult, Stage, run_cascade


class MetricsByModel(Collector):
    """The metrics of several models, each with the label `model`."""

    def __init__(self, registries: Callable[[], Mapping[str, CollectorRegistry]]) -> None:
        self._registries = registries

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for model, registry in self._registries().items():
            for metric in registry.collect():
                if metric.name not in merged:
                    merged[metric.name] = Metric(metric.name, metric.documentation, metric.type)
                merged[metric.name].samples.extend(
                    sample._replace(labels={"model": model, **sample.labels}) for sample in metric.samples
                )
        return merged.values()


class SharedEngine(Engine):
    """An engine on a seat of a shared device; `take_seat` gives a new one for each start."""

    def __init__(self, config: EngineConfig, take_seat: Callable[[], Seat]) -> None:
        super().__init__(config)
        self._take_seat = take_seat
        self._seat: Seat | None = None

    @property
    def device_seconds(self) -> float:
        return 0.0 if self._seat is None else self._seat.seconds

    async def _launch(self) -> Running:
        self._seat = self._take_seat()
        return await launch(self.config, self.metrics, self._died, self._tenants, self._seat)


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """The state of a model, in a word, and the engine of a model that is served. Each load has its own."""

    text: str
    engine: Engine | None = None


# The states of models; a reason follows `FAILED`.
LOADING, OK, FAILED, DROPPED = "loading", "ok", "failed: ", "dropped"

log = logging.getLogger(__name__)

# Seconds that a dropped model has to finish its requests.
GRACE_SECONDS = 30.0


class _Dropping(NamedTuple):
    """A model that is being dropped, with the engine that it had; `done` when it is gone."""

    name: str
    engine: Engine | None
    done: asyncio.Future[None]


class Engines:
    """Engines by the names of their models. Use it as an async context manager, from one event loop::

        async with Engines({"embed": EngineConfig(...), "rerank": EngineConfig(...)}) as engines:
            await engines["embed"].embed(texts)

    The models of a device share its thread, and take turns there by their weights: who has used least time
    for its weight has the next step. Their caches share what one would take by default. A model that cannot
    be loaded, or whose engine dies, fails alone: `state` says why. Only a step that
    never ends fails all models of its device; they can be loaded again."""

    def __init__(
        self, configs: Mapping[str, EngineConfig], *, weights: Mapping[str, float] | None = None
    ) -> None:
        """`weights` are the models' shares of the device beside each other, where not 1. Raises ValueError
        for one that means nothing, or is of no model here."""
        self._configs = dict(configs)
        self._weights = dict(weights or {})
        for name, weight in self._weights.items():
            check_weight(weight)
            if name not in configs:
                raise ValueError(f"there is a weight for {name!r}, but no such model")
        self._states = {name: _State(LOADING) for name in configs}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._devices = SharedDevices()
        # None while no model runs.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._one_load = asyncio.Lock()
        # Models that are being loaded, or wait for that.
        self._loading: set[str] = set()
        # Models that are not gone yet, some more than once.
        self._dropping: list[_Dropping] = []
        self._num_stops = 0
        # The memory that one cache has by default, for all caches whose size is not configured.
        self._cache_bytes: int | None = None
        self._sharers = {name for name, config in configs.items() if config.cache_mb is None}
        # The engines' metrics, with the label `model`.
        self.registry = CollectorRegistry()
        self.registry.register(MetricsByModel(self._registries))

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except EngineRunningError:  # whoever has entered it will leave it
            raise
        except BaseException:  # cancelled: nobody will leave what was never entered
            await self.stop(grace=0)
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Loads the models one after the other; each serves as soon as it is loaded, and one that fails is in
        the state "failed: reason". Raises EngineRunningError while models are loaded or stopped. This,
        `load`, `drop` and `stop` raise EngineNotReadyError where the models run on another event loop."""
        self._check_may_load()
        if self._loading:
            raise EngineRunningError("models are being loaded already; wait for that")
        loadings = {name: _State(LOADING) for name in self._configs if self._states[name].engine is None}
        self._states |= loadings
        self._loading |= loadings.keys()
        try:
            for name, loading in loadings.items():
                with suppress(Exception):  # its state says so
                    await self._start(name, loading, self._configs[name], self._weights.get(name, 1.0))
        finally:
            self._loading -= loadings.keys()

    async def stop(self, grace: float | None = None) -> None:
        """Drops all models at once, each with `grace` seconds for the requests that it has (None: for as long
        as they take). One that is being dropped already has no longer than that either."""
        self._check_loop()
        self._num_stops += 1
        try:
            for going in list(self._dropping):
                if going.engine is not None:
                    await going.engine.stop(grace)
            ends = [self._end(name, grace) for name in self._states]
            ended = await asyncio.gather(*ends, return_exceptions=True)
            await self._until_gone()
            async with self._one_load:  # what is being loaded goes before its device does
                await asyncio.to_thread(self._devices.close)
            self._loop = None
        finally:
            self._num_stops -= 1
        for error in ended:
            if error is not None:
                raise error

    @property
    def names(self) -> tuple[str, ...]:
        """The models that are loading, served or failed, in the order in which they came."""
        return tuple(name for name, state in self._states.items() if state.text != DROPPED)

    def state(self, name: str) -> str:
        """ "loading", "ok", "failed: reason" or "dropped". Raises UnknownModelError."""
        return self._state(name).text

    def __getitem__(self, name: str) -> Engine:
        """The engine of a model. Raises UnknownModelError, ModelFailedError, ModelDroppedError, and
        EngineNotReadyError while it is loading."""
        state = self._state(name)
        if state.engine is not None:
            return state.engine
        if state.text == LOADING:
            raise EngineNotReadyError(f"the model {name!r} is being loaded")
        if state.text == DROPPED:
            raise ModelDroppedError(f"the model {name!r} has been dropped")
        raise ModelFailedError(f"the model {name!r} has {state.text}")

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def device_seconds(self, name: str) -> float:
        """The time that a model has used on its device since it was loaded. Raises as `engines[name]`."""
        engine = self[name]
        assert isinstance(engine, SharedEngine)
        return engine.device_seconds

    async def load(self, name: str, config: EngineConfig, weight: float = 1.0) -> None:
        """Loads a model beside the others, which serve meanwhile; also in place of one that has failed or was
        dropped. Raises ModelLoadError, EngineRunningError where there is one of this name or all are being
        stopped, ModelDroppedError where they are before it is loaded, and ValueError for a weight that means
        nothing."""
        check_weight(weight)
        self._check_may_load()
        before = self._states.get(name)
        if before is not None and before.engine is not None:
            raise EngineRunningError(f"there is a model {name!r} already; drop it first")
        if before is not None and before.text == LOADING:
            raise EngineRunningError(f"the model {name!r} is being loaded already, or will be by start()")
        self._states.pop(name, None)  # it comes last now
        loading = self._states[name] = _State(LOADING)
        self._loading.add(name)
        try:
            await self._start(name, loading, config, weight)
        finally:
            self._loading.discard(name)

    async def drop(self, name: str, grace: float | None = GRACE_SECONDS) -> None:
        """Takes no more requests for a model, waits `grace` seconds for those that it has, and frees its
        memory. Who still waits then gets EngineDeadError. One that is being dropped already is waited for.
        Raises UnknownModelError, and EngineRunningError while it is loaded."""
        self._check_loop()
        if self._state(name).text == LOADING:
            raise EngineRunningError(f"the model {name!r} is being loaded; drop it when it is")
        await self._end(name, grace)
        await self._until_gone(name)

    async def rerank(
        self,
        query: Scorable,
        documents: Sequence[Scorable],
        stages: Sequence[Stage],
        *,
        deadline: float | None = None,
        **options: Unpack[CascadeOptions],
    ) -> CascadeResult:
        """Ranks documents in stages: the model of each scores the best of the stage before. Scores are those
        of the last stage, and only there `use_activation` and `normalize` apply."""
        return await run_cascade(self.__getitem__, query, documents, stages, deadline, options)

    def _state(self, name: str) -> _State:
        state = self._states.get(name)
        if state is None:
            served = ", ".join(self.names) or "none"
            raise UnknownModelError(f"there is no model {name!r}; there are: {served}", "model")
        if state.engine is not None and state.engine.death is not None:  # its watch is about to note that
            return _State(FAILED + state.engine.death)
        return state

    def _check_loop(self) -> None:
        if self._loop not in (None, asyncio.get_running_loop()):
            raise EngineNotReadyError(
                "the models run on another event loop: start, use and stop them within one asyncio.run"
            )

    def _check_may_load(self) -> None:
        self._check_loop()
        if self._loop is None:
            self._loop, self._one_load = asyncio.get_running_loop(), asyncio.Lock()
        if self._num_stops:
            raise EngineRunningError("the models are being stopped; wait for that")

    async def _start(self, name: str, loading: _State, config: EngineConfig, weight: float) -> None:
        """Loads one model and starts its engine, while no other loads. Raises ModelDroppedError where the
        model, whose state is `loading`, is dropped meanwhile."""
        async with self._one_load:
            if self._states[name] is not loading:
                raise _dropped_while_loading(name)
            own = config
            if config.cache_mb is None:
                self._sharers.add(name)
                own = replace(config, cache_mb=self._cache_part())
            engine = SharedEngine(own, lambda: self._devices.seat(own, weight))
            log.info("the model %s is being loaded", name)
            try:
                await engine.start()
            except BaseException as error:
                if self._states[name] is loading:
                    self._fail(name, _reason(error))
                raise
            if self._states[name] is not loading:
                await engine.stop(grace=0)
                raise _dropped_while_loading(name)
            self._states[name] = _State(OK, engine)
            self._divide_caches()
            self._watches[name] = asyncio.create_task(self._watch(name, engine), name="maxsimd-watch-model")

    def _fail(self, name: str, reason: str) -> None:
        self._states[name] = _State(FAILED + reason)
        self._leave_budget(name)

    async def _watch(self, name: str, engine: Engine) -> None:
        """Once an engine has died, frees what it has left."""
        await engine.until_dead()
        assert engine.death is not None
        self._fail(name, engine.death)
        await engine.stop(grace=0)
        await asyncio.to_thread(free_memory)

    async def _end(self, name: str, grace: float | None) -> None:
        """Frees a model that is not dropped yet, at once where this is cancelled."""
        before = self._states[name]
        if before.text == DROPPED:
            return
        self._states[name] = _State(DROPPED)
        self._leave_budget(name)
        watch = self._watches.pop(name, None)
        going = _Dropping(name, before.engine, asyncio.get_running_loop().create_future())
        self._dropping.append(going)
        try:
            if before.engine is not None:
                if watch is not None:
                    watch.cancel()
                await before.engine.stop(grace)
                await asyncio.to_thread(free_memory)
            elif watch is not None:  # it is freeing what one that has died has left
                await asyncio.wait({watch})
        finally:
            self._dropping.remove(going)
            going.done.set_result(None)

    async def _until_gone(self, name: str | None = None) -> None:
        """Waits for those that others drop: of this name, or all."""
        going = {each.done for each in self._dropping if name in (None, each.name)}
        if going:
            await asyncio.wait(going)

    def _leave_budget(self, name: str) -> None:
        """Gives a model's part of the memory for caches to the others."""
        self._sharers.discard(name)
        self._divide_caches()

    def _divide_caches(self) -> None:
        for name, state in self._states.items():
            cache = None if state.engine is None else state.engine.metrics.cache
            if name in self._sharers and cache is not None:
                cache.resize(self._cache_part() * MIB)

    def _cache_part(self) -> int:
        """MiB of one sharer, at least 1: 0 would be no cache."""
        if self._cache_bytes is None:
            self._cache_bytes = memory_limit(EngineConfig())
        return max(1, self._cache_bytes // max(1, len(self._sharers)) // MIB)

    def _registries(self) -> dict[str, CollectorRegistry]:
        return {
            name: state.engine.metrics.registry
            for name, state in list(self._states.items())
            if state.engine is not None
        }


complete_docstring(Engines.rerank, more=CascadeOptions.__annotations__)


def _dropped_while_loading(name: str) -> ModelDroppedError:
    return ModelDroppedError(f"the model {name!r} was dropped while it was being loaded")


def _reason(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "loading it was cancelled"
    return str(error) if isinstance(error, MaxsimdError) else repr(error)
