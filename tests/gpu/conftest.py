"""Skips all tests of this folder without a GPU."""

from pathlib import Path

import pytest
import torch

HERE = str(Path(__file__).parent) + "/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.skip(reason="there is no GPU"))
