"""Processes that others have started, by /proc."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """A process that is or was there; its `title` is its command and the name that it has given itself."""

    pid: int
    parent: int
    start: int
    title: str

    @property
    def is_there(self) -> bool:
        found = process_of(self.pid)
        return found is not None and found.start == self.start


def processes() -> list[Process]:
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [found for number in numbers if (found := process_of(number)) is not None]


def descendants(pid: int) -> list[Process]:
    running, family = processes(), {pid}
    while new := {each.pid for each in running if each.parent in family} - family:
        family |= new
    return [each for each in running if each.pid in family - {pid}]


def process_of(pid: int) -> Process | None:
    """None for a process that is not there, or that has ended and has not been waited for."""
    try:
        # The name may have spaces and parentheses in it.
        start, _, end = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
    fields, title = end.split(), f"{command.strip()} {start.partition('(')[2]}"
    return None if fields[0] == "Z" else Process(pid, int(fields[1]), int(fields[19]), title)
