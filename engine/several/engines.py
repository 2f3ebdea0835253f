"""Several models in one process, by name."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Self, Unpack

from prometheus_client import CollectorRegistry

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
from maxsimd.engine.metrics import MergedMetrics
from maxsimd.engine.parameters import complete_docstring
from maxsimd.engine.requests import Scorable
from maxsimd.engine.runtime import Running, launch
from maxsimd.engine.several.cascade import CascadeOptions, CascadeResult, Stage, run_cascade


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


# The states of models; a reason follows `FAILED`.
LOADING, OK, FAILED, DROPPED = "loading", "ok", "failed: ", "dropped"

log = logging.getLogger(__name__)

# Seconds that a dropped model has to finish its requests.
GRACE_SECONDS = 30.0


@dataclass(slots=True, eq=False)
class ModelLoad:
    """One load of a model. Once loaded, it has an engine, and a `watch` that waits for the engine's death."""

    name: str
    config: EngineConfig
    weight: float
    noted: str = LOADING
    engine: SharedEngine | None = None
    watch: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        if self.noted == OK and self.engine is not None and self.engine.death is not None:
            return FAILED + self.engine.death  # the watch is about to note that
        return self.noted

    @property
    def served(self) -> SharedEngine | None:
        """The engine, if it takes requests."""
        return self.engine if self.state == OK else None

    @property
    def shares_caches(self) -> bool:
        """Whether it has a part of the memory for caches, or will."""
        return self.config.cache_mb is None and self.noted in (LOADING, OK)


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
        weights = weights or {}
        for name, weight in weights.items():
            check_weight(weight)
            if name not in configs:
                raise ValueError(f"there is a weight for {name!r}, but no such model")
        self._configured = {name: (config, weights.get(name, 1.0)) for name, config in configs.items()}
        # The latest load of each.
        self._models = {name: ModelLoad(name, *each) for name, each in self._configured.items()}
        self._devices = SharedDevices()
        # None while no model runs.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._one_load = asyncio.Lock()
        # Models that are being loaded, or wait for that.
        self._loading: set[str] = set()
        # Models that are not gone yet, and what is done when they are.
        self._dropping: dict[ModelLoad, asyncio.Future[None]] = {}
        self._num_stops = 0
        # The memory that one cache has by default, for all caches whose size is not configured.
        self._cache_bytes: int | None = None
        # The engines' metrics, with the label `model`.
        self.registry = CollectorRegistry()
        self.registry.register(
            MergedMetrics(
                lambda: (({"model": name}, each.collect()) for name, each in self._registries().items())
            )
        )

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
        missing = [name for name in self._configured if self._models[name].served is None]
        self._models |= {name: ModelLoad(name, *self._configured[name]) for name in missing}
        self._loading |= {*missing}
        try:
            for model in [self._models[name] for name in missing]:
                with suppress(Exception):  # its state says so
                    await self._start(model)
        finally:
            self._loading -= {*missing}

    async def stop(self, grace: float | None = None) -> None:
        """Drops all models at once, each with `grace` seconds for the requests that it has (None: for as long
        as they take). One that is being dropped already has no longer than that either."""
        if self._loop is not None and not self._loop.is_closed():
            self._check_loop()
        self._num_stops += 1
        try:
            for going in list(self._dropping):
                if going.engine is not None:
                    await going.engine.stop(grace)
            ends = [self._end(model, grace) for model in self._models.values()]
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
        return tuple(name for name, model in self._models.items() if model.noted != DROPPED)

    def state(self, name: str) -> str:
        """ "loading", "ok", "failed: reason" or "dropped". Raises UnknownModelError."""
        return self._model(name).state

    def __getitem__(self, name: str) -> Engine:
        """The engine of a model. Raises UnknownModelError, ModelFailedError, ModelDroppedError, and
        EngineNotReadyError while it is loading."""
        model = self._model(name)
        if model.served is not None:
            return model.served
        if model.noted == LOADING:
            raise EngineNotReadyError(f"the model {name!r} is being loaded")
        if model.noted == DROPPED:
            raise ModelDroppedError(f"the model {name!r} has been dropped")
        raise ModelFailedError(f"the model {name!r} has {model.state}")

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
        before = self._models.get(name)
        if before is not None and before.served is not None:
            raise EngineRunningError(f"there is a model {name!r} already; drop it first")
        if before is not None and before.noted == LOADING:
            raise EngineRunningError(f"the model {name!r} is being loaded already, or will be by start()")
        self._models.pop(name, None)  # it comes last now
        model = self._models[name] = ModelLoad(name, config, weight)
        self._loading.add(name)
        try:
            await self._start(model)
        finally:
            self._loading.discard(name)

    async def drop(self, name: str, grace: float | None = GRACE_SECONDS) -> None:
        """Takes no more requests for a model, waits `grace` seconds for those that it has, and frees its
        memory. Who still waits then gets EngineDeadError. One that is being dropped already is waited for.
        Raises UnknownModelError, and EngineRunningError while it is loaded."""
        self._check_loop()
        model = self._model(name)
        if model.noted == LOADING:
            raise EngineRunningError(f"the model {name!r} is being loaded; drop it when it is")
        await self._end(model, grace)
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

    def _model(self, name: str) -> ModelLoad:
        if name not in self._models:
            served = ", ".join(self.names) or "none"
            raise UnknownModelError(f"there is no model {name!r}; there are: {served}", "model")
        return self._models[name]

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

    async def _start(self, model: ModelLoad) -> None:
        """Loads one model and starts its engine, while no other loads. Raises ModelDroppedError where the
        model is dropped meanwhile."""
        async with self._one_load:
            config = model.config
            if model.noted == LOADING:
                if config.cache_mb is None:
                    config = replace(config, cache_mb=self._cache_part())
                engine = SharedEngine(config, lambda: self._devices.seat(config, model.weight))
                log.info("the model %s is being loaded", model.name)
                try:
                    await engine.start()
                    await self._prepare(model.name, engine)
                except BaseException as error:
                    await engine.stop(grace=0)
                    if model.noted == LOADING:
                        self._fail(model, _reason(error))
                    raise
                if model.noted == LOADING:
                    model.noted, model.engine = OK, engine
                    self._divide_caches()
                    model.watch = asyncio.create_task(self._watch(model, engine), name="maxsimd-watch-model")
                    return
                await engine.stop(grace=0)
            raise ModelDroppedError(f"the model {model.name!r} was dropped while it was being loaded")

    async def _prepare(self, name: str, engine: Engine) -> None:
        """Prepares an engine that has started, before its model is served."""

    def _fail(self, model: ModelLoad, reason: str) -> None:
        log.error("the model %s is not served: %s", model.name, reason)
        model.noted = FAILED + reason
        self._divide_caches()

    async def _watch(self, model: ModelLoad, engine: Engine) -> None:
        """Once an engine has died, frees what it has left."""
        await engine.until_dead()
        assert engine.death is not None
        self._fail(model, engine.death)
        await engine.stop(grace=0)
        await asyncio.to_thread(free_memory)

    async def _end(self, model: ModelLoad, grace: float | None) -> None:
        """Frees a model that is not dropped yet, at once where this is cancelled."""
        before, model.noted = model.noted, DROPPED
        if before == DROPPED:
            return
        self._divide_caches()
        gone = self._dropping[model] = asyncio.get_running_loop().create_future()
        try:
            if before == OK and model.engine is not None and model.watch is not None:
                model.watch.cancel()
                await model.engine.stop(grace)
                await asyncio.to_thread(free_memory)
            elif model.watch is not None:  # it is freeing what one that has died has left
                await asyncio.wait({model.watch})
        finally:
            del self._dropping[model]
            gone.set_result(None)

    async def _until_gone(self, name: str | None = None) -> None:
        """Waits for those that others drop: of this name, or all."""
        going = {gone for model, gone in self._dropping.items() if name in (None, model.name)}
        if going:
            await asyncio.wait(going)

    def _divide_caches(self) -> None:
        for model in self._models.values():
            cache = None if model.served is None else model.served.metrics.cache
            if model.shares_caches and cache is not None:
                cache.resize(self._cache_part() * MIB)

    def _cache_part(self) -> int:
        """MiB of one sharer, at least 1: 0 would be no cache."""
        if self._cache_bytes is None:
            self._cache_bytes = memory_limit(EngineConfig())
        num_sharers = sum(model.shares_caches for model in self._models.values())
        return max(1, self._cache_bytes // max(1, num_sharers) // MIB)

    def _registries(self) -> dict[str, CollectorRegistry]:
        return {
            name: model.served.metrics.registry
            for name, model in list(self._models.items())
            if model.served is not None
        }


complete_docstring(Engines.rerank, more=CascadeOptions.__annotations__)


def _reason(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "loading it was cancelled"
    return str(error) if isinstance(error, MaxsimdError) else repr(error)
