"""What a layer of a published model launches."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import cross_encoders
from tests.checkpoints.shared import SharedCheckpoints
from tests.dry_run.entering import fake_gpu
from tests.dry_run.models import load
from tests.dry_run.shapes import launches_a_layer


@pytest.mark.parametrize(
    ("shape", "like", "backend", "launches"),
    [
        ("XLM-R-large", cross_encoders.xlm_roberta, "triton", 8),
        ("XLM-R-large", cross_encoders.xlm_roberta, "varlen", 9),
        ("Qwen3-0.6B", cross_encoders.qwen3, "triton", 9),
        ("Qwen3-0.6B", cross_encoders.qwen3, "varlen", 10),
    ],
)
def test_a_layer_launches_as_many_kernels(
    shape: str,
    like: Callable[[Path], str],
    backend: str,
    launches: int,
    checkpoints: SharedCheckpoints,
) -> None:
    """Attention by torch fills a state of random numbers beside."""
    model = load(checkpoints(like)).model
    with fake_gpu() as gpu:
        assert launches_a_layer(gpu, shape, model, backend) == launches
