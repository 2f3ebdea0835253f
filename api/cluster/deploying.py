"""An application as YAML: for `serve deploy`, and as a RayService for KubeRay."""

import math
from typing import Any

import yaml

from maxsimd.api.cluster.config import AppConfig, ClusterConfig
from maxsimd.api.cluster.running import APP_NAME

_IMPORT_PATH = "maxsimd.api.cluster.serve:app_builder"
_MEMORY_OF_FRONT, _MEMORY_OF_SCORER = "4Gi", "8Gi"


def serve_yaml(config: AppConfig) -> str:
    """What `serve deploy` reads."""
    return _dumped(_deployed(config))


def kuberay_yaml(config: AppConfig, image: str) -> str:
    """A RayService: the head takes the fronts, and a worker is one scorer."""
    cluster = config.cluster
    cores = max(1, math.ceil(cluster.num_cpus))
    scorer: dict[str, Any] = {"cpu": cores, "memory": _MEMORY_OF_SCORER}
    if cluster.num_gpus:
        scorer["nvidia.com/gpu"] = math.ceil(cluster.num_gpus)
    front = {"cpu": cluster.fronts, "memory": _MEMORY_OF_FRONT}
    service = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": APP_NAME},
        "spec": {
            "serveConfigV2": _dumped(_deployed(config)),
            "rayClusterConfig": {
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": str(cluster.fronts)},
                    "template": _pod("ray-head", image, front),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "scorers",
                        "replicas": cluster.replicas,
                        "minReplicas": cluster.replicas,
                        "maxReplicas": cluster.max_replicas or cluster.replicas,
                        "rayStartParams": {},
                        "template": _pod("ray-worker", image, scorer),
                    }
                ],
            },
        },
    }
    if cluster.max_replicas is not None:
        service["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] = True  # type: ignore[index]
    return _dumped(service)


def _deployed(config: AppConfig) -> dict[str, Any]:
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8000},
        "applications": [
            {
                "name": APP_NAME,
                "import_path": _IMPORT_PATH,
                "route_prefix": "/",
                "args": config.arguments(),
                "deployments": _numbers(config.cluster),
            }
        ],
    }


def _numbers(cluster: ClusterConfig) -> list[dict[str, Any]]:
    """How many replicas there are, which can be changed here without replacing those that are there: a change
    of `args` replaces all."""
    numbers = [{"name": "Front", "num_replicas": cluster.fronts}]
    if cluster.max_replicas is None:
        numbers.append({"name": "Scorer", "num_replicas": cluster.replicas})
    return numbers


def _pod(name: str, image: str, resources: dict[str, Any]) -> dict[str, Any]:
    container = {"name": name, "image": image, "resources": {"requests": resources, "limits": resources}}
    return {"spec": {"containers": [container]}}


def _dumped(value: Any) -> str:
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))
