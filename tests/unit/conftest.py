"""Fixtures of the tests of units."""

import pytest
import torch


@pytest.fixture
def two_threads() -> None:
    """For kernels that divide their work among threads. The number is set back after every test."""
    torch.set_num_threads(2)
