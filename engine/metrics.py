"""The engine's metrics and statistics. Each engine has a registry, so that several can share a process."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from maxsimd.engine.cache import EmbeddingCache, ScoreCache
from maxsimd.engine.cache.documents import DocumentTexts
from maxsimd.engine.requests import Timings
from maxsimd.engine.tenants import TenantMetrics

disable_created_metrics()

_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_DOCUMENTS = (1, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000)
_PARTS = ("queue", "tokenise", "model", "score", "total")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class EngineMetrics(Collector):
    """The engine's own metrics, all named maxsimd_*. It collects those of the cache."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # The cache whose counts are reported.
        self.cache: EmbeddingCache | ScoreCache | None = None
        self.texts: DocumentTexts | None = None
        self.registry.register(self)
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        seconds = partial(histogram, buckets=_SECONDS)
        self.queue_tokens = gauge("maxsimd_queue_tokens", "Tokens that wait for a step")
        self.queue_sequences = gauge("maxsimd_queue_sequences", "Sequences that wait for a step")
        self.tokens = counter("maxsimd_tokens", "Tokens run through the model")
        self.step_tokens = histogram("maxsimd_step_tokens", "Tokens in a step", buckets=_TOKENS)
        self.step_sequences = histogram("maxsimd_step_sequences", "Sequences in a step", buckets=_SEQUENCES)
        self.step_seconds = seconds("maxsimd_step_seconds", "Seconds from the start of a step to its results")
        self.device_seconds = counter(
            "maxsimd_device_seconds", "Seconds on a device that several models share; without others 0"
        )
        self.preprocess_seconds = seconds(
            "maxsimd_preprocess_seconds", "Seconds that tokenizing and preparing a request took"
        )
        self._request_seconds = seconds(
            "maxsimd_request_seconds",
            "Seconds of a request in the engine: until it was prepared and until its first step (queue), in "
            "tokenizing and preparing it (tokenise), in steps (model), of these in scoring (score), and in "
            "all (total)",
            ("part",),
        )
        self._seconds_of = {part: self._request_seconds.labels(part) for part in _PARTS}
        self.waiting_requests = gauge(
            "maxsimd_waiting_requests", "Requests that wait for room in the queue, before they are prepared"
        )
        self.preparing_requests = gauge("maxsimd_preparing_requests", "Requests being prepared")
        self.preparing_tokens = gauge("maxsimd_preparing_tokens", "Tokens that they have, by estimate")
        self.wait_seconds = gauge(
            "maxsimd_wait_seconds", "Estimated seconds that a request of one step would wait"
        )
        self.refused = counter(
            "maxsimd_refused_requests",
            "Requests refused because of what waits (queue, wait, timeout), of their tenant's rate (rate) "
            "or of their own size (size)",
            ("reason",),
        )
        self.request_documents = histogram(
            "maxsimd_request_documents", "Documents or texts in a request", buckets=_DOCUMENTS
        )
        self.truncated = counter(
            "maxsimd_truncated_inputs", "Inputs that were too long for the model and were truncated"
        )
        self.documents_by_digest = counter(
            "maxsimd_documents_by_digest", "Documents of requests by digest: known or unknown", ("found",)
        )
        self.cancelled = counter(
            "maxsimd_cancelled_requests", "Requests whose caller went away or ran out of time"
        )

        self.tenants = TenantMetrics(self.registry)
        self.restarts = counter("maxsimd_engine_restarts", "Starts of the engine after it had died")

    def note_request(self, timings: Timings, total: float) -> None:
        """Counts the seconds of a finished request by part."""
        seconds = (timings.queue, timings.tokenise, timings.model, timings.score, total)
        for part, spent in zip(_PARTS, seconds, strict=True):
            self._seconds_of[part].observe(spent)

    def collect(self) -> Iterable[Metric]:
        """The counts of the cache and of kept texts, read with the metrics."""
        if (texts := self.texts) is not None:
            of_texts = (
                ("texts", "Texts kept by their digests", len(texts)),
                ("text_bytes", "Memory that they take", texts.nbytes),
            )
            for name, help, size in of_texts:
                yield GaugeMetricFamily(f"maxsimd_document_{name}", help, value=size)
        cache = self.cache
        if cache is None:
            return
        slab = cache.slab
        on_device = (0, 0, 0, 0) if slab is None else (slab.hits, slab.copied, len(slab), slab.nbytes)
        counts = (
            ("hits", "Documents whose embeddings or scores were there", cache.hits),
            ("misses", "Documents whose embeddings or scores were not there", cache.misses),
            ("skipped", "Embeddings that were not cached because writing did not keep up", cache.skipped),
            ("evictions", "Embeddings or scores that went to make room", cache.evictions),
            ("device_hits", "Cached documents that were on the GPU when they were scored", on_device[0]),
            ("device_copies", "Cached documents that were copied to the GPU first", on_device[1]),
        )
        for name, help, value in counts:
            yield CounterMetricFamily(f"maxsimd_cache_{name}", help, value=value)
        sizes = (
            ("entries", "Embeddings or scores in the cache", cache.entries),
            ("memory_bytes", "Memory that they take", cache.memory_bytes),
            ("disk_bytes", "Disk that they take", cache.disk_bytes),
            ("staged", "Embeddings that are still to be written", cache.num_staged),
            ("device_entries", "Embeddings that are on the GPU as well", on_device[2]),
            ("device_bytes", "Memory of the GPU that is set aside for them", on_device[3]),
        )
        for name, help, value in sizes:
            yield GaugeMetricFamily(f"maxsimd_cache_{name}", help, value=value)


class MergedMetrics(Collector):
    """The metrics of several engines or processes. `parts` gives each one's own labels and metrics."""

    def __init__(self, parts: Callable[[], Iterable[tuple[dict[str, str], Iterable[Metric]]]]) -> None:
        self._parts = parts

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for labels, metrics in self._parts():
            for metric in metrics:
                if metric.name not in merged:
                    merged[metric.name] = Metric(metric.name, metric.documentation, metric.type)
                merged[metric.name].samples.extend(
                    sample._replace(labels={**labels, **sample.labels}) for sample in metric.samples
                )
        return merged.values()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStats:
    """State of the device's actors: `queries` with documents to come, `documents` with missing windows,
    `cut_sequences` with state between steps, pictures with `features`, keys and values (`prefill_kv`),
    `pooling_states`, and `staged_embeddings` that are still to be written to the cache."""

    queries: int = 0
    documents: int = 0
    cut_sequences: int = 0
    prefill_kv: int = 0
    features: int = 0
    pooling_states: int = 0
    staged_embeddings: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The state of an engine. All numbers are 0 when it is idle.

    `requests` counts all, from call to result. `waiting_requests` of them wait for room in the queue before
    they are prepared, and `open_requests` are admitted to it. `waiting_tokens` counts cached documents at
    their price, `waiting_cached` their batches. `steps_in_flight` are on the device."""

    requests: int = 0
    waiting_requests: int = 0
    open_requests: int = 0
    waiting_tokens: int = 0
    waiting_sequences: int = 0
    waiting_cached: int = 0
    steps_in_flight: int = 0
    device: DeviceStats = DeviceStats()
