"""Models on the GPU that is not there: loaded and proven on the CPU, then moved, and driven through steps
of whole sequences, cut ones, prefixes, cached, windowed and explained documents, and pictures."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from maxsimd import scheduler
from maxsimd.engine import EngineConfig
from maxsimd.engine.actors.actor import Commit, Mailbox, Pool, Score
from maxsimd.engine.cache import CachedEmbedding, EmbeddingCache, Precision
from maxsimd.engine.cache.embeddings import rounded
from maxsimd.engine.cache.slab import EmbeddingSlab
from maxsimd.engine.cache.store import MemoryStore
from maxsimd.engine.checkpoint import LoadedModel, load_model
from maxsimd.engine.checkpoint.heads import modules_of
from maxsimd.engine.device.load import DeviceModel, pooler_of, samples_of
from maxsimd.engine.execution.attention.backend import CaptureSize, GroupedBackend
from maxsimd.engine.execution.attention.gpu import TritonBackend
from maxsimd.engine.execution.cuda_graphs import Cost, CudaRecorder, GraphedRunner, Run
from maxsimd.engine.execution.devices import Times, cast
from maxsimd.engine.execution.fused_layers import fuse
from maxsimd.engine.execution.modes import Execution, Packed, choose_execution, make_runner, tasks_for
from maxsimd.engine.execution.relative import has_relative_positions
from maxsimd.engine.execution.runner import ModelRunner, PackedRunner
from maxsimd.engine.execution.self_check.samples import random_pages, random_sequences
from maxsimd.engine.ops.triton import launch
from maxsimd.engine.runtime import DeviceActors
from maxsimd.engine.scoring import scorer
from maxsimd.engine.scoring.maxsim import choose_maxsim
from maxsimd.pooling.dispatch import Pooled
from maxsimd.scheduler import CachedBatch, Chunk, DocumentPayload, ResultSlot, Step, TokenSequence
from tests.checkpoints import two_towers, vision_language, visual
from tests.dry_run.gpu import GPU, Counts, FakeGPU, NotCapturable, fake_gpu, is_on_gpu
from tests.parity.families import FAMILIES, LISTWISE
from tests.unit.engine.execution.test_fused_layers import plain_kernels

CPU = torch.device("cpu")
DTYPE = torch.bfloat16

BACKENDS: dict[str, Callable[[], Any]] = {"triton": TritonBackend, "torch": GroupedBackend}

# The steps that are captured, and the largest is larger than those that tests run.
SIZES = (CaptureSize(512, 40, 512), CaptureSize(64, 32, 64), CaptureSize(32, 4, 32))

# A model on the CPU, and how it was proven to run.
Loaded = tuple[LoadedModel, Execution]


class FakeRecorder(CudaRecorder):
    """Captures on the device that is not there, where a run costs nothing."""

    def __init__(self, gpu: FakeGPU) -> None:
        self._gpu = gpu

    def cost(self, run: Run) -> Cost:
        return Cost(Times(1.0, 1.0), 0.0)

    def capture(self, run: Run) -> Callable[[], None]:
        run()
        return self._gpu.capture(run)


def load(path: str, **settings: Any) -> Loaded:
    """Loads a checkpoint and proves its execution, with attention laid out as GPUs have it."""
    model = load_model(EngineConfig(model=path, **settings), CPU)
    attention = GroupedBackend(TritonBackend.arrangement, supports_causal_ends=False)
    with samples_of(model) as (samples, _):
        execution = choose_execution(model, CPU, attention, samples, True)
    return model, execution


class OnGPU:
    """A model on the device, with the actors that pool and score its steps."""

    def __init__(
        self, gpu: FakeGPU, loaded: Loaded, backend: str = "triton", precision: Precision = "bfloat16"
    ) -> None:
        """Moves the model, unless it is there already, and makes a runner with the attention of that name."""
        self.gpu = gpu
        self.model, self.execution = loaded
        if not is_on_gpu(next(self.model.backbone.parameters())):
            for module in self.model.encoders:
                cast(module, DTYPE)
            if self.is_packed:
                # On the CPU trials compare real numbers, with plain torch for a GPU's kernels.
                with plain_kernels(), patch.object(launch, "INTERPRETED", True):
                    fuse(self.model.backbone)
        heads = [module for task in self.model.tasks.values() for module in modules_of(task.head)]
        move([*self.model.encoders, *heads])
        # As `choose_attention` has it.
        self.backend = BACKENDS["torch" if has_relative_positions(self.model.backbone) else backend]()
        self.runner = make_runner(self.execution, self.model, GPU, self.backend)
        self.cache = EmbeddingCache(b"", precision, MemoryStore(1 << 20), None)
        if self.is_late:
            dim = self.model.tasks[self.model.score_task].dim
            self.cache.slab = EmbeddingSlab(1024, dim, torch.int8 if precision == "int8" else DTYPE, GPU)
        tasks = tasks_for(self.execution, self.model)
        self.pooler = pooler_of(self.model, tasks, DTYPE, torch.float32 if precision == "int8" else DTYPE)
        name, maxsim = choose_maxsim("auto", GPU)
        self._loop = asyncio.new_event_loop()
        tokenizer: Any = None  # which the device thread does not ask
        model = DeviceModel(
            model=self.model, tokenizer=tokenizer, device=GPU, runner=self.runner, tasks=tasks,
            pooler=self.pooler, dtype=DTYPE, execution="packed", attention=self.backend.name, not_packed=None,
            findings=(), proof_seconds=0.0, quantized=0, step_tokens=16_384, maxsim_name=name, maxsim=maxsim,
            cache=self.cache,
        )  # fmt: skip
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
        sequences = random_sequences(self.model, self.model.score_task)
        texts = [each for each in sequences if not each.tokens.images]
        assert isinstance(self.backend, TritonBackend)
        self.gpu.may_wait = True  # as at load
        mismatches = runner.capture_all(SIZES, texts, FakeRecorder(self.gpu))
        self.gpu.may_wait = False
        if mismatches or not runner.sizes:
            raise NotCapturable("; ".join(mismatches.values()) or "a step waits for the device")
        assert len(runner.sizes) == len(SIZES)
        return runner

    def run(
        self, step: Step, skipped: Iterable[scorer.SkippedSequence] = (), runner: ModelRunner | None = None
    ) -> scorer.StepOutcome:
        runner, pooled = runner or self.runner, list[Pooled]()
        if step.chunks:
            hidden, cursor = runner.forward(step)
            pooled = self._ask(self._pooling, Pool(hidden, cursor))
        if step.images:
            runner.encode(step.images)
        outcome: scorer.StepOutcome = self._ask(self._scoring, Score(pooled, list(skipped), step.cached))
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
    """The backbone with its first layers alone, or without its last (negative); gives how many it had."""
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


def move(modules: Iterable[nn.Module]) -> None:
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


Drive = Callable[[OnGPU], None]

LENGTHS = (7, 33, 100, 1, 64)


class Ids:
    """New numbers for what one drive makes, and tokens that are as random as they need be."""

    def __init__(self, model: LoadedModel) -> None:
        self.next = count()
        self.vocabulary = min(50, len(model.tokenizer))
        self.task = model.score_task

    def tokens(self, length: int, **others: Any) -> scheduler.Tokens:
        ids = (np.arange(length) * 7 % self.vocabulary).astype(np.int32)
        return scheduler.Tokens(ids, np.zeros_like(ids), **others)

    def text(self, length: int, task: str | None = None, **others: Any) -> TokenSequence:
        key, tokens = next(self.next), self.tokens(length, **others)
        return TokenSequence.text(key, ResultSlot(0, key), self.task if task is None else task, tokens)

    def query(self, length: int, num_consumers: int, **others: Any) -> TokenSequence:
        tokens = self.tokens(length, **others)
        return TokenSequence.query(next(self.next), 0, self.task, tokens, num_consumers)

    def document(self, length: int, payload: DocumentPayload, **others: Any) -> TokenSequence:
        key, tokens = next(self.next), self.tokens(length, **others)
        return TokenSequence.document(key, ResultSlot(0, key), self.task, tokens, payload)


def step_of(*parts: TokenSequence | Chunk, **others: Any) -> Step:
    chunks = (x if isinstance(x, Chunk) else Chunk(x, x.shared_prefix_len, len(x)) for x in parts)
    return Step(0, tuple(chunks), **others)


def whole(on: OnGPU) -> None:
    """All tasks in one step, and a step of one sequence; also with tokens that are not pooled or attended."""
    ids = Ids(on.model)
    texts = [ids.text(length, task) for task in on.model.tasks for length in LENGTHS]
    on.run(step_of(*texts, ids.text(40, pooled_positions=np.array([0, 1, 5, 20]))))
    on.run(step_of(ids.text(12)))
    if not on.model.causal:
        on.run(step_of(ids.text(32, attended_len=9), ids.text(20)))


def cut(on: OnGPU) -> None:
    """A sequence of each task in three steps, beside others that are whole."""
    ids = Ids(on.model)
    texts = [ids.text(90, task) for task in on.model.tasks]
    for start in (0, 30, 60):
        on.run(step_of(*(Chunk(text, start, start + 30) for text in texts), ids.text(17), ids.text(3)))
    on.free(*(text.sequence_id for text in texts))
    assert on.runner.num_prefill_kv == on.pooler.num_states == 0


def prefixes(on: OnGPU) -> None:
    """Pairs behind a prefix of the same step and of an earlier one, whole and cut."""
    ids = Ids(on.model)
    prefix = TokenSequence.prefix(next(ids.next), 0, ids.tokens(20), 4)
    pairs = []
    for length in (31, 25, 30, 70):
        key = next(ids.next)
        pairs.append(TokenSequence.pair(key, ResultSlot(0, key), ids.tokens(length), prefix))
    on.run(step_of(prefix, *pairs[:2], ids.text(11)))
    on.run(step_of(pairs[2], Chunk(pairs[3], 20, 50)))
    on.run(step_of(Chunk(pairs[3], 50, 70)))
    on.free(prefix.sequence_id, pairs[3].sequence_id)
    assert on.runner.num_prefill_kv == on.pooler.num_states == 0


def documents(on: OnGPU) -> None:
    """Documents against queries of this and earlier steps: new, just cached, and twice in one step."""
    ids = Ids(on.model)
    query, other = ids.query(12, 5), ids.query(32, 1, **_unattended(on, 32))
    new = [ids.document(length, DocumentPayload(query.sequence_id, b"%d" % length)) for length in (40, 9)]
    again = replace(new[0], sequence_id=next(ids.next))
    hit = ids.document(30, DocumentPayload(other.sequence_id, b"hit"))
    plain = ids.document(25, DocumentPayload(query.sequence_id), pooled_positions=np.array([0, 3, 4]))
    skipped = [scorer.SkippedSequence(again), scorer.SkippedSequence(hit, _entry(on, 30))]
    on.run(step_of(query, other, *new, plain), skipped)
    on.run(step_of(ids.document(50, DocumentPayload(query.sequence_id, b"later"))))


def cached(on: OnGPU) -> None:
    """Documents found in the cache, of a query that is run and of one that was given; some are explained."""
    ids = Ids(on.model)
    query = ids.query(12, 3)
    found = [scorer.CachedDocument(ResultSlot(0, i), _entry(on, 10 + i)) for i in range(3)]
    if on.is_late:
        explained = scheduler.Explained((4, 7), with_map=True)
        found[1] = scorer.CachedDocument(ResultSlot(0, 1), _entry(on, 11), explained)
    on.run(step_of(query, cached=(CachedBatch(0, query.sequence_id, 1, scorer.CachedDocuments.of(found)),)))
    given = _entry(on, 5).rows.float()
    on.run(Step(0, (), (CachedBatch(0, next(ids.next), 1, scorer.CachedDocuments.of(found), given),)))
    on.run(step_of(ids.document(8, DocumentPayload(next(ids.next), b"given", given_query=given))))


def windows(on: OnGPU) -> None:
    """Documents of several windows in one step and in two, explained unless tokens are merged."""
    ids, parts, merged = Ids(on.model), [], on.model.token_pooling is not None
    query = ids.query(6, 4)
    for rows in (None, None if merged else scheduler.Explained((20, 11), with_map=True)):
        of_document = scheduler.Window(len(parts) + 100, 2)
        payload = DocumentPayload(query.sequence_id, b"%d" % len(parts), window=of_document, explained=rows)
        parts += [ids.document(length, payload) for length in (20, 11)]
    on.run(step_of(query, *parts[:3]))
    on.run(step_of(parts[3]))


def pictures(on: OnGPU) -> None:
    """Pictures and what is made of them, beside a text and, where the model can, cut."""
    ids = Ids(on.model)
    pages = [replace(page, sequence_id=next(ids.next)) for page in random_pages(on.model, ids.task)]
    images = [image for page in pages for image in page.tokens.images]
    jobs = [scheduler.ImageJob(image.image_id, 0, 1, 0, image.inputs) for image in images]
    on.run(Step(0, (), (), tuple(jobs)))
    on.run(step_of(*pages, ids.text(9)))
    if on.runner.chunked:
        half = len(pages[0]) // 2
        on.run(step_of(Chunk(pages[0], 0, half)))
        on.run(step_of(Chunk(pages[0], half, len(pages[0]))))
    on.free(*(job.image_id for job in jobs), pages[0].sequence_id)
    assert on.runner.num_features == on.runner.num_prefill_kv == 0


# Those that are about what follows the backbone, for which one of its layers is enough.
BEHIND_BACKBONE = (documents, cached, windows)


def run(drive: Drive, on: OnGPU) -> None:
    with first_layers(on.model.backbone, 1 if drive in BEHIND_BACKBONE else 2):
        drive(on)


def drives(on: OnGPU) -> Iterator[Drive]:
    yield whole
    if on.runner.chunked:
        yield cut
        if on.model.score_task == "classify":
            yield prefixes
    if on.model.score_task in ("embed", "token_embed"):
        yield documents
        yield cached
        if on.is_late:
            yield windows
    if on.model.vision is not None:
        yield pictures


def _unattended(on: OnGPU, length: int) -> dict[str, Any]:
    """Options of a query that is filled up with unattended tokens, if the model has such."""
    expansion = on.model.query.expansion
    return {} if expansion is None or expansion.attended else {"attended_len": length - 20}


def _entry(on: OnGPU, tokens: int) -> CachedEmbedding:
    rows = torch.zeros(tokens if on.is_late else 1, on.model.tasks[on.model.score_task].dim)
    return CachedEmbedding(*rounded(rows, on.cache.precision), tokens, False, b"entry of %d" % tokens)


# Costs: what a plain step of a model takes, and the table of all models' that the tests hold: `held.txt`


HELD = Path(__file__).with_name("held.txt")
# Models whose libraries make the host wait within a step and cannot be told not to: those that run padded,
# and token pooling, which forms clusters on the host.
MAY_WAIT = {"SGPT", "native multi-vector, token pooling", "LFM2-ColBERT"}
# The same of passes over pictures: towers of Qwen-VL and of Idefics3.
TOWERS_WAIT = {"colqwen2", "colqwen2_5", "colqwen3", "qwen3_vl_embedding", "colmodernvbert", "colsmol"}
# One of each way to run: by attention that is absolute, relative, biased, windowed or causal, by
# convolutions, by an encoder beside a decoder, padded, listwise, with pictures. `make test-all` drives all.
ONE_OF_EACH = {"ColBERT", "ModernBERT", "Qwen3-Reranker", "jina-reranker-v3", "colpali"}


@dataclass(frozen=True)
class Checkpoint:
    """A small checkpoint: how it is built, and what is given on the command line beside it."""

    name: str
    build: Callable[[Path], str]
    settings: dict[str, Any] = field(default_factory=dict)
    packed: bool = True


_VISUAL = (
    visual.colpali, visual.colqwen2, visual.colmodernvbert, vision_language.colqwen2_5,
    vision_language.colqwen3, vision_language.colsmol, vision_language.qwen3_vl_embedding, two_towers.clip,
    two_towers.siglip,
)  # fmt: skip
# Models whose results have sizes that depend on the contents of tensors (the tokens of an expert, the words
# with a weight): without a device nobody knows them.
_NOT_DRY = {
    "nomic-embed-text-v2-moe",
    *(family.name for family in FAMILIES if family.kind in ("sparse", "hybrid") or "bge-m3" in family.name),
}
# Causal, with tokens that are not attended to: kernels for GPUs cannot leave those out.
_PADDED_ON_GPUS = {"LFM2-ColBERT"}
CHECKPOINTS = [
    Checkpoint(one.name, one.build, one.settings, one.packed and one.name not in _PADDED_ON_GPUS)
    for one in (*FAMILIES, LISTWISE)
    if one.name not in _NOT_DRY
] + [Checkpoint(build.__name__, build) for build in _VISUAL]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Costs of a step of whole sequences: kernels a layer and outside of layers, copies, bytes to the device
    a token, and waits of the host."""

    layer: int
    outside: int
    copies: int
    bytes_a_token: int
    waits: int


