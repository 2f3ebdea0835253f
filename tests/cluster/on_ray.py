"""A cluster of Ray on this machine alone, and applications on it."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from maxsimd.bench.cluster import deploy as deploy_as_file
from tests.processes import descendants, processes
from tests.server.conftest import free_port
from tests.waiting import wait_for

# Loading on two cores beside others takes long.
READY_SECONDS = 240.0
# However slow the machine is, requests are to wait.
_ARGS = {"dtype": "float32", "num_cpus": 1, "max_wait_seconds": 600.0}


@contextmanager
def ray_session(cores: int = 16) -> Iterator[str]:
    """A cluster of as many cores as it is told, with Serve on it; gives its proxy's URL."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    import ray
    from ray import serve

    before = {*descendants(os.getpid())}
    # Paths of sockets in it may not be long.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    port = free_port()
    try:
        ray.init(
            address="local", num_cpus=cores, include_dashboard=False, object_store_memory=100 << 20,
            _temp_dir=folder, _node_ip_address="127.0.0.1",
        )  # fmt: skip
        serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
        yield f"http://127.0.0.1:{port}"
    finally:
        # Not those of other servers, which a test may have started meanwhile.
        started = [each for each in descendants(os.getpid()) if each not in before and folder in each.title]
        with suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        wait_for(lambda: not any(each.is_there for each in started))
        shutil.rmtree(folder, ignore_errors=True)


def deploy(name: str, url: str, *, replicas: int = 2, **args: Any) -> str:
    """Runs an application until all its scorers are there; gives its URL."""
    from ray import serve

    from maxsimd.api.cluster.serve import app_builder

    application = app_builder({**_ARGS, "replicas": replicas, **args})
    serve.run(application, name=_own(name), route_prefix=f"/{_own(name)}")
    wait_for(lambda: num_ready(f"{url}/{_own(name)}") == replicas, READY_SECONDS)
    return f"{url}/{_own(name)}"


def deploy_file(name: str, url: str, *, scorers: int = 2, **args: Any) -> str:
    """The same as `serve deploy` does it, or a change of what runs; one application at a time."""
    deploy_as_file(_own(name), {**_ARGS, "replicas": 2, **args}, scorers)
    wait_for(lambda: num_ready(f"{url}/{_own(name)}") == scorers, READY_SECONDS)
    return f"{url}/{_own(name)}"


def delete(name: str) -> None:
    from ray import serve

    serve.delete(_own(name))


def num_ready(url: str) -> int:
    with suppress(httpx.TransportError):
        answer = httpx.get(url + "/ready", timeout=600)
        if answer.status_code == 200:
            return int(answer.json()["replicas"]["ready"])
    return 0


def replicas(name: str, deployment: str) -> list[int]:
    title = f"ray::ServeReplica:{_own(name)}:{deployment}"
    return [each.pid for each in processes() if each.title.startswith(title)]


def kill(pid: int) -> None:
    """As a machine that fails would: without a word."""
    os.kill(pid, signal.SIGKILL)


def _own(name: str) -> str:
    """The name of an application that no cluster of another test's process has."""
    return f"{name}-{os.getpid()}"
