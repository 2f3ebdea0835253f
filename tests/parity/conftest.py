"""What tests of parity share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints.shared import SharedCheckpoints
from tests.parity.changes import Build, Edit


@pytest.fixture
def changed(checkpoints: SharedCheckpoints, tmp_path: Path) -> Callable[..., str]:
    """A copy of a checkpoint with edits. Names of other folders in it may be relative, so it stands apart."""

    def change(build: Build, *edits: Edit) -> str:
        folder = checkpoints.copy(build, tmp_path / "copy" / "checkpoint")
        for edit in edits:
            edit(folder)
        return str(folder)

    return change