def cost_of(on: OnGPU) -> StepCost:
    """Counts a layer by removing the last one. `outside` may be negative where layers differ."""
    ids = Ids(on.model)
    step = step_of(*(ids.text(length) for length in LENGTHS))
    on.run(step)  # what is made once is not counted
    whole = _counted(on, lambda: on.run(step))
    with first_layers(on.model.backbone, -1) as layers:
        layer = whole.launches.total() - _counted(on, lambda: on.run(step)).launches.total()
    return StepCost(
        layer, whole.launches.total() - layer * layers, whole.to_device + whole.to_host,
        round(whole.bytes_to_device / sum(LENGTHS)), whole.waits,
    )  # fmt: skip


def _counted(on: OnGPU, run: Callable[[], object]) -> Counts:
    with on.gpu.counted() as counts:
        run()
    return counts


def measure_all(folder: Path) -> dict[str, StepCost]:
    """Builds all checkpoints; takes about a minute."""
    costs = {}
    for number, checkpoint in enumerate(CHECKPOINTS):
        loaded = load(checkpoint.build(folder / str(number)), **checkpoint.settings)
        with fake_gpu() as gpu:
            gpu.may_wait = checkpoint.name in MAY_WAIT
            on = OnGPU(gpu, loaded)
            costs[checkpoint.name] = cost_of(on)
            on.close()
    return costs


def table_of(costs: dict[str, StepCost]) -> str:
    """A line a model, its name last."""
    rows = ["  ".join(names := [each.name for each in fields(StepCost)])]
    for name, cost in costs.items():
        numbers = (str(number).rjust(len(x)) for number, x in zip(astuple(cost), names, strict=True))
        rows.append("  ".join([*numbers, name]))
    return "\n".join(rows) + "\n"


def held() -> dict[str, StepCost]:
    _, *rows = HELD.read_text(encoding="utf-8").splitlines()
    costs = {}
    for row in rows:
        *numbers, name = row.split(maxsplit=len(fields(StepCost)))
        costs[name] = StepCost(*map(int, numbers))
    return costs
