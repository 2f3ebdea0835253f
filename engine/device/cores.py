"""How many cores this process may use: by its affinity, and by the CPU quotas of its control groups.

Source of the files' names and forms: the Linux kernel's documentation of control groups, versions 1 and 2.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


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


def usable_cores() -> Cores:
    """The cores that this process may use now."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Cores(affinity, cpu_quota())


def cpu_quota(root: Path = _ROOT) -> float | None:
    """The least CPU quota of this process's control groups and of all that these lie in, in cores; None where
    none has one. `root` is where `/proc/self` and the mounted control groups are found."""
    quotas = []
    for mount, group, is_v2 in _hierarchies(root):
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):
                quota = _quota_v2(folder) if is_v2 else _quota_v1(folder)
                if quota is not None:
                    quotas.append(quota)
            if folder == mount:
                break
    return min(quotas, default=None)


def _hierarchies(root: Path) -> Iterator[tuple[Path, Path, bool]]:
    """Where each hierarchy with CPU quotas is mounted, this process's group in it, and whether it is of
    version 2."""
    groups = dict(_groups(root))
    with suppress(OSError):
        for line in (root / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            before, _, after = line.partition(" - ")
            fields, (kind, _, options) = before.split(), after.split(maxsplit=2)
            is_v2 = kind == "cgroup2"
            if is_v2 or (kind == "cgroup" and "cpu" in options.split(",")):
                mount = root / fields[4].lstrip("/")
                yield mount, mount / _below(fields[3], groups.get("" if is_v2 else "cpu", "/")), is_v2


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


def _quota_v2(folder: Path) -> float | None:
    quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    quota = int((folder / "cpu.cfs_quota_us").read_text(encoding="utf-8"))
    return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text(encoding="utf-8"))
