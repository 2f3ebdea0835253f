"""What `serve deploy` does with a file, in this process."""

import asyncio
import time
from typing import Any

import yaml

from maxsimd.api.cluster.config import AppConfig, serve_yaml

# How often Serve is asked whether all are there.
_LOOK_SECONDS = 0.2


def deploy(name: str, args: dict[str, Any], replicas: int) -> None:
    """Has Serve run an application of these `args` with as many scorers, or change what runs; returns once it
    does. The `args` are those that it began with: where they differ, all replicas are new."""
    from ray import serve
    from ray.serve.context import _get_global_client as get_global_client
    from ray.serve.schema import ServeDeploySchema

    config = yaml.safe_load(serve_yaml(AppConfig.of(args)))
    [application] = config["applications"]
    application |= {"name": name, "route_prefix": f"/{name}"}
    for deployment in application["deployments"]:
        if deployment["name"] == "Scorer":
            deployment["num_replicas"] = replicas
    get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))
    while (status := serve.status().applications[name]).status != "RUNNING":
        if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise RuntimeError(status.message)
        time.sleep(_LOOK_SECONDS)


async def deploy_in_thread(name: str, args: dict[str, Any], replicas: int) -> None:
    """The same, without holding up the event loop."""
    await asyncio.to_thread(deploy, name, args, replicas)
