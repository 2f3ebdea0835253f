"""The order in which tests run, and which of them are fast."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Gives the fixtures to processes that run tests. What hands out tests need not import as much."""
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.fixtures")


# Files of pure logic, whose tests are all part of `make test-fast`. Others join them one by one, by the mark.
FAST = (
    "unit/test_documentation.py",
    "unit/engine/scoring/test_maxsim.py",
    "unit/pooling/test_methods.py",
    "unit/scheduler/fleet/test_*.py",
    "unit/test_rooms.py",
    "unit/scheduler/test_*.py",
    "unit/test_shared_checkpoints.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is fast, and puts the tests of a file that are about one family side by side: they share its
    engines."""
    for item in items:
        if any(item.path.match(pattern) for pattern in FAST):
            item.add_marker(pytest.mark.fast)
    files = {path: i for i, path in enumerate(dict.fromkeys(item.path for item in items))}
    families = {family: i for i, family in enumerate(dict.fromkeys(map(_family, items)))}
    items.sort(key=lambda item: (files[item.path], families[_family(item)]))


def _family(item: pytest.Item) -> object:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("family")
