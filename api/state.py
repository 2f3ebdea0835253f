"""What all handlers share: the engine, the configuration, the keys, the metrics, and what is in flight."""

import asyncio
import copy
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar, Unpack, cast

from prometheus_client import CollectorRegistry

from maxsimd.api.answer import Answer, no_such_model
from maxsimd.api.body import BodyBudget
from maxsimd.api.config import ServerConfig
from maxsimd.api.keys import ApiKeys
from maxsimd.api.media import MediaSources
from maxsimd.api.models import SeveralModels, Wanted, chosen, named, not_served, served
from maxsimd.api.request_warnings import LoggedFields, UnreadField, messages_of, refuse
from maxsimd.api.telemetry import ServerMetrics, tracing_of_environment
from maxsimd.engine import EngineDeadError, EngineNotReadyError
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.facts import ModelFacts
from maxsimd.engine.metrics import EngineStats
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.requests import (
    ClassifyResult,
    EmbedResult,
    RankedDocument,
    RerankResult,
    ScoreOptions,
    ScoreResult,
    SparseEmbedResult,
    TokenEmbedResult,
)
from maxsimd.engine.tenants import Tenant

_EXPOSED = "Retry-After, Server-Timing, X-Request-ID, X-Maxsimd-Warnings"
# What a browser may go by without asking again.
_PREFLIGHT_SECONDS = 600
_HEADER_NAMES = re.compile(r"[A-Za-z0-9,\t _-]{1,1000}")


class CrossOrigin:
    """The origins that are allowed, and the headers that tell browsers so."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origin.lower() for origin in origins)

    def headers(self, origin: str | None) -> dict[str, str]:
        """What to add to the answer to a request from a page of `origin`."""
        if not self._origins:
            return {}
        # Caches must not hand the answer for one origin to another.
        added = {} if "*" in self._origins else {"Vary": "Origin"}
        if origin is not None and self._allows(origin):
            added["Access-Control-Allow-Origin"] = "*" if "*" in self._origins else origin
            added["Access-Control-Expose-Headers"] = _EXPOSED
        return added

    def preflight(self, method: str, headers: Mapping[str, str], allowed: Collection[str]) -> Answer | None:
        """The answer to a browser that asks whether it may send a request with one of the `allowed` methods;
        None where `method` and `headers` are no such question of an allowed origin."""
        asked = headers.get("access-control-request-method")
        if method != "OPTIONS" or asked is None or not self._allows(headers.get("origin", "")):
            return None
        answer = {
            "Access-Control-Allow-Methods": ", ".join(sorted(allowed)),
            "Access-Control-Max-Age": str(_PREFLIGHT_SECONDS),
        }
        names = headers.get("access-control-request-headers", "")
        if _HEADER_NAMES.fullmatch(names):
            answer["Access-Control-Allow-Headers"] = names
        return Answer(204, answer)

    def _allows(self, origin: str) -> bool:
        return "*" in self._origins or origin.lower() in self._origins


T = TypeVar("T")


class FleetView(Protocol):
    """What there is of a server's other processes."""

    @property
    def replicas(self) -> tuple[int, int]:
        """How many engines are there, and how many are meant to be."""

    async def metrics(self, own: bytes) -> bytes:
        """From the page of /metrics that this process has by itself to that of the whole server."""


class HasRegistry(Protocol):
    """Counts something."""

    @property
    def registry(self) -> CollectorRegistry: ...


class ServedStream(Protocol):
    """See `ScoreStream`."""

    @property
    def result(self) -> ScoreResult: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: Any) -> None: ...

    def __aiter__(self) -> AsyncIterator[list[RankedDocument]]: ...


