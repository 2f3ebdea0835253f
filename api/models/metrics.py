"""The metrics of several models on one page: those of each engine, with the label `model`."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


class SeveralMetrics:
    """A registry of the server's own metrics and of those of its models, as these are when they are read."""

    def __init__(
        self,
        registries: Callable[[], Mapping[str, CollectorRegistry]],
        are_served: Callable[[], Mapping[str, bool]],
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Models(registries, are_served))


class _Models(Collector):
    def __init__(
        self,
        registries: Callable[[], Mapping[str, CollectorRegistry]],
        are_served: Callable[[], Mapping[str, bool]],
    ) -> None:
        self._registries = registries
        self._are_served = are_served

    def collect(self) -> Iterable[Metric]:
        served = GaugeMetricFamily(
            "maxsimd_model_served", "Whether the model takes requests", labels=["model"]
        )
        for name, is_served in self._are_served().items():
            served.add_metric([name], float(is_served))
        yield served
        merged: dict[str, Metric] = {}
        for name, registry in self._registries().items():
            for metric in registry.collect():
                one = Metric(metric.name, metric.documentation, metric.type)
                family = merged.setdefault(metric.name, one)
                family.samples += [_labelled(sample, name) for sample in metric.samples]
        yield from merged.values()


def _labelled(sample: Sample, model: str) -> Sample:
    return sample._replace(labels={"model": model, **sample.labels})
