"""Steps as CUDA graphs, with calls in the place of graphs: what is captured, compared, and replayed."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from maxsimd.engine import EngineConfig
from maxsimd.engine.checkpoint import LoadedModel, load_model
from maxsimd.engine.execution import cuda_graphs
from maxsimd.engine.execution.attention.base import CaptureSize
from maxsimd.engine.execution.attention.torch_grouped import GroupedBackend
from maxsimd.engine.execution.attention.varlen import VarlenBackend
from maxsimd.engine.execution.cuda_graphs import GraphedRunner
from maxsimd.engine.execution.device_clock import Times
from maxsimd.engine.execution.graph_recorder import Cost
from maxsimd.engine.execution.modes import Packed, try_packed
from maxsimd.engine.execution.packed_runner import PackedRunner
from maxsimd.engine.execution.selfcheck.samples import make_samples, random_sequences
from maxsimd.engine.ops.qkv import QKV
from maxsimd.scheduler import Sequence
from tests.checkpoints import cross_encoders, nomic
from tests.checkpoints.shared import Build, SharedCheckpoints
from tests.unit.engine.execution.test_packed import make_step, plain_varlen

CPU = torch.device("cpu")
SIZES = (CaptureSize(256, 40, 128), CaptureSize(64, 32, 64), CaptureSize(64, 4, 64), CaptureSize(32, 4, 32))


class CallRecorder:
    """Calls in the place of graphs: `replays` counts those of each, in the order of their capture. Every run
    takes these milliseconds and this share of the memory."""

    def __init__(self, host: float = 1.0, device: float = 1.0, memory: float = 0.0) -> None:
        self.replays: list[int] = []
        self._cost = Cost(Times(host, device), memory)

    def cost(self, run: Callable[[], object]) -> Cost:
        return self._cost

    def capture(self, run: Callable[[], object]) -> Callable[[], None]:
        run()
        number = len(self.replays)
        self.replays.append(0)

        def replay() -> None:
            self.replays[number] += 1
            run()

        return replay


def packed_model(path: Path, layers: int = 1) -> LoadedModel:
    """A checkpoint in float32, with packed attention and its first layers alone: graphs need no more."""
    model = load_model(EngineConfig(model=path), CPU)
    backbone: Any = model.backbone.float()
    del (backbone.layers if hasattr(backbone, "layers") else backbone.encoder.layer)[layers:]
    assert isinstance(
        try_packed(model, CPU, GroupedBackend(supports_first_rows=False), make_samples(model)), Packed
    )
    return model


def texts_of(model: LoadedModel) -> list[Sequence]:
    return [sequence for sequence in random_sequences(model, model.score_task) if not sequence.tokens.images]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> VarlenBackend:
    """By torch's kernel for GPUs, with plain torch in its place."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain_varlen)
    return VarlenBackend(torch.device("cpu"))


@pytest.fixture(scope="module")
def model(bert_cross_encoder: str) -> LoadedModel:
    return packed_model(Path(bert_cross_encoder))


Captured = tuple[GraphedRunner, Any]


@pytest.fixture
def capture(model: LoadedModel, backend: VarlenBackend) -> Callable[..., Captured]:
    """Captures sizes, and gives the runner and the sizes that are left out."""

    def captured(recorder: CallRecorder, sizes: Any = SIZES, **other: Any) -> Captured:
        used, by = other.get("model", model), other.get("backend", backend)
        graphed = GraphedRunner(PackedRunner(used, CPU, by), CPU)
        return graphed, graphed.capture_all(by, sizes, texts_of(used), recorder)

    return captured


@pytest.mark.parametrize("build", [cross_encoders.bert, cross_encoders.qwen3])
def test_a_replayed_step_gives_what_it_gives_without_a_graph(
    build: Build, checkpoints: SharedCheckpoints, backend: VarlenBackend
) -> None:
    """A step runs in the smallest graph that holds its tokens and its sequences, also after others have been
    through the same graph."""
    model, recorder = packed_model(Path(checkpoints(build))), CallRecorder()
    plain = PackedRunner(model, CPU, backend)
    graphed = GraphedRunner(plain, CPU)
    assert graphed.capture_all(backend, SIZES, texts_of(model), recorder) == {}
    before = list(recorder.replays)
    for lengths in ([9, 12, 1], [20], [3] * 4, [60, 4], [3] * 9, [128, 128], [2] * 41, [300], [5]):
        ours, cursor = graphed.forward(make_step(lengths))
        exact, expected = plain.forward(make_step(lengths))
        assert cursor.starts == expected.starts
        torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)
    assert [now - then for now, then in zip(recorder.replays, before, strict=True)] == [1, 1, 1, 4]


