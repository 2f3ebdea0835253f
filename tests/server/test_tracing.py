"""OpenTelemetry's traces, as a collector gets them from a real server."""

import gzip
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from maxsimd.api.state import tracing_of_environment
from tests.server.conftest import QuietHandler, StartServer, web_server

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "what-a-client-has-written"


@dataclass
class Collector:
    url: str = ""
    spans: list[Any] = field(default_factory=list)
    raw: bytes = b""


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            found.raw += body
            asked = ExportTraceServiceRequest.FromString(body)
            found.spans += [
                span for each in asked.resource_spans for scope in each.scope_spans for span in scope.spans
            ]
            self.send_response(200)
            self.end_headers()

    with web_server(Handler) as found.url:
        yield found


def _attributes(span: Any) -> dict[str, Any]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


def test_opentelemetry_is_optional(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert tracing_of_environment() is None
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set, but nothing is traced: OpenTelemetry is" in caplog.text


def test_a_request_is_a_span_with_its_parts(start_server: StartServer, collector: Collector) -> None:
    server = start_server("--dtype", "float32", environment={"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url})
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "my-request"}
    body = {"query": SECRET, "documents": [SECRET, "another"]}
    assert httpx.post(server.url + "/rerank", json=body, headers=headers).status_code == 200
    assert httpx.post(server.url + "/rerank", json=body | {"documents": []}).status_code == 400
    assert httpx.post(server.url + f"/{SECRET}", json=body).status_code == 404
    assert server.terminate() == 0, "what has not been sent is sent before the end"

    spans = {span.span_id: span for span in collector.spans}
    (request,) = [span for span in spans.values() if span.trace_id.hex() == TRACE and span.kind == 2]
    assert (request.name, request.parent_span_id.hex()) == ("POST /rerank", PARENT)
    assert _attributes(request) == {
        "http.request.method": "POST", "http.route": "/rerank", "http.response.status_code": 200,
        "maxsimd.request_id": "my-request",
    }  # fmt: skip
    parts = [span for span in spans.values() if span.parent_span_id == request.span_id]
    assert [part.name for part in sorted(parts, key=lambda part: part.start_time_unix_nano)] == [
        *("queue", "tokenise", "model", "score")
    ]
    statuses = {_attributes(span).get("http.response.status_code") for span in spans.values()}
    assert {200, 400, 404} <= statuses
    assert SECRET.encode() not in collector.raw
