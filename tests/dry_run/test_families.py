"""Every family runs on a GPU without mixing devices and without waiting for it, at a cost that is held."""

import pytest

from tests.checkpoints.shared import SharedCheckpoints
from tests.dry_run.entering import fake_gpu
from tests.dry_run.faults import HostWaits
from tests.dry_run.measured import (
    CHECKPOINTS,
    DEEP_WAITS,
    ONE_OF_EACH,
    TOWERS_WAIT,
    Checkpoint,
    cost_of,
    held,
)
from tests.dry_run.models import OnCPU, OnGPU, load
from tests.dry_run.steps import drive_all, drives, pictures, run, with_features_ready

BY_NAME = {each.name: each for each in CHECKPOINTS}
PARAMS = [
    pytest.param(each, marks=() if each.name in ONE_OF_EACH else pytest.mark.exhaustive, id=each.name)
    for each in CHECKPOINTS
]


@pytest.fixture(scope="module", params=PARAMS)
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    found: Checkpoint = request.param
    return found


@pytest.fixture(scope="module")
def loaded(checkpoint: Checkpoint, checkpoints: SharedCheckpoints) -> OnCPU:
    return load(checkpoints(checkpoint.build), **checkpoint.settings)


def test_a_step_neither_waits_nor_costs_more(checkpoint: Checkpoint, loaded: OnCPU) -> None:
    """No step mixes devices or waits: of whole, cut, shared, cached and explained sequences, and of pictures.
    The towers of some models wait in code that is not ours; what follows them does not. Costs are what
    `python -m tests.dry_run --write` has held."""
    with fake_gpu() as gpu:
        gpu.may_wait = checkpoint.may_wait
        on = OnGPU(gpu, loaded, "varlen")
        assert on.is_packed == checkpoint.packed
        assert cost_of(on) == held()[checkpoint.name]
        on.close()
        on = OnGPU(gpu, loaded, "varlen")
        for drive in drives(on):
            if drive is pictures and checkpoint.name in TOWERS_WAIT:
                with pytest.raises(HostWaits):
                    run(drive, on)
                with_features_ready(on)
            if drive is pictures and checkpoint.name in DEEP_WAITS:
                with pytest.raises(HostWaits):
                    run(drive, on)
                continue
            run(drive, on)
        on.close()


@pytest.mark.parametrize(
    ("name", "backend", "precision"),
    [
        ("ColBERT", "triton", "int8"),
        ("ColBERT", "torch", "float32"),
        pytest.param("GTE-ModernColBERT", "triton", "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param("EmbeddingGemma", "triton", "bfloat16", marks=pytest.mark.exhaustive),
        ("Qwen3", "triton", "bfloat16"),
        pytest.param("colpali", "triton", "bfloat16", marks=pytest.mark.exhaustive),
    ],
)
def test_nor_with_another_attention_or_cache(
    name: str, backend: str, precision: str, checkpoints: SharedCheckpoints
) -> None:
    checkpoint = BY_NAME[name]
    with fake_gpu() as gpu:
        loaded = load(checkpoints(checkpoint.build), **checkpoint.settings)
        on = OnGPU(gpu, loaded, backend, precision)  # type: ignore[arg-type]
        drive_all(on)
        on.close()


def test_every_model_is_held() -> None:
    assert [*held()] == [*BY_NAME]
    assert {name for name, cost in held().items() if cost.waits} <= {
        each.name for each in CHECKPOINTS if each.may_wait
    }
