"""A disk for the cache that can be full."""

import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.running import Running

_DISK_MB = 48
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class Disk:
    """Where the cache is. `full` keeps it full, and `how` says by what."""

    folder: Path
    how: str
    full: Callable[[Running], AbstractContextManager[None]]


@contextmanager
def disk_that_can_be_full(folder: Path) -> Iterator[Disk]:
    """A small disk of its own, where this process may mount one; else a limit on the size of files."""
    place = folder / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    try:
        (place / "cache").mkdir()
        if mounted:
            yield Disk(place / "cache", f"a tmpfs of {_DISK_MB} MiB, filled", lambda server: _filled(place))
        else:
            yield Disk(place / "cache", "RLIMIT_FSIZE, where no disk can be mounted", _limited)
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextmanager
def _filled(place: Path) -> Iterator[None]:
    ballast = place / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(_PIECE)) == _PIECE:
                    pass
            except OSError:
                pass
            yield
    finally:
        ballast.unlink()


@contextmanager
def _limited(server: Running) -> Iterator[None]:
    """No file of the server grows beyond a few pages."""
    _, hard = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1 << 14, hard))
    try:
        yield
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
