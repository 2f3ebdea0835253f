"""Runs an application on a cluster, until someone asks it to end."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import click

from maxsimd.api.cluster.config import AppConfig
from maxsimd.api.cluster.ray_session import last_line, ray_session
from maxsimd.api.process import leave_at_once

# The application's name on Serve; a cluster may have others beside it.
APP_NAME = "maxsimd"
# What only this machine can connect to.
_OWN_HOSTS = {"127.0.0.1", "localhost", "::1"}


class Asked(Exception):
    """Someone has asked the command to end."""


def run(config: AppConfig, host: str, port: int, address: str | None) -> None:
    """Serves on the cluster at an address, or on a new one on this machine, until SIGTERM or SIGINT. Raises
    click.ClickException where that cannot be."""
    from ray import serve

    from maxsimd.api.cluster.members import proxy_address
    from maxsimd.api.cluster.serve import app_builder

    begun = time.perf_counter()
    cluster = config.cluster
    cores = (cluster.max_replicas or cluster.replicas) * max(1.0, cluster.num_cpus) + cluster.fronts
    # Ray puts a handler of its own before ours, which aborts a process that has not ended within three
    # seconds; ours are set again therefore.
    with suppress(Asked), _asked(), ray_session(address, cores, shows_log=True), _asked():
        try:
            where = "HeadOnly" if address is None else "EveryNode"
            serve.start(http_options={"host": host, "port": port, "location": where})
            host, port = proxy_address()
            serve.run(app_builder(config.arguments()), name=APP_NAME, route_prefix="/")
            click.echo(
                f"ready on http://{host}:{port} after {time.perf_counter() - begun:.1f} s: "
                f"{cluster.replicas} scorers, {cluster.fronts} fronts",
                err=True,
            )
            server = config.server
            if host not in _OWN_HOSTS and not (server.api_key or server.api_key_file):
                click.echo(
                    "whoever can reach it may use it: there is no --api-key, no --api-key-file", err=True
                )
            while True:
                signal.pause()
        except Asked:
            click.echo("stopping: what is in flight is finished first", err=True)
        except RuntimeError as error:
            raise click.ClickException(_reason(error)) from error
        finally:
            _end(is_own=address is None)


def _reason(error: RuntimeError) -> str:
    """Why an application could not be deployed, as one of its deployments says it, else as Serve does."""
    from ray import serve

    with suppress(Exception):
        for deployment in serve.status().applications[APP_NAME].deployments.values():
            if "Error" in deployment.message:
                return last_line(deployment.message)
    return str(error)


def _end(is_own: bool) -> None:
    """Takes the application from the cluster, once it has finished what is in flight, and Serve too from one
    that is our own."""
    from ray import serve

    with suppress(Exception):
        serve.delete(APP_NAME)
    if is_own:
        with suppress(Exception):
            serve.shutdown()


@contextmanager
def _asked() -> Iterator[None]:
    """The first SIGTERM or SIGINT raises Asked; a second one ends the process at once, and with it a Ray of
    its own."""
    is_asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            click.echo("stopped at once by a second signal", err=True)
            leave_at_once(128 + number)
        is_asked = True
        raise Asked

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
