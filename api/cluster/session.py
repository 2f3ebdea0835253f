"""Ray for a command: a session on a cluster or on this machine, and an application that runs in it."""

import logging
import math
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

import click

from maxsimd.api.cluster.config import APP_NAME, AppConfig
from maxsimd.api.process import exit_at_once

# Bytes of Ray's object store: no texts pass through it.
_OBJECT_STORE = 100 * 1024 * 1024
_CONNECT_SECONDS = 10


def require_ray() -> None:
    """Raises click.ClickException where Ray is not installed."""
    try:
        import pyarrow  # noqa: F401
        import ray.data
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise click.ClickException(f"this needs Ray: pip install '.[ray]' ({error})") from error


@contextmanager
def ray_session(address: str | None, num_cpus: float, shows_log: bool = False) -> Iterator[None]:
    """Connects to the cluster at `address`, or starts Ray with `num_cpus` cores on this machine and ends it
    afterwards. `shows_log` prints the actors' logs. Raises click.ClickException."""
    import ray

    # Ray's C++ logs are for operators of a cluster.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    ray.data.DataContext.get_current().enable_progress_bars = False
    with ExitStack() as stack:
        options: dict[str, Any] = {"address": address}
        if address is None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            # Ray's default is a low priority for workers.
            os.environ.setdefault("RAY_worker_niceness", "0")
            # Names of sockets must be short.
            made = tempfile.TemporaryDirectory(prefix="maxsimd-ray-", ignore_cleanup_errors=True)
            options = {"address": "local", "num_cpus": math.ceil(num_cpus), "include_dashboard": False}
            options |= {"object_store_memory": _OBJECT_STORE, "_temp_dir": stack.enter_context(made)}
        stack.callback(ray.shutdown)
        try:
            if address is not None:
                _check_reachable(address)
            ray.init(**options, log_to_driver=shows_log, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises many kinds
            raise click.ClickException(f"no Ray at {address or 'this machine'}: {error}") from error
        yield


def _check_reachable(address: str) -> None:
    """Raises OSError if nobody listens at host:port: Ray would retry for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()


def last_line(message: str) -> str:
    """The end of an error of Ray, which is what the actor raised."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else message


# Hosts that only this machine can connect to.
_OWN_HOSTS = {"127.0.0.1", "localhost", "::1"}


class Asked(KeyboardInterrupt):
    """A signal ends the command."""


def run(config: AppConfig, host: str, port: int, address: str | None) -> None:
    """Serves at `address`, or on this machine, until SIGTERM or SIGINT. Raises click.ClickException."""
    from ray import serve
    from ray.serve.context import _get_global_client

    from maxsimd.api.cluster.serve import app_builder

    begun = time.perf_counter()
    cluster = config.cluster
    cores = (cluster.max_replicas or cluster.replicas) * max(1.0, cluster.num_cpus) + cluster.fronts
    # Ray replaces our signal handlers by one that aborts the process after three seconds: set ours again.
    with suppress(Asked), asked(), ray_session(address, cores, shows_log=True), asked():
        try:
            where = "HeadOnly" if address is None else "EveryNode"
            serve.start(http_options={"host": host, "port": port, "location": where})
            # An earlier start may have set another address.
            options = _get_global_client().http_config
            host, port = options.host, options.port
            serve.run(app_builder(config.arguments()), name=APP_NAME, route_prefix="/")
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            counts = f"{cluster.replicas} scorers, {cluster.fronts} fronts"
            click.echo(f"ready on {url} after {time.perf_counter() - begun:.1f} s: {counts}", err=True)
            server = config.server
            if host not in _OWN_HOSTS and not (server.api_key or server.api_key_file):
                click.echo("anyone who can reach it can use it; set --api-key or --api-key-file", err=True)
            while True:
                signal.pause()
        except Asked:
            click.echo("stopping: what is in flight is finished first", err=True)
        except RuntimeError as error:
            reason = str(error)
            with suppress(Exception):
                for deployment in serve.status().applications[APP_NAME].deployments.values():
                    if "Error" in deployment.message:
                        reason = last_line(deployment.message)
            raise click.ClickException(reason) from error
        finally:
            with suppress(Exception):
                serve.delete(APP_NAME)  # once it has drained
            if address is None:
                with suppress(Exception):
                    serve.shutdown()


@contextmanager
def asked() -> Iterator[None]:
    """Raises Asked on SIGTERM or SIGINT; a second signal ends the process at once."""
    is_asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            click.echo("stopped at once by a second signal", err=True)
            exit_at_once(128 + number)
        is_asked = True
        raise Asked

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
