"""What the server counts, on top of the engine's own metrics and in the same registry."""

import asyncio
import platform
from collections.abc import Iterator
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from maxsimd import __version__
from maxsimd.api.logs import dropped_events
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
