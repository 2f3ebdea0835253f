"""The host's resources for this process: cores, memory, and how the C allocator keeps it.

Source of the control groups' file names and formats: the Linux kernel's documentation, versions 1 and 2.
"""

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 1 << 30

# Compiled kernels that oneDNN keeps; its default of 1,024 can hold more than a gigabyte of them.
_ONEDNN_PRIMITIVES = "256"

ROOT = Path("/")
# The limit and the usage of memory in groups of version 2 (True) and 1, and what counts files that the kernel
# drops first. Version 1 without a limit has one above any machine's memory.
_MEMORY_FILES = {
    True: ("memory.max", "memory.current", "inactive_file"),
    False: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def settle_allocators() -> None:
    """Keeps freed blocks for the next step instead of returning them to the system.

    A step's temporaries take many megabytes. By default each is mapped anew, and the page faults cost more
    than some of the arithmetic. Call it before the first matrix product. Elsewhere than on Linux it only
    bounds oneDNN's cache.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _ONEDNN_PRIMITIVES)
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores that the process may run on (`affinity`), and the number it may keep busy on average
    (`quota`, None without one)."""

    affinity: int
    quota: float | None

    @property
    def threads(self) -> int:
        """The number of threads that can always run. The rest of a quota is for the event loop and the
        tokenizer: a process that uses up its quota stands still for a while."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, int(self.quota)))


def tokenizer_threads(device_type: str, threads: int) -> int:
    """The default number of tokenizer threads for an engine with `threads`. On a CPU the model needs the
    cores. A GPU is faster than two threads with a large vocabulary (`maxsimd bench tokenizer`), so it gets
    half of them."""
    return 2 if device_type == "cpu" else max(2, threads // 2)


def usable_cores() -> Cores:
    """The cores that this process may use now."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Cores(affinity, cpu_quota())


def cpu_quota(root: Path = ROOT) -> float | None:
    """The smallest CPU quota, in cores, of this process's control groups and their parents; None without one.
    `/proc` and the control groups are found under `root`."""
    quotas = []
    for folder, is_v2 in _groups_around("cpu", root):
        files = ("cpu.max",) if is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        with suppress(OSError, ValueError):  # "max" is no number
            quota, period = _numbers(folder, files)
            if quota > 0:
                quotas.append(quota / period)
    return min(quotas, default=None)


def _numbers(group: Path, files: Sequence[str]) -> list[int]:
    """The numbers in these files of a control group. Raises OSError and ValueError."""
    return [int(word) for name in files for word in (group / name).read_text(encoding="utf-8").split()]


def available_memory(root: Path = ROOT) -> int | None:
    """The bytes that this process can still use, by the machine and its control groups; None if unknown.
    `/proc` and the control groups are found under `root`."""
    free = []
    with suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                free.append(int(value.split()[0]) * 1024)
    for folder, is_v2 in _groups_around("memory", root):
        limit, current, dropped_first = _MEMORY_FILES[is_v2]
        with suppress(OSError, ValueError):  # "max" is no number
            most, used = _numbers(folder, (limit, current))
            free.append(max(0, most - max(0, used - _statistic(folder, dropped_first))))
    return min(free, default=None)


def _statistic(group: Path, name: str) -> int:
    """A number of a control group's `memory.stat`; 0 if it has none."""
    with suppress(OSError, ValueError):
        lines = (group / "memory.stat").read_text(encoding="utf-8").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(f"{name} "))
    return 0


def _groups_around(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's group of a controller ("cpu", "memory") and of its parents, and whether
    they are of version 2."""
    groups: dict[str, str] = {}  # paths by controller, "" for version 2
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            groups |= dict.fromkeys(controllers.split(","), path)
    with suppress(OSError):
        for line in (root / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            before, _, after = line.partition(" - ")
            fields, (kind, _, options) = before.split(), after.split(maxsplit=2)
            is_v2 = kind == "cgroup2"
            if is_v2 or (kind == "cgroup" and controller in options.split(",")):
                mount = root / fields[4].lstrip("/")
                group = mount / _below(fields[3], groups.get("" if is_v2 else controller, "/"))
                for folder in (group, *group.parents):
                    yield folder, is_v2
                    if folder == mount:
                        break


def _below(mounted: str, path: str) -> str:
    """A group's path below the mounted one, or "" if it is not below, as in a container with the host's
    view."""
    mounted = mounted.rstrip("/")
    inside = path == mounted or path.startswith(mounted + "/")
    return path[len(mounted) :].strip("/") if inside and ".." not in path else ""
