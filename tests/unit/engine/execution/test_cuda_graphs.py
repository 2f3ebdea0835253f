"""Steps as CUDA graphs, with calls in the place of graphs: what is captured, compared, and replayed."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maxsimd.engine import EngineConfig
from maxsimd.engine.checkpoint import LoadedModel, load_model
from maxsimd.engine.execution import cuda_graphs
from maxsimd.engine.execution.attention.base import (
    AttentionBackend,
    CapturableBackend,
    CaptureSize,
)
from maxsimd.engine.execution.attention.torch_grouped import GroupedBackend
from maxsimd.engine.execution.attention.varlen import VarlenBackend
from maxsimd.engine.execution.cuda_graphs import GraphedRunner
from maxsimd.engine.execution.device_clock import Times
from maxsimd.engine.execution.graph_recorder import Cost
from maxsimd.engine.execution.modes import Packed, try_packed
from maxsimd.engine.execution.packed_runner import PackedRunner
from maxsimd.engine.execution.selfcheck.samples import make_samples, random_sequences
from maxsimd.engine.ops.qkv import QKV
from maxsimd.scheduler import Chunk, ResultSlot, Sequence, Step, Tokens
from tests.checkpoints import cross_encoders, nomic
from tests.checkpoints.shared import SharedCheckpoints

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


def steps_of(lengths: list[list[int]], vocabulary: int = 100) -> list[Step]:
    random = np.random.default_rng(1)
    steps = []
    for number, of_step in enumerate(lengths):
        chunks = []
        for key, length in enumerate(of_step):
            ids = random.integers(0, vocabulary, length).astype(np.int32)
            chunks.append(Chunk(Sequence.text(key, ResultSlot(0, key), "all", Tokens(ids)), 0, length))
        steps.append(Step(number, tuple(chunks)))
    return steps


def check_replays(
    model: LoadedModel,
    backend: AttentionBackend[Any],
    sizes: tuple[CaptureSize, ...],
    lengths: list[list[int]],
    replays: list[int],
) -> None:
    """Steps of sequences of these lengths give what they give without graphs, also after others have been
    through the same graph; `replays` is how often each graph runs."""
    assert isinstance(backend, CapturableBackend)
    plain = PackedRunner(model, CPU, backend)
    graphed = GraphedRunner(plain, CPU)
    recorder = CallRecorder()
    assert graphed.capture_all(backend, sizes, texts_of(model), recorder) == {}
    before = list(recorder.replays)
    for step in steps_of(lengths):
        ours, cursor = graphed.forward(step)
        exact, expected = plain.forward(step)
        assert cursor.starts == expected.starts
        torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)
    assert [now - then for now, then in zip(recorder.replays, before, strict=True)] == replays


@pytest.fixture(params=["bert", "qwen3"])
def path(request: pytest.FixtureRequest, checkpoints: SharedCheckpoints) -> Path:
    """A small bidirectional and a small causal model."""
    return Path(checkpoints(getattr(cross_encoders, request.param)))


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


def test_a_replayed_step_gives_what_it_gives_without_a_graph(path: Path, backend: VarlenBackend) -> None:
    """A step runs in the smallest graph that holds its tokens and its sequences."""
    lengths = [[9, 12, 1], [20], [3] * 4, [60, 4], [3] * 9, [128, 128], [2] * 41, [300], [5]]
    check_replays(packed_model(path), backend, SIZES, lengths, [1, 1, 1, 4])


def test_the_next_replay_leaves_hidden_states_as_they_were(capture: Callable[..., Captured]) -> None:
    graphed, _ = capture(CallRecorder(), SIZES[-1:])
    first, second = steps_of([[9, 3], [4, 8]])
    hidden, _ = graphed.forward(first)
    before = hidden.clone()
    graphed.forward(second)
    assert torch.equal(hidden, before)


def test_a_model_that_waits_for_the_device_has_no_graphs(
    tmp_path: Path, capture: Callable[..., Captured], caplog: pytest.LogCaptureFixture
) -> None:
    """Each expert is given the tokens that chose it, however many these are."""
    experts = packed_model(Path(nomic.v2_moe(tmp_path / "model")), layers=2)
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
    step, large = steps_of([[5, 5], [100]])
    graphed.forward(step)
    graphed.forward(large)
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
