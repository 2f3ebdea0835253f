"""OpenTelemetry's traces: a span a request, with one inside for each part of its time. Sent where the
environment names an endpoint (OTEL_EXPORTER_OTLP_ENDPOINT), by a thread of the library's own."""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxsimd.engine.requests import Timings

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
