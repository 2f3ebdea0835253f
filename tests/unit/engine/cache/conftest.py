"""A cache on disk, in a folder of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from maxsimd.engine.cache import disk as disk_module
from maxsimd.engine.cache.disk import DiskStore
from tests.unit.engine.cache.entries import MIB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "above" / "cache"


@pytest.fixture
def disk(folder: Path) -> Iterator[DiskStore]:
    store = DiskStore(folder, 4 * MIB)
    yield store
    store.close()


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "PAUSE_SECONDS", 0.0)
