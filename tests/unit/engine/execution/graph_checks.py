"""What replayed steps must give, whatever attention they run with; with plain calls in the place of CUDA
graphs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maxsimd.engine import EngineConfig
from maxsimd.engine.checkpoint import LoadedModel, load_model
from maxsimd.engine.execution.attention.base import AttentionBackend, CapturableBackend, CaptureSize
from maxsimd.engine.execution.attention.torch_grouped import GroupedBackend
from maxsimd.engine.execution.cuda_graphs import GraphedRunner
from maxsimd.engine.execution.device_clock import Times
from maxsimd.engine.execution.graph_recorder import Cost
from maxsimd.engine.execution.modes import Packed, try_packed
from maxsimd.engine.execution.packed_runner import PackedRunner
from maxsimd.engine.execution.selfcheck.samples import make_samples, random_sequences
from maxsimd.scheduler import Chunk, ResultSlot, Step, Tokens
from maxsimd.scheduler import Sequence as TokenSequence

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


def texts_of(model: LoadedModel) -> list[TokenSequence]:
    return [sequence for sequence in random_sequences(model, model.score_task) if not sequence.tokens.images]


def steps_of(lengths: list[list[int]], vocabulary: int = 100) -> list[Step]:
    random = np.random.default_rng(1)
    steps = []
    for number, of_step in enumerate(lengths):
        chunks = []
        for key, length in enumerate(of_step):
            ids = random.integers(0, vocabulary, length).astype(np.int32)
            chunks.append(Chunk(TokenSequence.text(key, ResultSlot(0, key), "all", Tokens(ids)), 0, length))
        steps.append(Step(number, tuple(chunks)))
    return steps


def check_replays(
    model: LoadedModel,
    backend: AttentionBackend[Any],
    sizes: Sequence[CaptureSize],
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


def check_triton_replays(path: str) -> None:
    """Interpreted: by our kernel, with tiles so small that sequences have several blocks."""
    from maxsimd.engine.execution.attention.triton_kernel import TritonBackend
    from tests.unit.engine.ops.kernel_checks import tiled

    model = packed_model(Path(path))
    with tiled((32, 32, 4, 1)):
        steps = [[9, 12, 1], [45], [3] * 9, [5]]
        check_replays(model, TritonBackend(), (CaptureSize(48, 8, 48),), steps, [3])
