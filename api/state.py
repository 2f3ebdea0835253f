"""State that all handlers share: the engine, the configuration, the keys, metrics and traces, the memory that
bodies hold, and the requests in flight."""

import asyncio
import copy
import logging
import os
import platform
import re
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeAlias, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from maxsimd import __version__
from maxsimd.api.answer import Answer, ApiError, no_such_model
from maxsimd.api.config import ServerConfig
from maxsimd.api.keys import ApiKeys
from maxsimd.api.logs import dropped_events
from maxsimd.api.media import MediaSources
from maxsimd.api.models import (
    SeveralModels,
    Wanted,
    choose_model,
    find_model,
    lost_during_request,
    not_served_error,
    served_names,
)
from maxsimd.api.reading import LoggedFields, UnreadField, field_warnings_of, refuse
from maxsimd.engine import EngineDeadError, EngineNotReadyError
from maxsimd.engine.requests import Timings
from maxsimd.engine.versions import version

if TYPE_CHECKING:
    from maxsimd.api.fleet.fleet_engine import FleetEngine
    from maxsimd.engine import Engine


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LAG_PERIOD = 0.1
# Counters kept at hand: a look-up takes longer than counting.
_AT_HAND = 512


class ServerMetrics:
    """Requests by route and status, latency, connections, and the event loop's lag."""

    def __init__(self, registry: CollectorRegistry) -> None:
        ProcessCollector(registry=registry)
        registry.register(DroppedEvents())
        Info("maxsimd_build", "Versions that this process runs", registry=registry).info(
            {
                "version": __version__,
                "torch": version("torch"),
                "transformers": version("transformers"),
                "python": platform.python_version(),
            }
        )
        self.requests = Counter(
            "maxsimd_http_requests", "HTTP requests answered", ("route", "status"), registry=registry
        )
        self.seconds = Histogram(
            "maxsimd_http_request_seconds",
            "Seconds from a request's arrival to its answer",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.ready = Gauge("maxsimd_ready", "1 if /ready answers 200, else 0", registry=registry)
        self.in_flight = Gauge("maxsimd_http_in_flight", "HTTP requests being answered", registry=registry)
        self.connections = Gauge("maxsimd_http_connections", "Connections of clients", registry=registry)
        self.cut_connections = Counter(
            "maxsimd_http_cut_connections",
            "Connections that the server ended: idle, slow, or to make room for others",
            ("reason",),
            registry=registry,
        )
        self.lag = Histogram(
            "maxsimd_event_loop_lag_seconds",
            "How much later than asked for the event loop woke a sleeper",
            buckets=_SECONDS,
            registry=registry,
        )

        self._requests_of = lru_cache(_AT_HAND)(self.requests.labels)
        self._seconds_of = lru_cache(_AT_HAND)(self.seconds.labels)

    def note_request(self, route: str, status: int, seconds: float) -> None:
        self._requests_of(route, str(status)).inc()
        self._seconds_of(route).observe(seconds)

    async def watch_lag(self) -> None:
        """Measures the event loop's lag until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_PERIOD
            await asyncio.sleep(_LAG_PERIOD)
            self.lag.observe(max(0.0, loop.time() - due))


class DroppedEvents(Collector):
    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(
            "maxsimd_log_dropped",
            "Events that were not logged because standard error did not take them",
            value=dropped_events(),
        )


log = logging.getLogger("maxsimd.serve")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_NANOSECONDS = 1_000_000_000


def tracing_of_environment() -> "Tracing | None":
    """None if no endpoint is set, or, with a warning, if OpenTelemetry is not installed: platforms set an
    endpoint for every program."""
    named = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    if named is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        return Tracing()
    except ImportError:
        log.warning(
            '%s is set, but nothing is traced: OpenTelemetry is not installed; pip install "maxsimd[otel]"',
            named,
        )
        return None


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """The request as its span shows it. A client chooses only the method and the id."""

    method: str
    route: str
    status: int
    seconds: float
    request_id: str
    timings: Timings | None


class Tracing:
    """Makes spans of requests that have ended. Raises ImportError without OpenTelemetry."""

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.propagate import extract
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        service = os.environ.get("OTEL_SERVICE_NAME", "maxsimd")
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("maxsimd")
        self._context_of, self._within = extract, set_span_in_context
        self._kind, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)

    def note(self, request: "TracedRequest", headers: Mapping[str, str]) -> None:
        """Notes a request that ends now, in the trace that its `headers` name."""
        ended = time.time_ns()
        begun = ended - int(request.seconds * _NANOSECONDS)
        attributes: dict[str, Any] = {
            "http.request.method": request.method,
            "http.route": request.route,
            "http.response.status_code": request.status,
            "maxsimd.request_id": request.request_id,
        }
        span = self._tracer.start_span(
            f"{request.method} {request.route}",
            self._context_of({"traceparent": headers.get("traceparent", "")}),
            self._kind,
            attributes=attributes,
            start_time=begun,
        )
        if request.status >= 500:
            span.set_status(self._failed)
        if request.timings is not None:
            self._note_parts(span, request.timings, begun)
        span.end(ended)

    def close(self) -> None:
        """Sends the remaining spans."""
        self._provider.shutdown()

    def _note_parts(self, span: Any, timings: Timings, begun: int) -> None:
        """One span after the other, in the order of their main parts."""
        context = self._within(span)
        for part in ("queue", "tokenise", "model", "score"):
            length = int(getattr(timings, part) * _NANOSECONDS)
            self._tracer.start_span(part, context, start_time=begun).end(begun + length)
            begun += length


_EXPOSED = "Retry-After, Server-Timing, X-Request-ID, X-Maxsimd-Warnings, X-Maxsimd-Score-Scale"
_PREFLIGHT_SECONDS = 600
_HEADER_NAMES = re.compile(r"[A-Za-z0-9,\t _-]{1,1000}")


class CrossOrigin:
    """The origins whose pages may use the server from a browser."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origin.lower() for origin in origins)

    def headers(self, origin: str | None) -> dict[str, str]:
        """Headers to add to the answer to a page of `origin`."""
        if not self._origins:
            return {}
        # Caches must not hand the answer for one origin to another.
        added = {} if "*" in self._origins else {"Vary": "Origin"}
        if origin is not None and self._allows(origin):
            added["Access-Control-Allow-Origin"] = "*" if "*" in self._origins else origin
            added["Access-Control-Expose-Headers"] = _EXPOSED
        return added

    def preflight(self, method: str, headers: Mapping[str, str], allowed: Collection[str]) -> Answer | None:
        """The answer to a browser's question whether it may send one of the `allowed` methods; None if this
        is no such question of an allowed origin."""
        requested = headers.get("access-control-request-method")
        if method != "OPTIONS" or requested is None or not self._allows(headers.get("origin", "")):
            return None
        answer = {
            "Access-Control-Allow-Methods": ", ".join(sorted(allowed)),
            "Access-Control-Max-Age": str(_PREFLIGHT_SECONDS),
        }
        names = headers.get("access-control-request-headers", "")
        if _HEADER_NAMES.fullmatch(names):
            answer["Access-Control-Allow-Headers"] = names
        return Answer(204, answer)

    def has_host(self, host: str) -> bool:
        """Whether an origin is at this host, with its port."""
        return any(self._allows(f"{scheme}://{host}") for scheme in ("http", "https"))

    def _allows(self, origin: str) -> bool:
        return "*" in self._origins or origin.lower() in self._origins


class FleetView(Protocol):
    """A server's other processes."""

    @property
    def replicas(self) -> tuple[int, int]:
        """The numbers of engines that are ready and that are wanted."""

    @property
    def secret(self) -> bytes:
        """The secret that only this server's fronts know."""

    async def metrics(self, own: bytes) -> bytes:
        """Extends this process's page of /metrics to the whole server's."""


# A server serves one model, by engines in this process or in others, or several models.
Serving: TypeAlias = "Engine | FleetEngine | SeveralModels"


# Infinity's client sends this for no name.
_NO_NAME = "default/not-specified"

Phase = Literal["starting", "ok", "restarting", "draining", "dead"]


class HeldBytes:
    """The bytes that one request holds of a `BodyBudget`."""

    def __init__(self, budget: "BodyBudget") -> None:
        self._budget = budget
        self.bytes = 0

    def add(self, count: int) -> None:
        """Raises ApiError (429) if others hold too much. A request alone may hold as much as a body may
        have."""
        if self._budget.bytes > self.bytes and self._budget.bytes + count > self._budget.most:
            message = "other requests' bodies take the memory that there is for them; try again shortly"
            raise ApiError(429, "QueueFullError", message, retry_after=1)
        self.bytes += count
        self._budget.bytes += count


class BodyBudget:
    """The bytes that all requests together hold: at most `most` while there are several requests."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0

    @contextmanager
    def hold(self) -> Iterator[HeldBytes]:
        """Frees a request's bytes when it is answered."""
        held = HeldBytes(self)
        try:
            yield held
        finally:
            self.bytes -= held.bytes


@dataclass(slots=True)
class RequestNotes:
    """Fields that the log has of a request once they are known."""

    tenant: str = ""
    model: str = ""


@contextmanager
def naming_lost_model(models: SeveralModels | None, name: str) -> Iterator[None]:
    """Turns a failure or a drop of the model during a request into an error that names the model: the others
    still serve."""
    try:
        yield
    except (EngineDeadError, EngineNotReadyError) as error:
        if models is None or (lost := lost_during_request(models, name)) is None:
            raise
        raise lost from error


class ServerState:
    """Lives as long as the server, which may start before its engine. While `draining`, /ready answers 503
    and the server still accepts work. While `closing`, it refuses new work. `comes_back` says that a dead
    engine is started again. Raises SetupError if the file of API keys is invalid."""

    def __init__(self, engine: Serving, config: ServerConfig, fleet: FleetView | None = None) -> None:
        self.models = engine if isinstance(engine, SeveralModels) else None
        # With several models, `serving` chooses the one that answers.
        self.engine = cast("Engine | FleetEngine", engine)
        self.config = config
        self.fleet = fleet
        self.keys = ApiKeys(
            config,
            set_tenants=engine.set_tenants,
            must_be_named=engine.caches_by_tenant,
            secret=None if fleet is None else fleet.secret,
        )
        self.cross_origin = CrossOrigin(config.cors_origin)
        self.metrics = ServerMetrics(engine.metrics.registry)
        self.max_body_bytes = config.max_body_mb * 1024 * 1024
        self.tracing = tracing_of_environment()
        self.bodies = BodyBudget(config.max_bodies_mb * 1024 * 1024)
        self.media = MediaSources(config)
        self.draining = self.closing = False
        # Whether only this machine can reach the server; set once it listens.
        self.is_on_loopback = False
        self.logged_fields = LoggedFields()
        # Warnings about unread fields, for the answer to one request.
        self.field_warnings: tuple[str, ...] = ()
        # Bytes of one request, until it is answered.
        self.held = HeldBytes(self.bodies)
        self._name: str | None = None
        self._name_in_path = ""
        self._notes = RequestNotes()
        self.comes_back = config.restart_on_failure
        self._in_flight: set[asyncio.Timeout] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.metrics.in_flight.set_function(lambda: len(self._in_flight))
        self.metrics.ready.set_function(lambda: self.is_ready)

    async def watch(self) -> None:
        """Measures the event loop's lag and takes changes of the API keys, until cancelled."""
        await asyncio.gather(self.metrics.watch_lag(), self.keys.watch())

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that the model is served under: those of the configuration, or its own."""
        if self._name is not None:
            return (self._name,)
        if self.models is not None:
            return served_names(self.models)
        return self.config.served_model_name or (self.engine.facts.name,)

    @property
    def called(self) -> str:
        """The model that answers this request, among several; else empty."""
        return self._name or ""

    @property
    def is_ready(self) -> bool:
        return self.phase == "ok"

    @property
    def phase(self) -> Phase:
        """`ok` while the server takes requests, or why it does not."""
        if self.engine.death is not None and not self.comes_back:
            return "dead"
        if self.draining or self.closing:
            return "draining"
        if self.engine.death is not None:
            return "restarting"
        return "ok" if self.engine.is_healthy else "starting"

    @asynccontextmanager
    async def in_flight(self) -> AsyncIterator[None]:
        """Counts a request until its answer. Raises EngineNotReadyError inside when `end_requests` ends
        it."""
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
        """Ends the requests in flight with a 503; returns how many there are."""
        for end in self._in_flight:
            if not end.expired():
                end.reschedule(0)
        return len(self._in_flight)

    @property
    def is_quiet(self) -> bool:
        return not self._in_flight

    async def until_quiet(self) -> None:
        await self._quiet.wait()

    def check_ready(self) -> None:
        """Refuses work that the server cannot take now."""
        if self.engine.death is not None:
            raise EngineDeadError(self.engine.death)
        if self.closing or not self.engine.is_healthy:
            raise EngineNotReadyError("the server is starting or shutting down")

    def for_request(self, notes: RequestNotes, name_in_path: str) -> Self:
        """Returns a state for one request, which notes the request's model. A name in the path wins over the
        body's."""
        one = copy.copy(self)
        one._notes, one._name_in_path = notes, name_in_path
        return one

    def holding(self, held: HeldBytes) -> Self:
        """Returns a state for a request that holds these bytes."""
        one = copy.copy(self)
        one.held = held
        return one

    def unread_name(self, name: str | None) -> tuple[UnreadField, ...]:
        """The body's field `model`, if the path names another model."""
        is_other = bool(name) and bool(self._name_in_path) and name != self._name_in_path
        return (UnreadField("model", None),) if is_other else ()

    def serving(self, name: str | None, wanted: Wanted) -> Self:
        """Returns the state with the model that answers: the one that is named, or the first that suits
        `wanted`. Raises ApiError for an unknown model, and for one that is not served now."""
        name = self._name_in_path or name
        if self.models is None:
            self.check_model(name)
            self._notes.model = self.model_name
            return self
        if wanted is Wanted.CASCADE:
            self.check_model(name)
            return self
        called = choose_model(self.models, None if name == _NO_NAME else name, wanted)
        self._notes.model = called
        engine = self.models.engine(called)
        if engine is None:
            raise not_served_error(self.models, called)
        one = copy.copy(self)
        one.models, one.engine, one._name = None, engine, called
        return one

    def warning_about(self, unread: Collection[UnreadField], route: str) -> Self:
        """Returns a state whose answers warn about these unread fields. Raises InvalidRequestError if the
        server refuses such requests."""
        if not unread:
            return self
        self.logged_fields.note(route, unread)
        if self.config.strict_fields:
            refuse(unread)
        one = copy.copy(self)
        one.field_warnings = (*self.field_warnings, *field_warnings_of(unread))
        return one

    @property
    def reads_pictures(self) -> bool:
        """Whether the model, or any of several, reads pictures."""
        if self.models is not None:
            return any(facts.reads_pictures for facts in self.models.all_facts().values())
        return self.engine.facts.reads_pictures

    def check_model(self, name: str | None) -> None:
        if self.models is not None:
            if name and name != _NO_NAME:
                find_model(self.models, name)
            return
        if name and name not in (*self.model_names, self.engine.facts.name, _NO_NAME):
            raise no_such_model(name, self.model_names)
