"""Several models behind one server, in place of one engine. Each may fail, be dropped and be loaded again
without the others. A request goes to the model that it names, or to the first that suits it."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from maxsimd.api.answer import ApiError, names_of, no_such_model, quoted, unavailable
from maxsimd.api.model_setup import Loadable, ModelSetup
from maxsimd.api.options import in_flags
from maxsimd.engine import EngineDeadError, EngineNotReadyError, ModelLoadError, QueueFullError
from maxsimd.engine.config import EngineConfig, ScoreType
from maxsimd.engine.device.facts import ModelFacts
from maxsimd.engine.several.engines import DROPPED, FAILED, LOADING, OK, MetricsByModel
from maxsimd.engine.tenants import Tenant

if TYPE_CHECKING:
    from maxsimd.engine import CascadeResult, Engine, Engines


class _ServedGauge(Collector):
    def __init__(self, are_served: Callable[[], Mapping[str, bool]]) -> None:
        self._are_served = are_served

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily("maxsimd_model_served", "Whether it takes requests", labels=["model"])
        for name, is_served in self._are_served().items():
            family.add_metric([name], float(is_served))
        yield family


T = TypeVar("T")
log = logging.getLogger("maxsimd.models")


@dataclass(frozen=True, slots=True)
class _LoadedModel:
    """A model that was loaded, even if it has died since. `watch` waits for its death."""

    engine: "Engine"
    facts: ModelFacts
    watch: asyncio.Task[None]


class LastModelError(Exception):
    """The server would have no model without this one."""


class SeveralModels:
    """The models of a server by their names, in order. Used on one event loop, in place of an engine:
    `engine` has the one that scores."""

    restart_obstacle: str | None = None

    def __init__(
        self, engines: "Engines", setups: Sequence[ModelSetup], loadable: Loadable, grace: float
    ) -> None:
        """`engines` are not started, and made of `setups`. Dropped models have `grace` seconds for requests
        in flight."""
        self.death: str | None = None
        self.metrics = SimpleNamespace(registry=CollectorRegistry())
        self.metrics.registry.register(_ServedGauge(self._are_served))
        self.metrics.registry.register(MetricsByModel(self._registries))
        self._engines = engines
        self._grace = grace
        self._loadable = loadable
        self._setups = {setup.name: setup for setup in setups}
        self._expected = set(self._setups)
        self._served: dict[str, _LoadedModel] = {}
        self._changes: dict[str, asyncio.Task[None]] = {}
        self._tenants: Mapping[str, Tenant] = {}
        self._is_started = False
        self._is_left = asyncio.Event()
        # Number of times that all caches were cleared.
        self._num_clears = 0

    # For the server's life.

    async def start(self) -> None:
        """Loads the models. Raises ModelLoadError if all fail."""
        num_clears = self._num_clears
        await self._engines.start()
        self._is_started = True
        for name in self._setups:
            if self.state(name) == OK:
                await self._take(name, num_clears)
            else:
                log.error("the model %s is not served: %s", name, in_flags(self.state(name)))
        if not self._served:
            reasons = "; ".join(f"{name}: {_reason(self.state(name))}" for name in self._setups)
            raise ModelLoadError(f"none of the models can be loaded: {reasons}")

    async def stop(self, grace: float | None = None) -> None:
        self._is_started = False
        for change in self._changes.values():
            change.cancel()
        await asyncio.gather(*self._changes.values(), return_exceptions=True)
        for served in self._served.values():
            served.watch.cancel()
        await self._engines.stop(grace)

    async def until_dead(self) -> None:
        await self._is_left.wait()

    @property
    def caches_by_tenant(self) -> bool:
        """Whether any model caches by tenant, or may when it is loaded later."""
        return self._loadable.caches_by_tenant

    @property
    def is_healthy(self) -> bool:
        return self._is_started and any(self.state(name) == OK for name in self._setups)

    @property
    def facts(self) -> ModelFacts:
        """The first served model's."""
        return self._first().facts

    @property
    def config(self) -> EngineConfig:
        """The first served model's, with the largest `max_request_tokens` of all."""
        largest = max(setup.engine.max_request_tokens for setup in self._setups.values())
        return dataclasses.replace(self._first().engine.config, max_request_tokens=largest)

    def set_tenants(self, tenants: Mapping[str, Tenant]) -> None:
        self._tenants = tenants
        for served in self._served.values():
            served.engine.set_tenants(tenants)

    def check_rate(self, tenant: str) -> None:
        """Raises QueueFullError if the tenant has used up its rates with all models; each counts its own."""
        refused: QueueFullError | None = None
        for name in self._ok():
            try:
                self._served[name].engine.check_rate(tenant)
            except QueueFullError as error:
                refused = error
            else:
                return
        if refused is not None:
            raise refused

    async def clear_cache(self) -> None:
        """Clears the caches of all models. Those that load meanwhile clear theirs before they serve; those
        that die or are dropped are passed over."""
        self._num_clears += 1
        for engine in [self._served[name].engine for name in self._ok()]:
            with suppress(EngineDeadError, EngineNotReadyError):
                await engine.clear_cache()

    async def in_thread(self, function: Callable[[], T], size: int) -> T:
        """Runs work that belongs to no model yet in the threads of one, or of another if that dies or is
        dropped."""
        for name in self._ok():
            try:
                return await self._served[name].engine.in_thread(function, size)
            except (EngineDeadError, EngineNotReadyError):
                continue
        raise EngineDeadError(self.death or "no model is left")

    # For requests.

    @property
    def names(self) -> tuple[str, ...]:
        """All models, with those that have failed or were dropped, in order."""
        return tuple(self._setups)

    def state(self, name: str) -> str:
        """ "loading", "ok", "failed: ..." or "dropped"."""
        return self._engines.state(name)

    def facts_of(self, name: str) -> ModelFacts | None:
        """None if the model was never loaded."""
        served = self._served.get(name)
        return None if served is None else served.facts

    def setup_of(self, name: str) -> ModelSetup:
        return self._setups[name]

    def engine(self, name: str) -> "Engine | None":
        """The engine of a model; None if it takes no requests."""
        return self._served[name].engine if name in self._served and self.state(name) == OK else None

    def choosable(self) -> dict[str, ModelFacts | None]:
        """The models that a request without a name may mean: those that were served or configured, and are
        not dropped."""
        return {
            name: self.facts_of(name)
            for name in self._setups
            if self.state(name) != DROPPED and (name in self._served or name in self._expected)
        }

    async def cascade(
        self,
        query: Any,
        documents: Sequence[Any],
        stages: Sequence[tuple[str, int | None, str | None]],
        *,
        deadline: float | None,
        **options: Any,
    ) -> "CascadeResult":
        """Ranks in stages: a model, how many documents it keeps, and its instruction."""
        from maxsimd.engine import Stage

        return await self._engines.rerank(
            query, documents, [Stage(*stage) for stage in stages], deadline=deadline, **options
        )

    def all_facts(self) -> dict[str, ModelFacts]:
        return {name: self._served[name].facts for name in self.names if name in self._ok()}

    # Loading and dropping.

    def may_load(self, name: str) -> bool:
        return self._loadable.setup_of(name) is not None

    async def load(self, name: str) -> None:
        """Loads a model that may be loaded, unless it is served. Goes on if its caller leaves. Raises
        ModelLoadError."""
        await self._change(name, self._load)

    async def drop(self, name: str) -> None:
        """Drops a model when its requests are done or the grace is over. Goes on if its caller leaves. Raises
        LastModelError."""
        await self._change(name, self._drop)

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
        if not task.cancelled() and isinstance(error := task.exception(), ModelLoadError):
            log.error("the model %s is not served: %s", name, in_flags(str(error)))
        self._end_if_none_is_left()

    async def _load(self, name: str) -> None:
        if name in self._setups and self.engine(name) is not None:
            return
        setup = self._loadable.setup_of(name)
        assert setup is not None
        if (link := await asyncio.to_thread(self._loadable.link_out, name)) is not None:
            raise ModelLoadError(
                f"the link {link} leads out of the folder of --models-dir, or nowhere; replace it by a copy"
            )
        self._setups.setdefault(name, setup)
        num_clears = self._num_clears
        await self._engines.load(name, setup.engine, setup.weight)
        await self._take(name, num_clears)
        log.info("the model %s is served: %s", name, self._served[name].facts.how_it_runs)

    async def _drop(self, name: str) -> None:
        if self.state(name) == DROPPED:
            return
        if not any(other != name for other in self._ok()):
            raise LastModelError(name)
        served = self._served.get(name)
        if served is not None:
            served.watch.cancel()
        await self._engines.drop(name, self._grace)
        self._served.pop(name, None)
        self._expected.discard(name)
        log.info("the model %s is dropped", name)

    async def _take(self, name: str, num_clears: int) -> None:
        """Serves a model that has been loaded since all caches were cleared for the `num_clears`-th time."""
        engine = self._engines[name]
        while num_clears < self._num_clears:
            num_clears = self._num_clears
            await engine.clear_cache()
        before = self._served.get(name)
        if before is not None:
            before.watch.cancel()
        engine.set_tenants(self._tenants)
        self._served[name] = _LoadedModel(
            engine, engine.facts, asyncio.create_task(self._watch(name, engine))
        )

    async def _watch(self, name: str, engine: "Engine") -> None:
        await engine.until_dead()
        log.error("the model %s is not served any more: %s", name, engine.death)
        self._end_if_none_is_left()

    def _end_if_none_is_left(self) -> None:
        """Ends a server without a model and none on its way."""
        if self._is_started and not self._changes and not self.is_healthy:
            self.death = "no model is left: " + "; ".join(
                f"{name}: {_reason(self.state(name))}" for name in self._setups
            )
            self._is_left.set()

    def _ok(self) -> list[str]:
        return [name for name in self._served if self.engine(name) is not None]

    def _first(self) -> _LoadedModel:
        if self.death is not None:
            raise EngineDeadError(self.death)
        for name in self.names:
            if name in self._served and self.state(name) == OK:
                return self._served[name]
        raise EngineNotReadyError("no model is served now")

    def _registries(self) -> dict[str, CollectorRegistry]:
        return {name: served.engine.metrics.registry for name, served in self._served.items()}

    def _are_served(self) -> dict[str, bool]:
        """By the names of the models that are not dropped."""
        states = {name: self.state(name) for name in self._setups}
        return {name: state == OK for name, state in states.items() if state != DROPPED}


