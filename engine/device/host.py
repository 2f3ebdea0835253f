"""How the C allocator and oneDNN keep memory between the steps of a CPU engine, and when it goes back."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 1 << 30

# Compiled kernels that oneDNN keeps; its default of 1,024 can hold more than a gigabyte of them.
_ONEDNN_PRIMITIVES = "256"


def settle_allocators() -> None:
    """Lets freed blocks be used again by the next step instead of going back to the system.

    A step's temporaries are of many megabytes. By default each is mapped anew, and the page faults cost
    more than some of the arithmetic. Call it before the first matrix product; elsewhere than on Linux it
    only bounds oneDNN's cache."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _ONEDNN_PRIMITIVES)
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)


def give_back_memory() -> None:
    """Has the C library give the system what is free in its heaps, where it can (glibc): milliseconds, in
    which Python goes on in other threads."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


ROOT = Path("/")


def groups_around(controller: str, root: Path = ROOT) -> Iterator[tuple[Path, bool]]:
    """The folder of this process's group of a controller ("cpu", "memory") and of all that it lies in, and
    whether they are of version 2. `root` is where `/proc/self` and the mounted control groups are found."""
    for mount, group, is_v2 in _hierarchies(controller, root):
        for folder in (group, *group.parents):
            yield folder, is_v2
            if folder == mount:
                break


def _hierarchies(controller: str, root: Path) -> Iterator[tuple[Path, Path, bool]]:
    """Where each hierarchy of a controller is mounted, this process's group in it, and whether it is of
    version 2."""
    groups = dict(_groups(root))
    with suppress(OSError):
        for line in (root / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            before, _, after = line.partition(" - ")
            fields, (kind, _, options) = before.split(), after.split(maxsplit=2)
            is_v2 = kind == "cgroup2"
            if is_v2 or (kind == "cgroup" and controller in options.split(",")):
                mount = root / fields[4].lstrip("/")
                yield mount, mount / _below(fields[3], groups.get("" if is_v2 else controller, "/")), is_v2


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """The path of this process's group by controller, and of that of version 2 by no name."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                yield controller, path


def _below(mounted: str, path: str) -> str:
    """A group's path below the one that is mounted. Where it is not below that, as a container sees it that
    shares the host's view, the one that is mounted."""
    mounted = mounted.rstrip("/")
    inside = path == mounted or path.startswith(mounted + "/")
    return path[len(mounted) :].strip("/") if inside and ".." not in path else ""


@dataclass(frozen=True, slots=True)
class Cores:
    """`affinity` is the number of cores that the process may run on, and `quota` how many of them it may keep
    busy on average; None where there is no quota."""

    affinity: int
    quota: float | None

    @property
    def threads(self) -> int:
        """As many threads as can always run. What is left of a quota is for the event loop and the tokeniser:
        a process that uses up its quota stands still for a while, with all its threads."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, int(self.quota)))


def tokenizer_threads(device_type: str, threads: int) -> int:
    """How many threads tokenize where nobody said, of an engine that may take this many. On a CPU the model
    needs the cores; beside a GPU, which is faster than two threads with a large vocabulary (`maxsimd bench
    tokenizer`), it is half of them."""
    return 2 if device_type == "cpu" else max(2, threads // 2)


def usable_cores() -> Cores:
    """The cores that this process may use now."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Cores(affinity, cpu_quota())


def cpu_quota(root: Path = ROOT) -> float | None:
    """The least CPU quota of this process's control groups and of all that these lie in, in cores; None where
    none has one. `root` is where `/proc/self` and the mounted control groups are found."""
    quotas = []
    for folder, is_v2 in groups_around("cpu", root):
        with suppress(OSError, ValueError):
            quota = _quota_v2(folder) if is_v2 else _quota_v1(folder)
            if quota is not None:
                quotas.append(quota)
    return min(quotas, default=None)


def _quota_v2(folder: Path) -> float | None:
    quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    quota = int((folder / "cpu.cfs_quota_us").read_text(encoding="utf-8"))
    return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text(encoding="utf-8"))


# Of each version's groups: the limit, and what is in use. Groups of version 1 without a limit have one of
# more than any machine has.
_FILES = {True: ("memory.max", "memory.current"), False: ("memory.limit_in_bytes", "memory.usage_in_bytes")}


def available_memory(root: Path = ROOT) -> int | None:
    """In bytes; None where nothing says. `root` is where `/proc` and the mounted control groups are found."""
    free = []
    with suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                free.append(int(value.split()[0]) * 1024)
    for folder, is_v2 in groups_around("memory", root):
        limit, current = ((folder / name) for name in _FILES[is_v2])
        with suppress(OSError, ValueError):  # "max" is no number
            most = int(limit.read_text(encoding="utf-8"))
            free.append(max(0, most - int(current.read_text(encoding="utf-8"))))
    return min(free, default=None)
