"""How much memory is free for this process: on the machine, and by the limits of its control groups."""

from contextlib import suppress
from pathlib import Path

from maxsimd.engine.device.control_groups import ROOT, groups_around

# Of each version's groups: the limit, and what is in use. Groups of version 1 without a limit have one of
# more than any machine has.
_FILES = {True: ("memory.max", "memory.current"), False: ("memory.limit_in_bytes", "memory.usage_in_bytes")}


def free_memory(root: Path = ROOT) -> int | None:
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
