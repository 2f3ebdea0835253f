"""The control groups that this process is in, as the kernel shows them.

Source of the files' names and forms: the Linux kernel's documentation of control groups, versions 1 and 2.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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
