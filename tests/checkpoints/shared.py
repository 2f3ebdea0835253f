"""Checkpoints that are built once a run. Tests that change one take a copy."""

import functools
import inspect
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

Build = Callable[[Path], str]


@dataclass(frozen=True, slots=True)
class SharedCheckpoints:
    """A folder of checkpoints under the names of what builds them."""

    folder: Path

    def __call__(self, build: Build) -> str:
        """The path that `build` returned, where it was run before; else it is run now."""
        folder = self.folder / _name(build)
        finished = folder.with_suffix(".path")
        with FileLock(folder.with_suffix(".lock")):
            if not finished.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a build that failed
                finished.write_text(build(folder), encoding="utf-8")
            return finished.read_text(encoding="utf-8")

    def copy(self, build: Build, target: Path) -> Path:
        """A copy that a test may change. `target` must stand where nothing else is."""
        return Path(shutil.copytree(self(build), target))


def shared_checkpoints(factory: pytest.TempPathFactory) -> SharedCheckpoints:
    """Under the folder of the whole run: with workers, that of each lies in there."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-checkpoints"
    folder.mkdir(exist_ok=True)
    return SharedCheckpoints(folder)


def _name(build: Build) -> str:
    """The function's module and name, and the arguments that it is bound to."""
    bound: dict[str, object] = {}
    if isinstance(build, functools.partial):
        assert not build.args, "positional arguments have no names"
        build, bound = build.func, build.keywords
    assert inspect.isfunction(build)
    assert "<" not in build.__qualname__, f"{build} has no name of its own, so it cannot be told from others"
    arguments = [f"{name}={value}" for name, value in sorted(bound.items())]
    return "-".join([build.__module__.rsplit(".", 1)[-1], build.__qualname__, *arguments])
