"""Runs an application on a cluster, until someone asks it to end."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import click

from maxsimd.api.cluster.config import AppConfig, ClusterConfig

# The application's name on Serve; a cluster may have others beside it.
APP_NAME = "maxsimd"
# What Serve's controller and proxies need of a machine that is ours alone.
_OBJECT_STORE_BYTES = 200 << 20


class Asked(Exception):
    """Someone has asked the command to end."""


def run(config: AppConfig, host: str, port: int, address: str | None) -> None:
    """Serves on the cluster at an address, or on a new one on this machine, until SIGTERM or SIGINT. Raises
    click.ClickException where that cannot be."""
    # Ray asks on its own whether its use may be reported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    from maxsimd.api.cluster.serve import app_builder

    begun = time.perf_counter()
    with _asked():
        try:
            _connect(config.cluster, address)
            serve.start(http_options={"host": host, "port": port, "location": "HeadOnly"})
            serve.run(app_builder(config.arguments()), name=APP_NAME, route_prefix="/")
            seconds = time.perf_counter() - begun
            cluster = config.cluster
            click.echo(
                f"ready on http://{host}:{port} after {seconds:.1f} s: {cluster.replicas} scorers, "
                f"{cluster.fronts} fronts",
                err=True,
            )
            while True:
                signal.pause()
        except Asked:
            click.echo("stopping", err=True)
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error
        finally:
            with suppress(Asked):
                _end()
            ray.shutdown()


def _connect(cluster: ClusterConfig, address: str | None) -> None:
    """To the cluster at an address, or a new one that has as many cores as are asked for, whether or not this
    machine has them."""
    import ray

    if address is not None:
        ray.init(address=address, log_to_driver=True)
        return
    most = cluster.max_replicas or cluster.replicas
    ray.init(
        address="local",
        num_cpus=int(most * max(1.0, cluster.cpus)) + cluster.fronts,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
    )


def _end() -> None:
    """Takes the application from the cluster, once it has finished what is in flight."""
    import ray
    from ray import serve

    if ray.is_initialized():
        with suppress(Exception):
            serve.delete(APP_NAME)
        with suppress(Exception):
            serve.shutdown()


@contextmanager
def _asked() -> Iterator[None]:
    """SIGTERM and SIGINT raise Asked."""

    def ask(number: int, frame: FrameType | None) -> None:
        raise Asked

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
