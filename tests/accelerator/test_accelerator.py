"""Every kind of score is the CPU's on an accelerator that does not exist, or is refused at load."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from maxsimd.engine import EngineConfig
from maxsimd.engine.cache.fingerprint import _device
from maxsimd.engine.device.stores import open_slab
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution import devices
from maxsimd.engine.ops import triton
from tests.checkpoints import visual
from tests.checkpoints.shared import SharedCheckpoints
from tests.forked import Program
from tests.parity.families import FAMILIES, LISTWISE

BY_NAME = {family.name: (family.build, family.settings) for family in (*FAMILIES, LISTWISE)}
BY_NAME["colpali"] = (visual.colpali, {})
# Pages in a decoder and pairs in an encoder; the others are run by `make test-all`.
FEW = ["colpali", "BERT"]
# transformers makes its masks by vmap, which takes no tensors that Python implements.
MASKED_BY_VMAP = {"EmbeddingGemma"}
# Operations that the device does wrong: in a layer of the model, and the maxima of MaxSim.
BROKEN = [("BERT", "aten::gelu"), ("ColBERT", "aten::scatter_reduce_")]


def run(names: list[str], checkpoints: SharedCheckpoints, *wrong: str, **settings: Any) -> list[Any]:
    lines = []
    for name, broken in zip(names, [None] * (len(names) - len(wrong)) + [*wrong], strict=True):
        build, own = BY_NAME[name]
        case = {"path": checkpoints(build), "settings": own | settings, "pictures": name == "colpali"}
        lines.append(json.dumps(case | {"broken": broken}))
    done = Program([], module="tests.accelerator").run("\n".join(lines).encode())
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(name: str, outcome: dict[str, Any], tolerance: float = 1e-4) -> None:
    assert "error" not in outcome, (name, outcome)
    there, here = (np.array(outcome[where]) for where in ("there", "here"))
    assert np.isfinite(here).all()
    assert np.ptp(here) > 0
    np.testing.assert_allclose(there, here, rtol=0, atol=tolerance * max(1.0, np.abs(here).max()))


def test_scores_are_those_of_the_cpu_and_wrong_ones_refused(checkpoints: SharedCheckpoints) -> None:
    names = FEW + [name for name, _ in BROKEN]
    outcomes = run(names, checkpoints, *(broken for _, broken in BROKEN))
    for name, outcome in zip(FEW, outcomes, strict=False):
        check(name, outcome)
        assert (outcome["device"], outcome["execution"]) == ("imaginary", "packed")
        assert outcome["kernels"] == "plain torch: there are no kernels for imaginary"
    for outcome in outcomes[len(FEW) :]:
        assert outcome["error"].startswith("ModelLoadError: ")
        assert "imaginary" in outcome["error"]
        assert "the CPU" in outcome["error"]


@pytest.mark.exhaustive
def test_so_are_those_of_all_other_families(checkpoints: SharedCheckpoints) -> None:
    names = [name for name in BY_NAME if name not in MASKED_BY_VMAP.union(FEW)]
    for name, outcome in zip(names, run(names, checkpoints), strict=True):
        check(name, outcome)
    [in_int8] = run(["ColBERT"], checkpoints, cache_precision="int8")
    check("ColBERT", in_int8, 2e-2)
    [wrong] = run(["SPLADE"], checkpoints, "aten::index_add_")
    assert wrong["error"].startswith("ModelLoadError: "), "sums of sparse scores"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("abacus", "torch knows no device of that name"),
        ("meta", "Cannot copy out of meta tensor"),
        *((kind, None) for kind in ("xpu", "mps") if kind not in devices.device_names()),
    ],
)
def test_a_device_that_is_not_there_is_refused(name: str, reason: str | None) -> None:
    with pytest.raises(ModelLoadError, match=reason) as refusal:
        devices.choose_device(name)
    assert f"the device {name!r} cannot be used: " in str(refusal.value)
    assert str(refusal.value).endswith(f"; this machine has {', '.join(devices.device_names())}")


def test_hip_is_what_torch_calls_cuda_in_its_builds_for_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.version.hip is None:
        with pytest.raises(ModelLoadError, match="not for ROCm"):
            devices.choose_device("hip")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr("maxsimd.engine.execution.devices._usage_error", lambda device: None)
    assert devices.choose_device("hip:1") == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.choose_device("auto") == torch.device("cpu")
    assert not triton.runs_on(torch.device("cuda", 1))


def test_nothing_is_assumed_of_a_device_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("vulkan")
    assert devices.choose_dtype("auto", device) is torch.float32
    assert devices.free_bytes(device) is None
    assert _device(device) == ("vulkan", "")
    model: Any = None
    assert devices.step_tokens(EngineConfig(), model, device, torch.float32, True) == devices.ON_A_CPU
    config, options = EngineConfig(device_cache_mb=8), {"takes_int8": False, "step_tokens": 1}
    with pytest.raises(ModelLoadError, match="leave it out"):
        open_slab(config, model, model, device, torch.float32, **options)


def test_what_a_device_says_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("xpu")
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", lambda including_emulation: not including_emulation)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device: f"one as {device}")
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (64 << 30, 80 << 30))
    assert devices.choose_dtype("auto", device) is torch.bfloat16
    assert _device(device) == ("xpu", "one as xpu")
    assert devices.free_bytes(device) == 64 << 30
    config = type("Config", (), {"hidden_size": 1024, "get_text_config": lambda self: self})
    model: Any = type("Model", (), {"backbone": type("Backbone", (), {"config": config()})})
    assert devices.step_tokens(EngineConfig(), model, device, torch.bfloat16, True) == devices.ON_A_GPU
