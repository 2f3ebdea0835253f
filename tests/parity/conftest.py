"""Fixtures of the tests of parity."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from maxsimd.engine import Engine, EngineConfig
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity.changes import Build, Edit

Changed = Callable[..., str]
Start = Callable[..., Awaitable[Engine]]


@pytest.fixture
def changed(checkpoints: SharedCheckpoints, tmp_path: Path) -> Changed:
    """A copy of a checkpoint with edits. Names of other folders in it may be relative, so it stands apart."""

    def change(build: Build, *edits: Edit) -> str:
        folder = checkpoints.copy(build, tmp_path / "copy" / "checkpoint")
        for edit in edits:
            edit(folder)
        return str(folder)

    return change


@pytest.fixture
def start(checkpoints: SharedCheckpoints, engines: Engines) -> Start:
    """Starts a shared engine, in float32 by default, for what builds a checkpoint or for its path."""

    def started(model: Build | str, **options: Any) -> Awaitable[Engine]:
        path = model if isinstance(model, str) else checkpoints(model)
        return engines(EngineConfig(model=path, **{"dtype": "float32"} | options))

    return started
