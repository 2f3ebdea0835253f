"""Equality but for the last bits, which depend on what a score was computed with."""

from dataclasses import asdict, is_dataclass
from typing import Any

import pytest


def nearly(expected: Any) -> Any:
    """A value that equals the same dictionaries, lists and dataclasses with nearly the same floats."""
    if is_dataclass(expected) and not isinstance(expected, type):
        return _Nearly(type(expected), nearly(asdict(expected)))
    if isinstance(expected, dict):
        return {name: nearly(value) for name, value in expected.items()}
    if isinstance(expected, list | tuple):
        return type(expected)(nearly(value) for value in expected)
    return pytest.approx(expected, rel=1e-5, abs=1e-5) if isinstance(expected, float) else expected


class _Nearly:
    """Compares equal to a dataclass of that kind with nearly those values."""

    def __init__(self, kind: type, values: Any) -> None:
        self._kind, self._values = kind, values

    def __eq__(self, other: object) -> bool:
        return type(other) is self._kind and bool(asdict(other) == self._values)  # type: ignore[call-overload]

    def __repr__(self) -> str:
        return f"nearly {self._kind.__name__}({self._values})"