class ServedEngine(Protocol):
    """What handlers and the server's life use of an engine; see `Engine`."""

    death: str | None
    restart_obstacle: str | None

    @property
    def metrics(self) -> HasRegistry: ...

    @property
    def config(self) -> EngineConfig: ...

    @property
    def caches_by_tenant(self) -> bool:
        """Whether tenants need names, by which their cached entries are found. Known before the start."""

    @property
    def is_healthy(self) -> bool: ...

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def tokenizer(self) -> TextTokenizer: ...

    @property
    def max_tokens(self) -> int: ...

    async def start(self) -> None: ...

    async def stop(self, grace: float | None = None) -> None: ...

    async def until_dead(self) -> None: ...

    def stats(self) -> EngineStats: ...

    def set_tenants(self, tenants: Mapping[str, Tenant]) -> None: ...

    def check_rate(self, tenant: str) -> None: ...

    async def clear_cache(self) -> None: ...

    async def in_thread(self, function: Callable[[], T], size: int) -> T: ...

    async def conversation(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool, continue_final_message: bool
    ) -> tuple[str, bool]: ...

    async def score(self, queries: Any, documents: Any, **options: Unpack[ScoreOptions]) -> ScoreResult: ...

    async def rerank(
        self,
        query: Any,
        documents: Any,
        *,
        top_n: int | None = None,
        score_threshold: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> RerankResult: ...

    def stream(self, queries: Any, documents: Any, **options: Unpack[ScoreOptions]) -> ServedStream: ...

    @property
    def embed(self) -> Callable[..., Awaitable[EmbedResult]]: ...

    @property
    def embed_tokens(self) -> Callable[..., Awaitable[TokenEmbedResult]]: ...

    @property
    def embed_sparse(self) -> Callable[..., Awaitable[SparseEmbedResult]]: ...

    @property
    def classify(self) -> Callable[..., Awaitable[ClassifyResult]]: ...


# What a server lives around.
Serving: TypeAlias = ServedEngine | SeveralModels


# What Infinity's client sends where it is to name no model.
_NO_NAME = "default/not-specified"

Phase = Literal["starting", "ok", "restarting", "draining", "dead"]


@dataclass(slots=True)
class RequestNotes:
    """The log's fields of a request besides its path and status, as far as they are known at its end."""

    tenant: str = ""
    model: str = ""


class ServerState:
    """Lives as long as the server, which may start before its engine does. While `draining`, the server tells
    load balancers that it is not ready, and still accepts work. While `closing`, it refuses new work and
    finishes work in flight. `comes_back` says that an engine that dies is started again. Raises SetupError if
    the configuration's file of API keys is invalid."""

    def __init__(self, engine: Serving, config: ServerConfig) -> None:
        self.models = engine if isinstance(engine, SeveralModels) else None
        # Of several models, requests are answered in the state of one: see `serving`.
        self.engine = cast("ServedEngine", engine)
        self.config = config
        self.keys = ApiKeys(config, set_tenants=engine.set_tenants, must_be_named=engine.caches_by_tenant)
        self.cross_origin = CrossOrigin(config.cors_origin)
        self.metrics = ServerMetrics(engine.metrics.registry)
        self.max_body_bytes = config.max_body_mb * 1024 * 1024
        self.tracing = tracing_of_environment()
        self.bodies = BodyBudget(config.max_bodies_mb * 1024 * 1024)
        self.media = MediaSources(config)
        self.draining = self.closing = False
        self.logged_fields = LoggedFields()
        # Warnings about unread fields, for the answer to one request.
        self.field_warnings: tuple[str, ...] = ()
        self._name: str | None = None
        # The model that the path of one request names.
        self._name_in_path = ""
        self._notes = RequestNotes()
        self.fleet: FleetView | None = None
        self.comes_back = config.restart_on_failure
        self._in_flight: set[asyncio.Timeout] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.metrics.in_flight.set_function(lambda: len(self._in_flight))
        self.metrics.ready.set_function(lambda: self.is_ready)

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names under which the model is served: those of the configuration, or its own."""
        if self._name is not None:
            return (self._name,)
        if self.models is not None:
            return served(self.models)
        return self.config.served_model_name or (self.engine.facts.name,)

    @property
    def called(self) -> str:
        """Of a request's state among several models: the model that answers it."""
        return self._name or ""

    @property
    def is_ready(self) -> bool:
        return self.phase == "ok"

    @property
    def phase(self) -> Phase:
        """`ok` while the server takes requests; else why it does not."""
        if self.engine.death is not None and not self.comes_back:
            return "dead"
        if self.draining or self.closing:
            return "draining"
        if self.engine.death is not None:
            return "restarting"
        return "ok" if self.engine.is_healthy else "starting"

    @asynccontextmanager
    async def in_flight(self) -> AsyncIterator[None]:
        """Counts a request from its arrival to its answer. Raises EngineNotReadyError in it once it is
        ended."""
        end = asyncio.timeout(None)
        self._in_flight.add(end)
        self._quiet.clear()
        try:
            async with end:
                yield
        except TimeoutError:
            if end.expired():
                raise EngineNotReadyError("the server is shutting down") from None
            raise
        finally:
            self._in_flight.remove(end)
            if not self._in_flight:
                self._quiet.set()

    def end_requests(self) -> int:
        """Ends what is in flight, as if the server had refused it; returns how many requests these are."""
        for end in self._in_flight:
            if not end.expired():
                end.reschedule(0)
        return len(self._in_flight)

    @property
    def is_quiet(self) -> bool:
        """Whether no request is in flight."""
        return not self._in_flight

    async def until_quiet(self) -> None:
        """Returns when no request is in flight."""
        await self._quiet.wait()

    def check_ready(self) -> None:
        """Refuses work that the server cannot take now."""
        if self.engine.death is not None:
            raise EngineDeadError(self.engine.death)
        if self.closing or not self.engine.is_healthy:
            raise EngineNotReadyError("the server is starting or shutting down")

    def for_request(self, notes: RequestNotes, name_in_path: str) -> Self:
        """Returns a state for one request, which notes the request's model. If its path names one, the name
        in its body is not read."""
        one = copy.copy(self)
        one._notes, one._name_in_path = notes, name_in_path
        return one

    def unread_name(self, name: str | None) -> tuple[UnreadField, ...]:
        """The field with the name in the request's body, if the path names another model."""
        is_other = bool(name) and bool(self._name_in_path) and name != self._name_in_path
        return (UnreadField("model", None),) if is_other else ()

    def serving(self, name: str | None, wanted: Wanted) -> Self:
        """The state in which a request is answered that names this model, or none and wants something. Raises
        ApiError for a model that there is not, or that is not served now."""
        name = self._name_in_path or name
        if self.models is None:
            self.check_model(name)
            self._notes.model = self.model_name
            return self
        if wanted is Wanted.CASCADE:
            self.check_model(name)
            return self
        called = chosen(self.models, None if name == _NO_NAME else name, wanted)
        self._notes.model = called
        engine = self.models.engine(called)
        if engine is None:
            raise not_served(self.models, called)
        one = copy.copy(self)
        one.models, one.engine, one._name = None, engine, called
        return one

    def telling_of(self, unread: Collection[UnreadField], route: str) -> Self:
        """Returns a state whose answers warn about these unread fields. Raises InvalidRequestError
        if the server refuses such requests."""
        if not unread:
            return self
        self.logged_fields.note(route, unread)
        if self.config.strict_fields:
            refuse(unread)
        one = copy.copy(self)
        one.field_warnings = (*self.field_warnings, *messages_of(unread))
        return one

    @property
    def reads_pictures(self) -> bool:
        """Whether the model reads pictures that a request may name, or any of several."""
        if self.models is not None:
            return any(facts.reads_pictures for facts in self.models.all_facts().values())
        return self.engine.facts.reads_pictures

    def check_model(self, name: str | None) -> None:
        if self.models is not None:
            if name and name != _NO_NAME:
                named(self.models, name)
            return
        if name and name not in (*self.model_names, self.engine.facts.name, _NO_NAME):
            raise no_such_model(name, self.model_names)
