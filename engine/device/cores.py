"""How many cores this process may use: by its affinity, and by the CPU quotas of its control groups."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from maxsimd.engine.device.control_groups import ROOT, groups_around


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