def test_the_next_replay_leaves_hidden_states_as_they_were(capture: Callable[..., Captured]) -> None:
    graphed, _ = capture(CallRecorder(), SIZES[-1:])
    hidden, _ = graphed.forward(make_step([9, 3]))
    before = hidden.clone()
    graphed.forward(make_step([4, 8]))
    assert torch.equal(hidden, before)


def test_a_model_that_waits_for_the_device_has_no_graphs(
    checkpoints: SharedCheckpoints, capture: Callable[..., Captured], caplog: pytest.LogCaptureFixture
) -> None:
    """Each expert is given the tokens that chose it, however many these are."""
    experts = packed_model(Path(checkpoints(nomic.v2_moe)), layers=2)
    recorder = CallRecorder()
    with caplog.at_level(logging.DEBUG, logger="maxsimd"):
        graphed, left_out = capture(recorder, model=experts)
    assert (graphed.sizes, left_out, recorder.replays) == ((), {}, [])
    assert "no CUDA graphs: the model waits for the device (aten.nonzero" in caplog.text


def test_launching_takes_as_long_as_computing_some_tokens(capture: Callable[..., Captured]) -> None:
    """The host takes three times as long as the device takes for the largest size."""
    graphed, _ = capture(CallRecorder(host=3.0, device=1.0))
    assert graphed.launch_tokens == 3 * SIZES[0].rows


class BrokenRecorder(CallRecorder):
    """One graph does nothing when it is replayed, and one cannot be captured."""

    def capture(self, run: Callable[[], object]) -> Callable[[], None]:
        replay = super().capture(run)
        if len(self.replays) == 2:
            raise RuntimeError("operation not permitted when the stream is capturing")
        return replay if len(self.replays) != 1 else lambda: None


def test_a_size_that_differs_or_fails_is_left_out_alone(capture: Callable[..., Captured]) -> None:
    recorder = BrokenRecorder()
    graphed, mismatches = capture(recorder)
    assert graphed.sizes == (SIZES[3], SIZES[2])
    assert "differ by" in mismatches[SIZES[0]]
    assert "not permitted" in mismatches[SIZES[1]]
    for lengths in ([5, 5], [100]):
        graphed.forward(make_step(lengths))
    assert recorder.replays[0] == 0


class FirstTokensBackend(VarlenBackend):
    """In graphs alone, tokens behind a sequence's first 100 are attended to wrongly."""

    def full(self, qkv: QKV, metadata: Any) -> torch.Tensor:
        out = super().full(qkv, metadata)
        if metadata.captured is not None and len(out) > 100:
            out[100:] = 0
        return out


def test_every_size_is_compared_with_steps_that_fill_it(capture: Callable[..., Captured]) -> None:
    _, mismatches = capture(CallRecorder(), backend=FirstTokensBackend(CPU))
    assert list(mismatches) == [SIZES[0]]


def test_graphs_that_are_no_help_are_not_captured(
    capture: Callable[..., Captured], caplog: pytest.LogCaptureFixture
) -> None:
    for recorder, reason in (
        (CallRecorder(host=1.0, device=9.0), "bound by the device"),
        (CallRecorder(memory=0.5), "50% of the memory"),
    ):
        with caplog.at_level(logging.DEBUG, logger="maxsimd"):
            graphed, left_out = capture(recorder, SIZES[-1:])
        assert (graphed.sizes, left_out, recorder.replays) == ((), {}, [])
        assert reason in caplog.text


def test_only_what_is_captured_without_fault_is_used(
    model: LoadedModel,
    backend: VarlenBackend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(cuda_graphs, "sizes_for", lambda *most: SIZES)
    gpu = torch.device("cuda")
    plain = PackedRunner(model, CPU, backend)
    monkeypatch.setattr(cuda_graphs, "GraphedRunner", lambda runner, device: GraphedRunner(runner, CPU))
    monkeypatch.setattr(cuda_graphs, "CudaRecorder", BrokenRecorder)
    most = CaptureSize(256, 40, 128)
    with caplog.at_level(logging.WARNING, logger="maxsimd"):
        found = cuda_graphs.with_graphs(plain, backend, gpu, texts_of(model), most)
    assert isinstance(found, GraphedRunner)
    assert (
        "not replayed as CUDA graphs of 256 rows and 40 sequences: their hidden states differ" in caplog.text
    )
    assert cuda_graphs.with_graphs(plain, backend, CPU, texts_of(model), most) is plain
    assert cuda_graphs.with_graphs(plain, backend, gpu, [], most) is plain
