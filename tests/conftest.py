"""The order in which tests run, and which of them are fast."""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path, PurePath
from types import NoneType

import pytest

from tests import forked, share_cores


def pytest_configure(config: pytest.Config) -> None:
    """Gives the fixtures to processes that run tests; workers are copies that have imported everything."""
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.fixtures")
    elif set(config.option.tx) == {"popen"} and Path.cwd() == config.rootpath:
        share_cores(len(config.option.tx))
        os.environ[forked.SOCKET] = forked.parent()
        worker = f"popen//python={shlex.quote(sys.executable)} -m tests.forked"
        config.option.tx = [worker] * len(config.option.tx)


# Files of pure logic, whose tests are all part of `make test-fast`. Others join them one by one, by the mark.
FAST = (
    "unit/test_documentation.py", "unit/engine/scoring/test_maxsim.py", "unit/pooling/test_methods.py",
    "unit/scheduler/fleet/test_*.py", "unit/test_rooms.py", "unit/scheduler/test_*.py",
)  # fmt: skip
# Files whose tests wait longest. They are begun first, so that no worker is left with them in the end.
LONG = ("server/test_fleet.py", "accelerator/test_*.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Leaves out exhaustive cases that `-m` would deselect: making an item of each takes seconds a worker."""
    if "not exhaustive" not in metafunc.config.option.markexpr:
        return
    marks = metafunc.definition.own_markers
    for i, mark in enumerate(marks):
        if mark.name != "parametrize" or not isinstance(mark.kwargs.get("ids"), NoneType | Callable):
            continue
        names, values, *more = mark.args
        usual = [value for value in values if not _is_exhaustive(value)]
        if usual:
            marks[i] = pytest.mark.parametrize(names, usual, *more, **mark.kwargs).mark


def _is_exhaustive(value: object) -> bool:
    return any(getattr(mark, "name", "") == "exhaustive" for mark in getattr(value, "marks", ()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is fast, begins with what is long, and puts tests of one family side by side."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    for file, tests in files.items():
        if any(PurePath(file).match(pattern) for pattern in FAST):
            for item in tests:
                item.add_marker(pytest.mark.fast)
        families = {family: i for i, family in enumerate(dict.fromkeys(map(_family, tests)))}
        tests.sort(key=lambda item: families[_family(item)])
    by_length = sorted(files, key=lambda file: not any(PurePath(file).match(pattern) for pattern in LONG))
    items[:] = [item for file in by_length for item in files[file]]


def _family(item: pytest.Item) -> object:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("family")
