"""Marks cases that `make test` leaves out."""

from typing import Any

import pytest


def exhaustive(*values: object) -> list[Any]:
    """Cases of a parametrized test, one of each value; of several parameters, each is a tuple."""
    marks = pytest.mark.exhaustive
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=marks) for each in values]
