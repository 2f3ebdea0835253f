"""The metrics of several models on one page: those of each engine, with the label `model`, and which of them
take requests."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from maxsimd.engine.several.metrics import registry_by_model


class SeveralMetrics:
    """A registry of the server's own metrics and of those of its models, as these are when they are read."""

    def __init__(
        self,
        registries: Callable[[], Mapping[str, CollectorRegistry]],
        are_served: Callable[[], Mapping[str, bool]],
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Served(are_served))
        self.registry.register(registry_by_model(registries))


class _Served(Collector):
    def __init__(self, are_served: Callable[[], Mapping[str, bool]]) -> None:
        self._are_served = are_served

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily("maxsimd_model_served", "Whether it takes requests", labels=["model"])
        for name, is_served in self._are_served().items():
            family.add_metric([name], float(is_served))
        yield family
