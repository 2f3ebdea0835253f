"""Models on the GPU that is not there: loaded and proven on the CPU as always, then moved, and run by what a
GPU runs them by.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from maxsimd.engine import EngineConfig
from maxsimd.engine.actors.actor import Mailbox
from maxsimd.engine.actors.messages import Commit, Pool, Score
from maxsimd.engine.cache import EmbeddingCache, Precision
from maxsimd.engine.cache.memory import MemoryStore
from maxsimd.engine.cache.slab import EmbeddingSlab
from maxsimd.engine.checkpoint import LoadedModel, load_model
from maxsimd.engine.checkpoint.heads import modules_of
from maxsimd.engine.device.load import DeviceModel, _pooler
from maxsimd.engine.device.thread import DeviceActors
from maxsimd.engine.execution.attention.base import AttentionBackend, CapturableBackend, CaptureSize
from maxsimd.engine.execution.attention.torch_grouped import GroupedBackend
from maxsimd.engine.execution.attention.triton_kernel import TritonBackend
from maxsimd.engine.execution.attention.varlen import VarlenBackend
from maxsimd.engine.execution.cuda_graphs import GraphedRunner
from maxsimd.engine.execution.device_clock import Times
from maxsimd.engine.execution.fused_layers import fuse
from maxsimd.engine.execution.graph_recorder import Cost, Run
from maxsimd.engine.execution.modes import Execution, Packed, choose_execution, make_runner, tasks_for
from maxsimd.engine.execution.packed_runner import ModelRunner, PackedRunner
from maxsimd.engine.execution.precision import cast
from maxsimd.engine.execution.prepare import PreparedModel, _samples
from maxsimd.engine.execution.relative import has_relative_positions
from maxsimd.engine.execution.selfcheck.samples import random_sequences
from maxsimd.engine.scoring.documents import SkippedSequence
from maxsimd.engine.scoring.maxsim import choose_maxsim
from maxsimd.engine.scoring.outcome import StepOutcome
from maxsimd.pooling.dispatch import Pooled
from maxsimd.scheduler import Step
from tests.dry_run.gpu import GPU, FakeGPU, NotCapturable, is_on_gpu
from tests.unit.engine.execution.test_fused_layers import plain_kernels

CPU = torch.device("cpu")
DTYPE = torch.bfloat16

BACKENDS: dict[str, Callable[[], AttentionBackend[Any]]] = {
    "varlen": lambda: VarlenBackend(GPU),
    "triton": TritonBackend,
    "torch": GroupedBackend,
}

# The steps that are captured, and the largest is larger than those that tests run.
SIZES = (CaptureSize(512, 40, 512), CaptureSize(64, 32, 64), CaptureSize(32, 4, 32))


@dataclass(frozen=True, eq=False)
class OnCPU:
    """A model as it is loaded, and how it was proven to run."""

    model: LoadedModel
    execution: Execution


class FakeRecorder:
    """Captures on the device that is not there, where a run costs nothing."""

    def __init__(self, gpu: FakeGPU) -> None:
        self._gpu = gpu

    def cost(self, run: Run) -> Cost:
        return Cost(Times(1.0, 1.0), 0.0)

    def capture(self, run: Run) -> Callable[[], None]:
        run()
        return self._gpu.capture(run)


def load(path: str, **settings: Any) -> OnCPU:
    """Loads a checkpoint and proves its execution, with attention laid out as GPUs have it."""
    model = load_model(EngineConfig(model=path, **settings), CPU)
    attention = GroupedBackend(
        TritonBackend.arrangement, supports_first_rows=False, supports_causal_ends=False
    )
    with _samples(model) as (samples, _):
        execution = choose_execution(model, CPU, attention, samples, True)
    return OnCPU(model, execution)


class OnGPU:
    """A model on the device, with the actors that pool and score its steps."""

    def __init__(
        self, gpu: FakeGPU, loaded: OnCPU, backend: str = "triton", precision: Precision = "bfloat16"
    ) -> None:
        """Moves the model, unless it is there already, and makes a runner with the attention of that name."""
        self.gpu = gpu
        self.model = loaded.model
        self.execution = loaded.execution
        if not is_on_gpu(next(self.model.backbone.parameters())):
            for module in self.model.encoders:
                cast(module, DTYPE)
            if self.is_packed:
                # On the CPU trials compare real numbers, with plain torch for the kernels.
                with plain_kernels():
                    fuse(self.model.backbone)
        move(
            [*self.model.encoders, *(m for task in self.model.tasks.values() for m in modules_of(task.head))]
        )
        # As `choose_attention` has it.
        self.backend = BACKENDS["torch" if has_relative_positions(self.model.backbone) else backend]()
        self.runner = make_runner(self.execution, self.model, GPU, self.backend)
        self.cache = EmbeddingCache(b"", precision, MemoryStore(1 << 20), None)
        if self.is_late:
            dim = self.model.tasks[self.model.score_task].dim
            self.cache.slab = EmbeddingSlab(1024, dim, torch.int8 if precision == "int8" else DTYPE, GPU)
        tasks = tasks_for(self.execution, self.model)
        prepared = PreparedModel(self.runner, tasks, DTYPE, "packed", self.backend.name, None, (), 0.0, 0)
        self.pooler = _pooler(self.model, prepared, torch.float32 if precision == "int8" else DTYPE)
        name, maxsim = choose_maxsim("auto", GPU)
        self._loop = asyncio.new_event_loop()
        model = DeviceModel(self.model, prepared, self.pooler, GPU, name, maxsim, self.cache)
        # The actors of the device thread, which are asked here one after the other.
        _, self._pooling, self._scoring = DeviceActors(self._loop, model, Mailbox(self._loop))._actors

    @property
    def is_packed(self) -> bool:
        return isinstance(self.execution, Packed)

    @property
    def is_late(self) -> bool:
        """Whether the model has a vector a token, by which it scores."""
        return self.model.score_task == "token_embed" and self.model.listwise is None

    def close(self) -> None:
        self._loop.close()
        self.cache.close()

    def graphed(self) -> GraphedRunner:
        """The runner whose steps are replayed. Raises NotCapturable where one cannot be captured."""
        assert isinstance(self.runner, PackedRunner)
        runner = GraphedRunner(self.runner, GPU)
        texts = [
            each for each in random_sequences(self.model, self.model.score_task) if not each.tokens.images
        ]
        assert isinstance(self.backend, CapturableBackend)
        self.gpu.may_wait = True  # as at load
        mismatches = runner.capture_all(self.backend, SIZES, texts, FakeRecorder(self.gpu))
        self.gpu.may_wait = False
        if mismatches or not runner.sizes:
            raise NotCapturable("; ".join(mismatches.values()) or "a step waits for the device")
        assert len(runner.sizes) == len(SIZES)
        return runner

    def run(
        self, step: Step, skipped: Sequence[SkippedSequence] = (), runner: ModelRunner | None = None
    ) -> StepOutcome:
        """All that the device thread does with a step, up to the copy of its results, and what it releases
        when they have arrived."""
        runner = self.runner if runner is None else runner
        pooled: list[Pooled] = []
        if step.chunks:
            hidden, cursor = runner.forward(step)
            pooled = self._ask(self._pooling, Pool(hidden, cursor))
        if step.images:
            runner.encode(step.images)
        outcome: StepOutcome = self._ask(self._scoring, Score(pooled, list(skipped), step.cached))
        assert not outcome.failures
        assert outcome.arrival is not None
        self._ask(self._scoring, Commit(outcome.releases))
        return outcome

    def _ask(self, actor: Any, message: Any) -> Any:
        return self._loop.run_until_complete(actor.receive(message))

    def free(self, *sequence_ids: int) -> None:
        for sequence_id in sequence_ids:
            self.runner.free(sequence_id)
            self.pooler.free(sequence_id)


@contextmanager
def first_layers(backbone: nn.Module, count: int) -> Iterator[int]:
    """The backbone with its first layers alone, or without some of its last ones where `count` is negative;
    gives the number of layers that it had. Raises where they are not found."""
    config: Any = backbone.config
    # The list that has as many modules as there are layers; of an encoder and a decoder, the encoder's.
    (parent, name, layers), *others = [
        (parent, name, child)
        for parent in backbone.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == config.get_text_config().num_hidden_layers
    ]
    assert not others or hasattr(backbone, "decoder")
    setattr(parent, name, layers[:count])
    try:
        yield len(layers)
    finally:
        setattr(parent, name, layers)


def move(modules: Sequence[nn.Module]) -> None:
    """Moves what `Module.to` would move: parameters and buffers. Those that modules share stay shared."""
    moved: dict[int, torch.Tensor] = {}
    originals: list[torch.Tensor] = []  # an id means nothing once its tensor is gone

    def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
        if is_on_gpu(tensor):
            return tensor
        if id(tensor) not in moved:
            there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=GPU)
            if isinstance(tensor, nn.Parameter):
                there = nn.Parameter(there, requires_grad=False)
            moved[id(tensor)] = there
            originals.append(tensor)
        return moved[id(tensor)]

    for root in modules:
        for module in root.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = on_gpu(tensor)
