"""A checkpoint is built once, whoever asks for it, and one that could not be built is built again."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.checkpoints.shared import SharedCheckpoints


def build(folder: Path, labels: int = 1) -> str:
    """Fails where its folder is there, so a second run would be noticed."""
    folder.mkdir()
    (folder / "config.json").write_text(f"{labels}")
    return str(folder)


def build_half(folder: Path) -> str:
    folder.mkdir()
    (folder.parent / "half-built").touch(exist_ok=False)
    raise OSError("no space left")


def test_it_is_built_once_for_all_who_ask_at_the_same_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: SharedCheckpoints(tmp_path)(build), range(8)))
    assert len(set(paths)) == 1
    assert (Path(paths[0]) / "config.json").read_text() == "1"


def test_other_arguments_make_another_checkpoint(tmp_path: Path) -> None:
    checkpoints = SharedCheckpoints(tmp_path)
    plain, three = checkpoints(build), checkpoints(partial(build, labels=3))
    assert [(Path(path) / "config.json").read_text() for path in (plain, three)] == ["1", "3"]
    assert checkpoints(partial(build, labels=3)) == three


def test_a_build_that_failed_does_not_stop_the_next(tmp_path: Path) -> None:
    checkpoints = SharedCheckpoints(tmp_path)
    with pytest.raises(OSError, match="no space"):
        checkpoints(build_half)
    with pytest.raises(FileExistsError, match="half-built"):
        checkpoints(build_half)


def test_a_function_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no name of its own"):
        SharedCheckpoints(tmp_path)(lambda folder: str(folder))


def test_a_copy_may_be_changed(tmp_path: Path) -> None:
    checkpoints = SharedCheckpoints(tmp_path)
    copied = checkpoints.copy(build, tmp_path / "copy")
    (copied / "config.json").write_text("changed")
    assert (Path(checkpoints(build)) / "config.json").read_text() == "1"
