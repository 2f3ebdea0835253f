"""Every family runs on a GPU without mixing devices and without waiting for it, at a cost that is held."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch

from maxsimd.engine.device import checks
from maxsimd.engine.execution.attention.select import find_mismatch
from maxsimd.engine.scoring.maxsim_triton import maxsim_triton
from tests.checkpoints.shared import SharedCheckpoints
from tests.dry_run import driving
from tests.dry_run import gpu as fakes
from tests.dry_run.gpu import GPU, FakeGPU, HostWaits, MixedDevices, NotCapturable, Race, fake_gpu
from tests.exhaustive import exhaustive

BY_NAME = {each.name: each for each in driving.CHECKPOINTS}
Load = Callable[[str], driving.Loaded]


@pytest.fixture(scope="module")
def loaded(checkpoints: SharedCheckpoints) -> Load:
    """Loads a model by its name, once: what has been moved to the device stays there."""

    @cache
    def load_by_name(name: str) -> driving.Loaded:
        checkpoint = BY_NAME[name]
        return driving.load(checkpoints(checkpoint.build), **checkpoint.settings)

    return load_by_name


@pytest.fixture
def gpu() -> Iterator[FakeGPU]:
    with fake_gpu() as gpu:
        yield gpu


@pytest.mark.parametrize(
    "name", [*sorted(driving.ONE_OF_EACH), *exhaustive(*sorted(BY_NAME.keys() - driving.ONE_OF_EACH))]
)
def test_a_step_neither_waits_nor_costs_more(name: str, loaded: Load) -> None:
    """Steps mix no devices, and wait for one only in towers whose code is not ours. The costs are those that
    `python -m tests.dry_run --write` has held."""
    model = loaded(name)
    with fake_gpu() as gpu:
        gpu.may_wait = name in driving.MAY_WAIT
        on = driving.OnGPU(gpu, model)
        assert on.is_packed == BY_NAME[name].packed
        assert driving.cost_of(on) == driving.held()[name]
        for drive in driving.drives(on):
            waits = drive is driving.pictures and name in driving.TOWERS_WAIT
            with pytest.raises(HostWaits) if waits else nullcontext():
                driving.run(drive, on)
        on.close()


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "backend", "precision"),
    [
        ("ColBERT", "triton", "int8"),
        *exhaustive(("ColBERT", "torch", "float32")),
        *exhaustive(*((x, "triton", "bfloat16") for x in ("GTE-ModernColBERT", "EmbeddingGemma", "Qwen3"))),
    ],
)
def test_nor_with_other_backends(name: str, backend: str, precision: Any, gpu: FakeGPU, loaded: Load) -> None:
    """The same with other backends; and no kernel is compiled for a step: the checks at load launch all."""
    on, gpu.may_wait = driving.OnGPU(gpu, loaded(name), backend, precision), True
    find_mismatch(on.backend, on.model, GPU, driving.DTYPE)
    if on.is_late:
        dim, is_int8 = on.model.tasks[on.model.score_task].dim, precision == "int8"
        with patch.object(checks, "_TOLERANCE", float("inf")):
            checks.checked_maxsim("triton", maxsim_triton, dim, GPU, driving.DTYPE, int8=is_int8)
    checks.warm_up(on.model, on.runner, on.pooler)
    at_load, gpu.may_wait = set(gpu.compiled), False
    for drive in driving.drives(on):
        driving.run(drive, on)
    assert gpu.compiled == at_load
    on.close()


def test_every_model_is_held() -> None:
    assert [*driving.held()] == [*BY_NAME]
    assert {name for name, cost in driving.held().items() if cost.waits} <= driving.MAY_WAIT


@pytest.mark.parametrize(
    "name",
    # a vector a token, a decoder, and an encoder whose last layer computes first rows alone
    ["ColBERT", "Qwen3-Reranker", "BERT", *exhaustive("GTE-ModernColBERT", "EmbeddingGemma")],
)
def test_small_steps_alone_are_replayed(name: str, gpu: FakeGPU, loaded: Load) -> None:
    on = driving.OnGPU(gpu, loaded(name))
    # BERT's last layer is needed: it computes first rows alone.
    with nullcontext() if name == "BERT" else driving.first_layers(on.model.backbone, 2):
        runner = on.graphed()
    ids = driving.Ids(on.model)
    for lengths in ([9, 30, 1], [20], [60, 4], [200, 100]):
        step = driving.step_of(*(ids.text(length) for length in lengths))
        with gpu.counted() as counts:
            runner.forward(step)
        assert counts.launches["graph"] == 1
        assert set(counts.launches) <= {"graph", "copy_", "clone"}
        assert (counts.allocations, counts.to_device) == (1, 1)
        on.run(step, runner=runner)
    with gpu.counted() as counts:
        runner.forward(driving.step_of(ids.text(300), ids.text(300)))
    assert "graph" not in counts.launches
    on.close()


@torch.inference_mode()
def test_what_a_gpu_would_not_do_fails_here(gpu: FakeGPU) -> None:
    there = torch.zeros(2, device=GPU)
    faults: dict[type[Exception], list[Callable[[], object]]] = {
        HostWaits: [
            *(lambda: torch.tensor([1, 2]).to(GPU, non_blocking=True), there.tolist, there.nonzero),
            lambda: torch.tensor([1, 2]).pin_memory().to(GPU),
        ],
        MixedDevices: [lambda: there + torch.zeros(2), lambda: there[torch.tensor([0, 1])]],
        NotCapturable: [lambda: gpu.capture(lambda: there + torch.zeros(2).pin_memory().to(GPU))],  # type: ignore[arg-type, return-value]
    }
    for fault, mistakes in faults.items():
        for mistake in mistakes:
            with pytest.raises(fault):
                mistake()
    numbers = torch.zeros(3).pin_memory()
    numbers.to(GPU, non_blocking=True)
    with pytest.raises(Race):
        numbers.fill_(1)
    scale = [torch.ones(3, device=GPU)]
    replay = gpu.capture(lambda: scale[0].mul(2).sum())  # type: ignore[arg-type, return-value]
    scale.clear()
    with pytest.raises(fakes.FreedMemory):
        replay()
