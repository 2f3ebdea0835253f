"""What the server counts, as a monitor reads it."""

import asyncio
import contextlib
import time

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from maxsimd.api.metrics import ServerMetrics
from tests.waiting import until

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


def _page(registry: CollectorRegistry) -> dict[str, tuple[str, str, dict[str, list[dict[str, str]]]]]:
    """Of each metric: its kind, what it says of itself, and its samples' labels by name."""
    shown = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        labels: dict[str, list[dict[str, str]]] = {}
        for sample in family.samples:
            labels.setdefault(sample.name, []).append(sample.labels)
        if not family.name.endswith("_created"):
            shown[family.name] = (family.type, family.documentation, labels)
    return shown


def _histogram(labels: dict[str, str]) -> dict[str, list[dict[str, str]]]:
    bounds = [*map(str, map(float, BUCKETS)), "+Inf"]
    return {"_bucket": [labels | {"le": bound} for bound in bounds], "_count": [labels], "_sum": [labels]}


async def test_every_metric_says_what_it_counts_and_by_what() -> None:
    registry = CollectorRegistry()
    metrics = ServerMetrics(registry)
    by_route = {"route": "/score"}
    metrics.requests.labels(**by_route, status="200").inc()
    metrics.seconds.labels(**by_route).observe(0.02)
    metrics.cut_connections.labels("idle").inc()
    page = _page(registry)
    lag = "How much later than asked for the event loop woke a sleeper"
    cut = "Connections that the server ended: idle, slow, or to make room for others"
    arrival = "Seconds from a request's arrival to its answer"
    for name, kind, text, samples in (
        ("http_requests", "counter", "HTTP requests answered", {"_total": [by_route | {"status": "200"}]}),
        ("http_request_seconds", "histogram", arrival, _histogram(by_route)),
        ("http_in_flight", "gauge", "HTTP requests being answered", {"": [{}]}),
        ("http_connections", "gauge", "Connections of clients", {"": [{}]}),
        ("http_cut_connections", "counter", cut, {"_total": [{"reason": "idle"}]}),
        ("event_loop_lag_seconds", "histogram", lag, _histogram({})),
    ):
        full = f"maxsimd_{name}"
        assert page.pop(full) == (kind, text, {full + end: labels for end, labels in samples.items()})
    assert "process_resident_memory_bytes" in page
    assert all(name.startswith("process_") for name in page)


async def test_only_what_the_event_loop_is_late_counts_as_lag() -> None:
    registry = CollectorRegistry()
    metrics = ServerMetrics(registry)

    def lag(sample: str, **labels: str) -> float:
        return registry.get_sample_value(f"maxsimd_event_loop_lag_seconds_{sample}", labels) or 0.0

    watcher = asyncio.create_task(metrics.watch_lag())
    await until(lambda: watcher.done() or lag("bucket", le="0.05") >= 1)  # now and then it is hardly late
    assert not watcher.done()
    count, total = lag("count"), lag("sum")
    await asyncio.sleep(0)
    time.sleep(0.4)  # noqa: ASYNC251 (this is what must be noticed)
    await until(lambda: watcher.done() or lag("count") > count)
    # It slept for at most its period of 0.1 s meanwhile, which is not lag.
    assert 0.25 < lag("sum") - total < 30
    assert not watcher.done()
    watcher.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watcher
