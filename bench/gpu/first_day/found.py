"""How a step reports what it finds: lines of its output that begin with a mark."""

import json
from collections.abc import Iterable, Mapping

_MARK = "found: "
Value = str | float | None


def show(name: str, value: Value) -> None:
    """Prints a figure or a fact, at once, so that nothing is lost if the process dies afterwards."""
    print(_MARK + json.dumps([name, value]), flush=True)


def show_all(figures: Mapping[str, object], prefix: str = "") -> None:
    """Prints the figures of a benchmark; those within a figure are named after it."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            show_all(value, f"{prefix}{name}: ")
        else:
            assert value is None or isinstance(value, str | float | int)
            show(prefix + name, value)


def read(lines: Iterable[str]) -> dict[str, Value]:
    """What was shown, of all lines that a step printed."""
    marked = (line.removeprefix(_MARK) for line in lines if line.startswith(_MARK))
    return dict(json.loads(text) for text in marked)
