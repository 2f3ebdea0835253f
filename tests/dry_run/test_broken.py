"""What a dry run is for: variants of the engine that would fail or wait on a GPU do so here."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from maxsimd.engine.execution.attention.varlen import VarlenBackend, VarlenMetadata
from maxsimd.engine.execution.layout import Layout
from maxsimd.engine.ops.qkv import QKV
from maxsimd.engine.ops.triton.launch import limits
from maxsimd.engine.ops.triton.projection import Projection, project
from maxsimd.engine.scoring.maxsim import triton as maxsim_triton
from maxsimd.pooling import methods
from maxsimd.pooling.transfer import to_device, to_host
from tests.checkpoints import cross_encoders, late_interaction
from tests.checkpoints.shared import SharedCheckpoints
from tests.dry_run import models
from tests.dry_run.entering import fake_gpu
from tests.dry_run.faults import Fault, FreedMemory, HostWaits, MixedDevices, NotCapturable, Race, WrongLaunch
from tests.dry_run.gpu import GPU, FakeGPU
from tests.dry_run.models import OnGPU, load
from tests.dry_run.steps import documents, whole


@pytest.fixture
def gpu() -> Iterator[FakeGPU]:
    with fake_gpu() as gpu, torch.inference_mode():
        yield gpu


@pytest.fixture
def bert(checkpoints: SharedCheckpoints) -> models.OnCPU:
    return load(checkpoints(cross_encoders.bert))


@pytest.fixture
def colbert(checkpoints: SharedCheckpoints) -> models.OnCPU:
    return load(checkpoints(late_interaction.stanford))


def test_a_number_that_pooling_asks_for(
    gpu: FakeGPU, bert: models.OnCPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = methods.take_rows

    def broken(hidden: torch.Tensor, rows: Any) -> torch.Tensor:
        return plain(hidden, rows) / hidden.max().item()

    monkeypatch.setattr(methods, "take_rows", broken)
    with pytest.raises(HostWaits, match="needs the contents"):
        whole(OnGPU(gpu, bert))


def test_indices_of_scoring_that_stay_on_the_host(
    gpu: FakeGPU, colbert: models.OnCPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maxsim_triton, "to_device", lambda numbers, device: torch.from_numpy(numbers))
    with pytest.raises(MixedDevices, match="on the host"):
        documents(OnGPU(gpu, colbert))


class WaitingMetadata(VarlenBackend):
    """Reads the number of rows from the device that has just been told it."""

    def prepare(self, layout: Layout, device: torch.device) -> VarlenMetadata:
        made = super().prepare(layout, device)
        assert int(made.offsets[-1]) >= 0
        return made


def test_metadata_of_attention_that_are_read_back(
    gpu: FakeGPU, bert: models.OnCPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models.BACKENDS, "varlen", lambda: WaitingMetadata(GPU))  # type: ignore[arg-type]
    with pytest.raises(HostWaits, match="needs the contents"):
        whole(OnGPU(gpu, bert, "varlen"))


class CopyingAttention(VarlenBackend):
    def full(self, qkv: QKV, metadata: VarlenMetadata) -> torch.Tensor:
        return super().full(qkv, metadata) * to_device(np.ones(1, dtype=np.float32), GPU)


class CountingAttention(VarlenBackend):
    def full(self, qkv: QKV, metadata: VarlenMetadata) -> torch.Tensor:
        return super().full(qkv, metadata) * len(metadata.offsets.nonzero())


class HostAttention(VarlenBackend):
    def full(self, qkv: QKV, metadata: VarlenMetadata) -> torch.Tensor:
        return super().full(qkv, metadata) * float(torch.ones(4).sum())


@pytest.mark.parametrize("broken", [CopyingAttention, CountingAttention, HostAttention])
def test_what_a_graph_cannot_hold(
    broken: type[VarlenBackend],
    gpu: FakeGPU,
    bert: models.OnCPU,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu.may_wait = True  # what may be done outside of a graph may not be done within
    monkeypatch.setitem(models.BACKENDS, "varlen", lambda: broken(GPU))  # type: ignore[arg-type]
    on = OnGPU(gpu, bert, "varlen")
    with pytest.raises(NotCapturable):
        on.graphed()


def test_what_a_graph_reads_and_nobody_holds(gpu: FakeGPU) -> None:
    scale = [torch.ones(3, device=GPU)]
    replay = gpu.capture(lambda: scale[0].mul(2).sum())  # type: ignore[arg-type, return-value]
    replay()
    scale.clear()
    with pytest.raises(FreedMemory):
        replay()


@pytest.mark.parametrize(
    "copy",
    [
        lambda: torch.tensor([1, 2], device=GPU),
        lambda: torch.tensor([1, 2]).to(GPU, non_blocking=True),
        lambda: torch.tensor([1, 2]).pin_memory().to(GPU),
        lambda: torch.zeros(2).copy_(torch.zeros(2, device=GPU), non_blocking=True),
        lambda: torch.zeros(2, device=GPU).cpu(),
        lambda: torch.zeros(2, device=GPU).tolist(),
        lambda: torch.zeros(2, device=GPU)[[0]],
        lambda: bool(torch.zeros(2, device=GPU).any()),
        lambda: torch.zeros(2, device=GPU).nonzero(),
        lambda: torch.zeros(2, device=GPU)[torch.zeros(2, device=GPU) > 0],
        lambda: torch.zeros(2, device=GPU).unique(),
        lambda: torch.zeros(3, device=GPU).index_put_(
            (torch.zeros(3, device=GPU) > 0,), torch.zeros(2, device=GPU)
        ),
    ],
)
def test_what_makes_the_host_wait(copy: Any, gpu: FakeGPU) -> None:
    with pytest.raises(HostWaits):
        copy()


@pytest.mark.parametrize(
    "mixed",
    [
        lambda: torch.zeros(2, device=GPU) + torch.zeros(2),
        lambda: torch.zeros(2, device=GPU)[torch.tensor([0, 1])],
        lambda: torch.zeros(2, device=GPU).index_select(0, torch.tensor([0])),
        lambda: torch.cat([torch.zeros(2, device=GPU), torch.zeros(2)]),
    ],
)
def test_what_mixes_devices(mixed: Any, gpu: FakeGPU) -> None:
    with pytest.raises(MixedDevices):
        mixed()


def test_memory_that_a_copy_still_reads_or_writes(gpu: FakeGPU) -> None:
    numbers = torch.zeros(3).pin_memory()
    numbers.to(GPU, non_blocking=True)
    with pytest.raises(Race):
        numbers.fill_(1)
    results = to_host(torch.zeros(3, device=GPU))
    with pytest.raises(Race):
        results.sum()
    gpu.arrive()
    assert results.sum() + numbers.fill_(1).sum() == 3


def test_a_kernel_that_is_handed_something_else(gpu: FakeGPU) -> None:
    hidden, weight = (torch.zeros(5, 32, device=GPU) for _ in range(2))
    rows = torch.zeros(3, dtype=torch.int64, device=GPU)
    made = project(hidden, rows, Projection(weight, None, None), torch.float32)
    assert (made.shape, made.device.type) == ((3, 5), "cuda")
    assert gpu.counts.launches["projection_kernel"] == 1
    for wrong in (
        (hidden, rows.int(), Projection(weight, None, None)),
        (hidden.half(), rows, Projection(weight, None, None)),
        (hidden, rows, Projection(weight[:, :16], None, None)),
        (hidden, rows, Projection(weight, torch.zeros(5), None)),
    ):
        with pytest.raises(Fault):
            project(*wrong, torch.float32)
    with pytest.raises(WrongLaunch):
        project(hidden, rows.int(), Projection(weight, None, None), torch.float32)


def test_what_is_counted(gpu: FakeGPU) -> None:
    x = to_device(np.zeros((4, 8), dtype=np.float32), GPU)
    assert (gpu.counts.to_device, gpu.counts.bytes_to_device, gpu.counts.allocations) == (1, 128, 1)
    assert gpu.counts.num_launches == 0
    view = x[:2].view(-1).unsqueeze(0).expand(3, -1)
    assert (gpu.counts.num_launches, gpu.counts.allocations) == (0, 1)
    view + 1
    x.mul_(2)
    x[:0] + 1
    assert gpu.counts.launches == {"add": 1, "mul_": 1}
    assert gpu.counts.allocations == 2
    like = torch.zeros_like(x, device="cpu", pin_memory=True)
    assert like.is_pinned()
    assert like.sum() == 0
    to_host(x)
    assert (gpu.counts.to_host, gpu.counts.bytes_to_host) == (1, 128)


def test_nothing_of_the_device_stays_when_it_is_left() -> None:
    """Tests beside these find a machine without a GPU again."""
    with fake_gpu():
        assert limits(GPU).generation == 9
        assert torch.zeros(2, device=GPU)[:1].shape == (1,)
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device=GPU)
    assert limits(torch.device("cpu")).generation == 0
    assert torch.zeros(2).sum().item() == 0
