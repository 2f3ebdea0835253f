"""The configuration of an application on Ray Serve, and as YAML for `serve deploy` and KubeRay."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from maxsimd.api.config import ServerConfig
from maxsimd.api.options import SERVED, in_collections, without_collections
from maxsimd.engine.config import EngineConfig, option

# The application's name on Serve; a cluster may have others beside it.
APP_NAME = "maxsimd"
# Ray starts the processes, and its proxies hold the connections of clients.
RAYS_OWN = frozenset(
    {
        *("host", "port", "tls_cert", "tls_key", "fronts", "replicas", "restart_on_failure", "drain_seconds"),
        *("max_connections", "header_seconds", "transfer_seconds", "min_bytes_per_second", "idle_seconds"),
    }
)
# Several models are served by one process.
ONE_PROCESS = frozenset({"models_dir"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Number and size of the actors."""

    replicas: int = option(1, "Scorers: actors that each load the model", group="processes")
    max_replicas: int | None = option(
        None, "Most scorers under load", group="processes", by_default="--replicas"
    )
    wanted_seconds: float = option(
        2.0, "Wait above which scorers are added, as above 70% load, up to --max-replicas", group="processes"
    )
    fronts: int = option(
        1, "Fronts: actors that read requests, distribute them and write answers", group="processes"
    )
    num_cpus: float = option(1.0, "Cores, and computing threads, of each scorer", group="processes")
    num_gpus: float = option(0.0, "GPUs of each scorer", group="processes")

    def __post_init__(self) -> None:
        for name, value in (("replicas", self.replicas), ("fronts", self.fronts)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"max_replicas must be at least replicas, {self.replicas}, not {self.max_replicas}"
            )
        if not self.wanted_seconds > 0:
            raise ValueError(f"wanted_seconds must be above 0, not {self.wanted_seconds}")
        if self.num_cpus < 0 or self.num_gpus < 0:
            raise ValueError("num_cpus and num_gpus must not be negative")


@dataclass(frozen=True, slots=True)
class AppConfig:
    engine: EngineConfig
    server: ServerConfig
    cluster: ClusterConfig

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """From the `args` of a Serve application. A null field has its default. Raises ValueError for an
        unknown field or a wrong value."""
        flat, _ = without_collections(arguments)
        left = {name: value for name, value in flat.items() if value is not None}
        refused = sorted(RAYS_OWN & left.keys() - _names(ClusterConfig))
        if refused:
            raise ValueError(
                f"{', '.join(refused)}: Ray controls this here; set it in http_options of Ray Serve"
            )
        if left.pop("grpc_port", None) is not None:
            raise ValueError(
                "grpc_port: Ray's proxies pass only HTTP on to maxsimd; leave it out, or use `maxsimd serve`"
            )
        if several := sorted({*ONE_PROCESS, "models"} & left.keys()):
            raise ValueError(f"{', '.join(several)}: on Ray one model is served; leave that out")
        engine = EngineConfig.of({**SERVED, **_taken(left, _names(EngineConfig))})
        cluster = ClusterConfig(**_taken(left, _names(ClusterConfig)))
        server = ServerConfig(**_taken(left, _names(ServerConfig) - RAYS_OWN))
        if left:
            raise ValueError(f"there is no option {', '.join(sorted(left))}")
        if engine.threads is None and cluster.num_cpus >= 1:
            # Otherwise Ray limits libraries to one thread.
            engine = dataclasses.replace(engine, threads=int(cluster.num_cpus))
        return cls(engine, server, cluster)

    def arguments(self) -> dict[str, Any]:
        """The mapping for `of`, without defaults."""
        given: dict[str, Any] = {}
        for config in (self.engine, self.server, self.cluster):
            for field in dataclasses.fields(config):
                value = getattr(config, field.name)
                default = SERVED.get(field.name, field.default)
                if value != default and not (config is self.server and field.name in RAYS_OWN):
                    given[field.name] = list(value) if isinstance(value, tuple) else value
        return in_collections(given)


def _names(config: type) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(config))


def _taken(values: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Takes values out. YAML has lists for tuples."""
    taken = {name: values.pop(name) for name in names & values.keys()}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in taken.items()}


_MEMORY_OF_FRONT, _MEMORY_OF_SCORER = "4Gi", "8Gi"


def serve_yaml(config: AppConfig) -> str:
    """The file for `serve deploy`."""
    # A change of these numbers keeps the replicas, while a change of `args` replaces all.
    numbers = {"Front": config.cluster.fronts}
    if config.cluster.max_replicas is None:
        numbers["Scorer"] = config.cluster.replicas
    application = {
        "name": APP_NAME,
        "import_path": "maxsimd.api.cluster.serve:app_builder",
        "route_prefix": "/",
        "args": config.arguments(),
        "deployments": [{"name": name, "num_replicas": count} for name, count in numbers.items()],
    }
    http = {"proxy_location": "EveryNode", "http_options": {"host": "0.0.0.0", "port": 8000}}
    return _dumped({**http, "applications": [application]})


def kuberay_yaml(config: AppConfig, image: str) -> str:
    """A RayService: the head takes the fronts, and a worker is one scorer."""
    cluster = config.cluster
    cores = max(1, math.ceil(cluster.num_cpus))
    scorer: dict[str, Any] = {"cpu": cores, "memory": _MEMORY_OF_SCORER}
    if cluster.num_gpus:
        scorer["nvidia.com/gpu"] = math.ceil(cluster.num_gpus)
    front = {"cpu": cluster.fronts, "memory": _MEMORY_OF_FRONT}
    head = {
        "rayStartParams": {"num-cpus": str(cluster.fronts)},
        "template": _pod("ray-head", image, front),
    }
    workers = {
        "groupName": "scorers",
        "replicas": cluster.replicas,
        "minReplicas": cluster.replicas,
        "maxReplicas": cluster.max_replicas or cluster.replicas,
        "rayStartParams": {},
        "template": _pod("ray-worker", image, scorer),
    }
    groups: dict[str, Any] = {"headGroupSpec": head, "workerGroupSpecs": [workers]}
    if cluster.max_replicas is not None:
        groups["enableInTreeAutoscaling"] = True
    spec = {"serveConfigV2": serve_yaml(config), "rayClusterConfig": groups}
    kind = {"apiVersion": "ray.io/v1", "kind": "RayService", "metadata": {"name": APP_NAME}}
    return _dumped({**kind, "spec": spec})


def _pod(name: str, image: str, resources: dict[str, Any]) -> dict[str, Any]:
    container = {"name": name, "image": image, "resources": {"requests": resources, "limits": resources}}
    return {"spec": {"containers": [container]}}


def _dumped(value: Any) -> str:
    import yaml

    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))
