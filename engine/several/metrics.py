"""The metrics of several models as one registry, told apart by the label `model`."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


def registry_by_model(registries: Callable[[], Mapping[str, CollectorRegistry]]) -> CollectorRegistry:
    """A registry with what those by the models' names have whenever it is read."""
    registry = CollectorRegistry()
    registry.register(_ByModel(registries))
    return registry


class _ByModel(Collector):
    def __init__(self, registries: Callable[[], Mapping[str, CollectorRegistry]]) -> None:
        self._registries = registries

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for model, registry in self._registries().items():
            for metric in registry.collect():
                if metric.name not in merged:
                    merged[metric.name] = Metric(metric.name, metric.documentation, metric.type)
                merged[metric.name].samples.extend(
                    sample._replace(labels={"model": model, **sample.labels}) for sample in metric.samples
                )
        return merged.values()
