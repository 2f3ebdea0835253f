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
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeAlias, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from maxsimd import __version__
from maxsimd.api.answer import Answer, ApiError, no_such_model, quoted
from maxsimd.api.batches import BatchStore
from maxsimd.api.config import ServerConfig
from maxsimd.api.keys import ApiKeys
from maxsimd.api.logs import dropped_events
from maxsimd.api.media import MediaSources
from maxsimd.api.models import SeveralModels, Wanted
from maxsimd.api.reading import LoggedFields, UnreadField, field_warnings_of
from maxsimd.api.usage import UNNAMED, UsageLog, Used
from maxsimd.engine import EngineDeadError, EngineNotReadyError, InvalidRequestError, Usage
from maxsimd.engine.requests import InputType, Timings
from maxsimd.engine.versions import version

if TYPE_CHECKING:
    from maxsimd.api.fleet.fleet_engine import FleetEngine
    from maxsimd.engine import Engine


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LAG_PERIOD = 0.1
# Counters kept at hand: a look-up takes longer than counting.
_AT_HAND = 512


class ServerMetrics:
    """Metrics of requests, connections and the event loop."""

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
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, buckets=_SECONDS, registry=registry)
        self.requests = counter("maxsimd_http_requests", "HTTP requests answered", ("route", "status"))
        about_seconds = "Seconds from a request's arrival to its answer"
        self.seconds = histogram("maxsimd_http_request_seconds", about_seconds, ("route",))
        self.ready = gauge("maxsimd_ready", "1 if /ready answers 200, else 0")
        self.in_flight = gauge("maxsimd_http_in_flight", "HTTP requests being answered")
        self.connections = gauge("maxsimd_http_connections", "Connections of clients")
        about_cuts = "Connections that the server ended: idle, slow, or to make room for others"
        self.cut_connections = counter("maxsimd_http_cut_connections", about_cuts, ("reason",))
        about_lag = "How much later than asked for the event loop woke a sleeper"
        self.lag = histogram("maxsimd_event_loop_lag_seconds", about_lag)
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
        what = "Events that were not logged because standard error did not take them"
        yield CounterMetricFamily("maxsimd_log_dropped", what, value=dropped_events())


log = logging.getLogger("maxsimd.serve")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_NANOSECONDS = 1_000_000_000


def tracing_of_environment() -> "Tracing | None":
    """None without an endpoint, or, with a warning, without OpenTelemetry: platforms set it for all."""
    named = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    if named is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        return Tracing()
    except ImportError:
        remedy = "OpenTelemetry is not installed; pip install '.[otel]' in the checkout"
        log.warning("%s is set, but nothing is traced: %s", named, remedy)
        return None


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

    def note(
        self,
        method: str,
        route: str,
        answer: Answer,
        seconds: float,
        request_id: str,
        headers: Mapping[str, str],
    ) -> None:
        """Notes a request that ends now, in the trace that its `headers` name. Only the method and the id in
        the span come from the client."""
        ended = time.time_ns()
        begun = ended - int(seconds * _NANOSECONDS)
        span = self._tracer.start_span(
            f"{method} {route}",
            self._context_of({"traceparent": headers.get("traceparent", "")}),
            self._kind,
            attributes={
                "http.request.method": method,
                "http.route": route,
                "http.response.status_code": answer.status,
                "maxsimd.request_id": request_id,
            },
            start_time=begun,
        )
        if answer.status >= 500:
            span.set_status(self._failed)
        for part in ("queue", "tokenise", "model", "score") if answer.timings is not None else ():
            length = int(getattr(answer.timings, part) * _NANOSECONDS)
            self._tracer.start_span(part, self._within(span), start_time=begun).end(begun + length)
            begun += length
        span.end(ended)

    def close(self) -> None:
        """Sends the remaining spans."""
        self._provider.shutdown()


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
        """The answer to a browser of an allowed origin that asks whether it may send something; else None."""
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

    async def metrics(self) -> bytes:
        """The whole server's page of /metrics."""


# A server serves one model, by engines in this process or in others, or several models.
Serving: TypeAlias = "Engine | FleetEngine | SeveralModels"


# Infinity's client sends this for no name.
_NO_NAME = "default/not-specified"

Phase = Literal["starting", "ok", "restarting", "draining", "dead"]