def _reason(state: str) -> str:
    return state.removeprefix(FAILED)


_RERANKERS = (ScoreType.CROSS_ENCODER, ScoreType.LATE_INTERACTION, ScoreType.LISTWISE)


class Wanted(Enum):
    """The kind of result that a request needs of a model."""

    RANKING = auto()
    VECTORS = auto()
    TOKEN_VECTORS = auto()
    SPARSE_VECTORS = auto()
    CLASSES = auto()
    ANYTHING = auto()
    # The models that the request names.
    CASCADE = auto()


class UndecidedModelError(Exception):
    """The model `name` could not be loaded, and the request may be for it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


_Fits: TypeAlias = Callable[[ModelFacts], bool]


def _anything(facts: ModelFacts) -> bool:
    return True


def _scores(facts: ModelFacts) -> bool:
    return not facts.is_classifier


def _gives(*tasks: str) -> _Fits:
    return lambda facts: any(task in facts.dims for task in tasks)


# The first test that any model passes decides, and the first model that passes it.
_PREFERENCES: dict[Wanted, tuple[_Fits, ...]] = {
    Wanted.RANKING: (
        lambda facts: facts.score_type in _RERANKERS and not facts.is_classifier,
        _scores,
        _anything,
    ),
    Wanted.VECTORS: (_gives("embed"), _gives("token_embed", "sparse_embed"), _anything),
    Wanted.TOKEN_VECTORS: (_gives("token_embed"), _gives("embed"), _anything),
    Wanted.SPARSE_VECTORS: (_gives("sparse_embed"), _gives("embed", "token_embed"), _anything),
    Wanted.CLASSES: (
        lambda facts: facts.is_classifier,
        lambda facts: facts.score_task == "classify",
        _anything,
    ),
    Wanted.ANYTHING: (_anything,),
}


def first_suited(wanted: Wanted, models: Mapping[str, ModelFacts | None]) -> str:
    """The first model that suits a request. Facts are None for a model that has not loaded. Raises
    UndecidedModelError if such a model may come first."""
    for fits in _PREFERENCES[wanted]:
        for name, facts in models.items():
            if facts is None:
                raise UndecidedModelError(name)
            if fits(facts):
                return name
    raise ValueError("there is no model")


def choose_model(models: SeveralModels, name: str | None, wanted: Wanted) -> str:
    """The model that a request goes to, served or not. Raises ApiError."""
    if name:
        return find_model(models, name)
    try:
        return first_suited(wanted, models.choosable())
    except UndecidedModelError as error:
        message = (
            f"the request names no model, and may be for {quoted(error.name)}, which could not be loaded; "
            f"say as `model` which you mean: {_served_here(models)}"
        )
        raise unavailable(message, "model", retry_after=30) from None


def find_model(models: SeveralModels, name: str) -> str:
    """The model of this name, or the only one whose own name it is; dropped models come last. Raises
    ApiError."""
    if name in models.names:
        return name
    called = [each for each in models.names if name in _own_names(models, each)]
    called = [each for each in called if models.state(each) != DROPPED] or called
    if not called:
        raise no_such_model(name, served_names(models))
    if len(called) > 1:
        message = f"several models are {quoted(name)}; say which you mean by its name: "
        raise ApiError(404, "NotFoundError", message + names_of(called), "model")
    return called[0]


def _own_names(models: SeveralModels, name: str) -> tuple[str, ...]:
    facts, given = models.facts_of(name), models.setup_of(name).engine.model
    return tuple(each for each in (given, None if facts is None else facts.name) if each)


def served_names(models: SeveralModels) -> tuple[str, ...]:
    """The models that take requests."""
    return tuple(name for name in models.names if models.engine(name) is not None)


def not_served_error(models: SeveralModels, name: str) -> ApiError:
    """The error of a request whose model takes no requests."""
    state = models.state(name)
    if state == LOADING:
        message = f"the model {quoted(name)} is being loaded; send the request again shortly"
        return unavailable(message, "model")
    if state == DROPPED:
        message = f"the model {quoted(name)} has been dropped; {_served_here(models)}"
        return ApiError(404, "NotFoundError", message, "model")
    reason = in_flags(state.removeprefix(FAILED))
    message = f"the model {quoted(name)} is not served: {reason}; {_served_here(models)}"
    return unavailable(message, "model", retry_after=30)


def _served_here(models: SeveralModels) -> str:
    return "served here: " + (names_of(served_names(models)) or "none")


def lost_during_request(models: SeveralModels, name: str) -> ApiError | None:
    """The error of a request whose model failed or was dropped meanwhile; None if it serves."""
    if not name or models.engine(name) is not None:
        return None
    if models.state(name) == DROPPED:
        message = f"the model {quoted(name)} was dropped before the request was done"
        return unavailable(message, "model", retry_after=30)
    return not_served_error(models, name)
