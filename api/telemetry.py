"""What the server counts, on top of the engine's own metrics and in the same registry."""

import asyncio
import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from maxsimd import __version__
from maxsimd.api.logs import dropped_events
from maxsimd.engine.requests import Timings
from maxsimd.engine.versions import version

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LAG_PERIOD = 0.1
# Labels whose counters are kept at hand: to look one up takes longer than to count.
_AT_HAND = 512


class ServerMetrics:
    """HTTP requests by route and status, their latency, and how late the event loop is."""

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
        """Counts an HTTP request that took so long."""
        self._requests_of(route, str(status)).inc()
        self._seconds_of(route).observe(seconds)

    async def watch_lag(self) -> None:
        """Measures the event loop's lag until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            asked = loop.time() + _LAG_PERIOD
            await asyncio.sleep(_LAG_PERIOD)
            self.lag.observe(max(0.0, loop.time() - asked))


class DroppedEvents(Collector):
    """Events of the log that this process has dropped."""

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
    """Returns None if no endpoint is set, or, with a warning, if OpenTelemetry is not installed. That is no
    error, because platforms set an endpoint for every program."""
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
class Traced:
    """What a span says of a request: of what a client has written, its method and the id that it gave."""

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

    def note(self, request: "Traced", headers: Mapping[str, str]) -> None:
        """Notes a request that ends now. It belongs to the trace that its `headers` name, if they do."""
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
        """Sends what has not been sent."""
        self._provider.shutdown()

    def _note_parts(self, span: Any, timings: Timings, begun: int) -> None:
        """The parts of a request's time, one behind the other, in the order in which most of each passes."""
        context = self._within(span)
        for part in ("queue", "tokenise", "model", "score"):
            length = int(getattr(timings, part) * _NANOSECONDS)
            self._tracer.start_span(part, context, start_time=begun).end(begun + length)
            begun += length