@dataclass(frozen=True, slots=True)
class ReadAs:
    """How texts to embed are read, for clients that can say it only in the model's name: `MODEL:query`,
    `MODEL:document` or `MODEL@PROMPT_NAME`. `name` is such a name, or empty."""

    name: str = ""
    input_type: InputType | None = None
    prompt_name: str | None = None


_INPUT_TYPES: Mapping[str, InputType] = {"query": "query", "document": "document"}


def _split_name(name: str) -> tuple[str, ReadAs]:
    """The model in a name, and how it is to read texts."""
    model, _, end = name.rpartition(":")
    if end in _INPUT_TYPES:
        return model, ReadAs(name, input_type=_INPUT_TYPES[end])
    model, _, end = name.rpartition("@")
    return model, ReadAs(name, prompt_name=end)


@dataclass(slots=True)
class BodyBudget:
    """The bytes that all requests together hold: at most `most` while there are several requests."""

    most: int
    bytes: int = 0


class HeldBytes:
    """The bytes that one request holds of a `BodyBudget`. As a context manager, it frees them at its end."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._bytes = 0

    def add(self, count: int) -> None:
        """Raises ApiError (429) if others hold too much. A request alone may hold as much as a body."""
        if self._budget.bytes > self._bytes and self._budget.bytes + count > self._budget.most:
            message = "other requests' bodies take the memory that there is for them; try again shortly"
            raise ApiError(429, message, retry_after=1)
        self._bytes += count
        self._budget.bytes += count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._budget.bytes -= self._bytes
        self._bytes = 0


class HasUsage(Protocol):
    """A result of the engine."""

    @property
    def usage(self) -> Usage: ...

    @property
    def timings(self) -> Timings: ...


@dataclass(slots=True)
class RequestNotes:
    """Facts of one request that are not known at once: for the log, and of its usage, by model."""

    tenant: str = ""
    model: str = ""
    is_admin: bool = False
    documents: int = 0
    timeout: float | None = None
    used: list[tuple[str, Used]] = field(default_factory=list)


@contextmanager
def naming_lost_model(models: SeveralModels | None, name: str) -> Iterator[None]:
    """Turns a model's end during a request into an error that names the model: the others still serve."""
    try:
        yield
    except (EngineDeadError, EngineNotReadyError) as error:
        if models is None or (lost := models.lost_during_request(name)) is None:
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
        self.usage = UsageLog(None if config.usage_file is None else Path(config.usage_file).expanduser())
        engine.metrics.registry.register(self.usage)
        self.batches = None
        if config.batch_dir is not None:
            self.batches = BatchStore(Path(config.batch_dir).expanduser(), config)
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
        self.called = ""  # the model that answers this request, among several
        self.name_in_path = ""
        self.read_as = ReadAs()
        self._notes = RequestNotes()
        self.comes_back = config.restart_on_failure
        self._in_flight: set[asyncio.Timeout] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.metrics.in_flight.set_function(lambda: len(self._in_flight))
        self.metrics.ready.set_function(lambda: self.is_ready)

    async def watch(self) -> None:
        """Measures the event loop's lag, takes changes of the API keys and writes usage, until cancelled."""
        await asyncio.gather(self.metrics.watch_lag(), self.keys.watch(), self.usage.watch())

    @property
    def tenant(self) -> str:
        return self._notes.tenant

    def check_owner_of_digests(self) -> None:
        """Refuses documents by digest for a key that may be taken for another one after a restart."""
        if self.engine.config.cache_dir is not None and self.keys.may_change_number(self.tenant):
            raise InvalidRequestError(
                "documents by digest are kept over restarts for each tenant apart, and this key has no name; "
                "add name=... to it in --api-key-file, or give texts",
                "documents",
            )

    def batches_of_tenant(self) -> BatchStore:
        """Raises ApiError without a folder for batches, and for a key that may be taken for another one."""
        if self.batches is None:
            message = (
                "this server runs no batch jobs; start it with --batch-dir, or send the requests themselves"
            )
            raise ApiError(404, message)
        if self.keys.may_change_number(self.tenant):
            message = (
                "files and batch jobs are kept by the names of keys, and this key has none; add name=... "
            )
            raise ApiError(403, message + "in --api-key-file")
        return self.batches

    @property
    def is_admin(self) -> bool:
        return self._notes.is_admin

    @property
    def timeout(self) -> float | None:
        """Seconds that the request may take, if its client has said so outside of the body."""
        return self._notes.timeout

    def note_documents(self, number: int) -> None:
        self._notes.documents = number

    def note_used(self, result: HasUsage, model: str = "") -> None:
        """Notes a result of the model that answers, or of the `model` of a stage, for the tenant's usage."""
        used = Used.of(self._notes.documents, result.usage, result.timings)
        if self._notes.used:  # by an earlier stage
            used.requests = used.documents = 0
        self._notes.used.append((model or self._notes.model, used))

    def count_usage(self, notes: RequestNotes, status: int) -> None:
        """Counts a request that was answered, or refused."""
        is_unnamed = self.usage.is_kept and self.keys.may_change_number(notes.tenant)
        tenant = UNNAMED if is_unnamed else notes.tenant
        for model, used in notes.used:
            self.usage.count(tenant, model, used)
        if status in (413, 429):
            only = self.model_name if self.models is None and self.is_ready else ""
            self.usage.count(tenant, notes.model or only, Used(refused=1))

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that the model is served under: those of the configuration, or its own."""
        if self.called:
            return (self.called,)
        if self.models is not None:
            return self.models.served_names
        return self.config.served_model_name or (self.engine.facts.name,)

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
        """Counts a request until its answer. Raises EngineNotReadyError if `end_requests` ends it."""
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

    def _with(self, **changes: Any) -> Self:
        one = copy.copy(self)
        vars(one).update(changes)
        return one

    def for_request(self, notes: RequestNotes, name_in_path: str) -> Self:
        """Returns a state for one request, with its notes. A name in the path wins over the body's."""
        return self._with(_notes=notes, name_in_path=name_in_path, held=HeldBytes(self.bodies))

    def unread_name(self, name: str | None) -> tuple[UnreadField, ...]:
        """The body's field `model`, if the path names another model."""
        is_other = bool(name) and bool(self.name_in_path) and name != self.name_in_path
        return (UnreadField("model", None),) if is_other else ()

    def serving(self, name: str | None, wanted: Wanted) -> Self:
        """Returns the state with the model that answers: the one that is named, or the first that suits
        `wanted`. Raises ApiError for an unknown model, and for one that is not served now."""
        name, read_as = self.name_in_path or name, ReadAs()
        if name and not self._is_served_as(name):
            model, said = _split_name(name)
            if self._is_served_as(model):
                name, read_as = model, said
        if self.models is None:
            self.check_model(name)
            self._notes.model = self.model_name
            return self._with(read_as=read_as)
        if wanted is Wanted.CASCADE:
            self.check_model(name)
            return self
        called = self.models.choose(None if name == _NO_NAME else name, wanted)
        self._notes.model = called
        engine = self.models.engine(called)
        if engine is None:
            raise self.models.not_served_error(called)
        return self._with(models=None, engine=engine, called=called, read_as=read_as)

    def check_name_is_plain(self) -> None:
        """Refuses a model's name that says how texts are read, on routes that read them otherwise."""
        if self.read_as.name:
            message = f"{quoted(self.read_as.name)} is for texts to embed; give the model's name alone"
            raise InvalidRequestError(message, "model")

    def warning_about(self, unread: Collection[UnreadField], route: str) -> Self:
        """Returns a state whose answers warn about unread fields, or raises InvalidRequestError."""
        if not unread:
            return self
        self.logged_fields.note(route, unread)
        if self.config.strict_fields:
            first = next(iter(unread))
            message = (
                f"{first}, and this server refuses such fields (--strict-fields); correct it or leave it out"
            )
            raise InvalidRequestError(message, first.path)
        return self._with(field_warnings=(*self.field_warnings, *field_warnings_of(unread)))

    @property
    def reads_pictures(self) -> bool:
        """Whether the model, or any of several, reads pictures."""
        if self.models is not None:
            return any(facts.reads_pictures for facts in self.models.all_facts().values())
        return self.engine.facts.reads_pictures

    def check_model(self, name: str | None) -> None:
        if self.models is not None:
            if name and name != _NO_NAME:
                self.models.find(name)
        elif name and not self._is_served_as(name):
            raise no_such_model(name, self.model_names)

    def _is_served_as(self, name: str) -> bool:
        if self.models is not None:
            return name == _NO_NAME or bool(self.models.called(name))
        return name in (*self.model_names, self.engine.facts.name, _NO_NAME)
