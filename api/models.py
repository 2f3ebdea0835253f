"""Several models behind one server, in place of one engine. Each may fail, be dropped and be loaded again
without the others. A request goes to the model that it names, or to the first that suits it."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from maxsimd.api.answer import ApiError, names_of, no_such_model, quoted
from maxsimd.api.model_setup import Loadable, ModelSetup
from maxsimd.api.options import in_flags
from maxsimd.engine import EngineDeadError, EngineNotReadyError, ModelLoadError, QueueFullError
from maxsimd.engine.config import EngineConfig, ScoreType
from maxsimd.engine.device.facts import ModelFacts
from maxsimd.engine.several.engines import DROPPED, FAILED, OK, Engines, ModelLoad
from maxsimd.engine.tenants import Tenant

if TYPE_CHECKING:
    from maxsimd.engine import Engine


class _ServedGauge(Collector):
    def __init__(self, models: "SeveralModels") -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily("maxsimd_model_served", "Whether it takes requests", labels=["model"])
        for name in self._models.names:
            if (state := self._models.state(name)) != DROPPED:
                family.add_metric([name], float(state == OK))
        yield family


T = TypeVar("T")
log = logging.getLogger("maxsimd.models")


class _LoadedModel(NamedTuple):
    """A model that was loaded, even if it has died since."""

    engine: "Engine"
    facts: ModelFacts


class SeveralModels(Engines):
    """The models of a server by their names, in order; used on one event loop, in place of an engine."""

    restart_obstacle: str | None = None

    def __init__(self, setups: Sequence[ModelSetup], loadable: Loadable, grace: float) -> None:
        """Dropped models have `grace` seconds for requests."""
        super().__init__(
            {setup.name: setup.engine for setup in setups},
            weights={setup.name: setup.weight for setup in setups},
        )
        self.death: str | None = None
        self.registry.register(_ServedGauge(self))
        self.metrics = SimpleNamespace(registry=self.registry)
        self._grace = grace
        self._loadable = loadable
        self.setups = {setup.name: setup for setup in setups}
        # Models that a request without a name may mean. None: configured, and never loaded.
        self._choosable: dict[str, _LoadedModel | None] = dict.fromkeys(self.setups)
        self._changes: dict[str, asyncio.Task[None]] = {}
        self._tenants: Mapping[str, Tenant] = {}
        self._is_started = False
        self._is_left = asyncio.Event()
        # Models that were loading when all caches were cleared.
        self._to_clear: set[str] = set()

    # For the server's life.

    async def start(self) -> None:
        """Loads the models. Raises ModelLoadError if all fail."""
        await super().start()
        self._is_started = True
        if not self.is_healthy:
            raise ModelLoadError(f"none of the models can be loaded: {self._reasons}")

    async def stop(self, grace: float | None = None) -> None:
        self._is_started = False
        for change in self._changes.values():
            change.cancel()
        await asyncio.gather(*self._changes.values(), return_exceptions=True)
        await super().stop(grace)

    async def until_dead(self) -> None:
        await self._is_left.wait()

    @property
    def caches_by_tenant(self) -> bool:
        """Whether any model caches by tenant, or may when it is loaded later."""
        return self._loadable.caches_by_tenant

    @property
    def is_healthy(self) -> bool:
        return self._is_started and bool(self._serving)

    @property
    def facts(self) -> ModelFacts:
        """The first served model's."""
        return self._first().facts

    @property
    def config(self) -> EngineConfig:
        """The first served model's, with the largest `max_request_tokens` of all."""
        largest = max(setup.engine.max_request_tokens for setup in self.setups.values())
        return dataclasses.replace(self._first().config, max_request_tokens=largest)

    def set_tenants(self, tenants: Mapping[str, Tenant]) -> None:
        self._tenants = tenants
        for engine in self._serving:
            engine.set_tenants(tenants)

    def check_rate(self, tenant: str) -> None:
        """Raises QueueFullError if the tenant has used up its rates with all models; each counts its own."""
        refused: QueueFullError | None = None
        for engine in self._serving:
            try:
                engine.check_rate(tenant)
            except QueueFullError as error:
                refused = error
            else:
                return
        if refused is not None:
            raise refused

    async def clear_cache(self) -> None:
        """Clears the caches of all models. Those that load meanwhile clear theirs before they serve; those
        that die or are dropped are passed over."""
        self._to_clear |= self._loading
        for engine in self._serving:
            with suppress(EngineDeadError, EngineNotReadyError):
                await engine.clear_cache()

    async def in_thread(self, function: Callable[[], T], size: int) -> T:
        """Runs work that belongs to no model yet in the threads of any that lives."""
        for engine in self._serving:
            with suppress(EngineDeadError, EngineNotReadyError):
                return await engine.in_thread(function, size)
        raise EngineDeadError(self.death or "no model is left")

    # For requests.

    @property
    def names(self) -> tuple[str, ...]:
        """All models, with those that have failed or were dropped, in order."""
        return tuple(self.setups)

    def facts_of(self, name: str) -> ModelFacts | None:
        """None if the model was never loaded."""
        loaded = self._choosable.get(name)
        return None if loaded is None else loaded.facts

    def engine(self, name: str) -> "Engine | None":
        """The engine of a model; None if it takes no requests."""
        return self._model(name).served

    def all_facts(self) -> dict[str, ModelFacts]:
        return {name: engine.facts for name in self.names if (engine := self.engine(name)) is not None}

    # Names of models in requests.

    @property
    def served_names(self) -> tuple[str, ...]:
        """The models that take requests."""
        return tuple(name for name in self.names if self.engine(name) is not None)

    def called(self, name: str) -> list[str]:
        """The model of this name, or those of this checkpoint; dropped ones only if all are."""
        if name in self.names:
            return [name]
        called = [
            each
            for each, setup in self.setups.items()
            if name in (setup.engine.model, getattr(self.facts_of(each), "name", None))
        ]
        return [each for each in called if self.state(each) != DROPPED] or called

    def find(self, name: str) -> str:
        """The model of this name, or the only one of this checkpoint. Raises ApiError."""
        called = self.called(name)
        if not called:
            raise no_such_model(name, self.served_names)
        if len(called) > 1:
            message = f"several models are {quoted(name)}; say which you mean by its name: "
            raise ApiError(404, message + names_of(called), "model")
        return called[0]

    def choose(self, name: str | None, wanted: "Wanted") -> str:
        """The model that a request goes to, served or not. Raises ApiError."""
        if name:
            return self.find(name)
        choosable = {
            each: self.facts_of(each)
            for each in self.names
            if each in self._choosable and self.state(each) != DROPPED
        }
        suited = first_suited(wanted, choosable)
        if choosable[suited] is None:
            message = (
                f"the request names no model, and may be for {quoted(suited)}, which could not be loaded; "
                f"say as `model` which you mean: {self._served_here}"
            )
            raise ApiError(503, message, "model", retry_after=30)
        return suited

    def not_served_error(self, name: str) -> ApiError:
        """The error of a request whose model takes no requests."""
        match self.state(name):
            case "loading":
                message = f"the model {quoted(name)} is being loaded; send the request again shortly"
                return ApiError(503, message, "model", retry_after=5)
            case "dropped":
                message = f"the model {quoted(name)} has been dropped; {self._served_here}"
                return ApiError(404, message, "model")
            case state:
                message = f"the model {quoted(name)} is not served: {in_flags(state.removeprefix(FAILED))}; "
                return ApiError(503, message + self._served_here, "model", retry_after=30)

    def lost_during_request(self, name: str) -> ApiError | None:
        """The error of a request whose model failed or was dropped meanwhile; None if it serves."""
        if not name or self.engine(name) is not None:
            return None
        if self.state(name) == DROPPED:
            message = f"the model {quoted(name)} was dropped before the request was done"
            return ApiError(503, message, "model", retry_after=30)
        return self.not_served_error(name)

    @property
    def _served_here(self) -> str:
        return "served here: " + (names_of(self.served_names) or "none")

    # Loading and dropping.

    async def add(self, name: str) -> None:
        """Loads a model, unless it is served. Goes on if its caller leaves. Raises ModelLoadError, and
        ApiError for an unknown one."""
        await self._change(name, self._add)

    async def remove(self, name: str) -> None:
        """Drops a model, with a grace for requests. Goes on if its caller leaves. Raises ApiError for
        the last one that is served."""
        await self._change(name, self._remove)

    async def _change(self, name: str, change: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        """Makes one change of a model at a time."""
        while (before := self._changes.get(name)) is not None:
            await asyncio.wait({before})
        task = asyncio.create_task(change(name))
        self._changes[name] = task
        task.add_done_callback(lambda done: self._changed(name, done))
        await asyncio.shield(task)

    def _changed(self, name: str, task: asyncio.Task[None]) -> None:
        if self._changes.get(name) is task:
            del self._changes[name]
        if not task.cancelled():
            task.exception()  # its caller may have left
        self._end_if_none_is_left()

    async def _add(self, name: str) -> None:
        if name in self.setups and self.engine(name) is not None:
            return
        setup = self._loadable.setup_of(name)
        if setup is None:
            message = f"there is no model {quoted(name)} to load; name one of the configuration, or one in "
            raise ApiError(404, message + "the folder of --models-dir by its path there", "name")
        if (link := await asyncio.to_thread(self._loadable.link_out, name)) is not None:
            raise ModelLoadError(
                f"the link {link} leads out of the folder of --models-dir, or nowhere; replace it by a copy"
            )
        self.setups.setdefault(name, setup)
        await self.load(name, setup.engine, setup.weight)
        log.info("the model %s is served: %s", name, self[name].facts.how_it_runs)

    async def _remove(self, name: str) -> None:
        if self.state(name) == DROPPED:
            return
        if not any(other != name for other in self.served_names):
            message = "this is the last model that is served; load another first, or stop the server"
            raise ApiError(409, message, "name")
        await self.drop(name, self._grace)
        self._choosable.pop(name, None)
        log.info("the model %s is dropped", name)

    async def _prepare(self, name: str, engine: "Engine") -> None:
        while name in self._to_clear:
            self._to_clear.remove(name)
            await engine.clear_cache()
        engine.set_tenants(self._tenants)
        self._choosable[name] = _LoadedModel(engine, engine.facts)

    def _fail(self, model: ModelLoad, reason: str) -> None:
        super()._fail(model, reason)
        self._end_if_none_is_left()

    def _end_if_none_is_left(self) -> None:
        """Ends a server without a model and none on its way."""
        if self._is_started and not self._changes and not self.is_healthy:
            self.death = f"no model is left: {self._reasons}"
            self._is_left.set()

    @property
    def _reasons(self) -> str:
        return "; ".join(f"{name}: {self.state(name).removeprefix(FAILED)}" for name in self.names)

    @property
    def _serving(self) -> "list[Engine]":
        return [engine for name in self.names if (engine := self.engine(name)) is not None]

    def _first(self) -> "Engine":
        if self.death is not None:
            raise EngineDeadError(self.death)
        for engine in self._serving:
            return engine
        raise EngineNotReadyError("no model is served now")

    def _registries(self) -> dict[str, CollectorRegistry]:
        return {name: model.engine.metrics.registry for name, model in self._choosable.items() if model}


_RERANKERS = (ScoreType.CROSS_ENCODER, ScoreType.LATE_INTERACTION, ScoreType.LISTWISE)


class Wanted(Enum):
    """The kind of result that a request needs of a model."""

    RANKING = auto()
    VECTORS = auto()
    TOKEN_VECTORS = auto()
    SPARSE_VECTORS = auto()
    CLASSES = auto()
    LABELS = auto()
    TOKEN_CLASSES = auto()
    ANYTHING = auto()
    # The models that the request names.
    CASCADE = auto()

    @property
    def is_of_vectors(self) -> bool:
        return self in (Wanted.VECTORS, Wanted.TOKEN_VECTORS, Wanted.SPARSE_VECTORS)


_Fits: TypeAlias = Callable[[ModelFacts], bool]


def _anything(facts: ModelFacts) -> bool:
    return True


def _gives(*tasks: str) -> _Fits:
    return lambda facts: any(task in facts.dims for task in tasks)


# The first test that any model passes decides, and the first model that passes it.
_PREFERENCES: dict[Wanted, tuple[_Fits, ...]] = {
    Wanted.RANKING: (
        lambda facts: facts.score_type in _RERANKERS and facts.has_score,
        lambda facts: facts.has_score,
        _anything,
    ),
    Wanted.VECTORS: (_gives("embed"), _gives("token_embed", "sparse_embed"), _anything),
    Wanted.TOKEN_VECTORS: (_gives("token_embed"), _gives("embed"), _anything),
    Wanted.SPARSE_VECTORS: (_gives("sparse_embed"), _gives("embed", "token_embed"), _anything),
    Wanted.CLASSES: (
        lambda facts: facts.is_classifier and facts.score_task == "classify",
        lambda facts: facts.score_task == "classify",
        _anything,
    ),
    Wanted.LABELS: (_gives("label_scores"), _anything),
    Wanted.TOKEN_CLASSES: (_gives("token_classify"), _anything),
    Wanted.ANYTHING: (_anything,),
}


def first_suited(wanted: Wanted, models: Mapping[str, ModelFacts | None]) -> str:
    """The first model that suits a request, or one before it that has not loaded, whose facts are None."""
    return next(
        name
        for fits in _PREFERENCES[wanted]
        for name, facts in models.items()
        if facts is None or fits(facts)
    )
