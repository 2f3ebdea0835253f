"""Ray for a command: a cluster that is there, or one of this machine's own that ends with the command."""

import logging
import math
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import click

# For what goes from process to process; texts do not.
_OBJECT_STORE = 100 * 1024 * 1024
_CONNECT_SECONDS = 10


def require_ray() -> None:
    """Raises click.ClickException where Ray is not installed."""
    try:
        import pyarrow  # noqa: F401
        import ray.data
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise click.ClickException(f"this needs Ray: pip install 'maxsimd[ray]' ({error})") from error


@contextmanager
def ray_session(address: str | None, num_cpus: float, shows_log: bool = False) -> Iterator[None]:
    """Connects to the cluster at `address`, or without one starts Ray on this machine and ends it afterwards;
    Ray then counts `num_cpus` cores, however many there are. `shows_log` prints what actors log. Raises
    click.ClickException where there is no such cluster."""
    import ray

    # What Ray's C++ says is for those who operate a cluster.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    ray.data.DataContext.get_current().enable_progress_bars = False
    quiet = {"log_to_driver": shows_log, "logging_level": logging.ERROR}
    if address is not None:
        try:
            _check_reachable(address)
            ray.init(address=address, **quiet)
        except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            raise click.ClickException(f"no Ray at {address}: {error}") from error
        try:
            yield
        finally:
            ray.shutdown()
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray runs its workers at a low priority; here they are what the machine is for.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Its sockets' names must be short.
    folder = tempfile.mkdtemp(prefix="maxsimd-ray-")
    try:
        ray.init(
            address="local",
            num_cpus=math.ceil(num_cpus),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE,
            _temp_dir=folder,
            **quiet,
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _check_reachable(address: str) -> None:
    """Raises OSError where nobody listens at host:port: Ray would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()


def last_line(message: str) -> str:
    """The end of what one of Ray's errors says, which is what was raised in the actor."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else message
