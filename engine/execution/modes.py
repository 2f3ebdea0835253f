"""Ways to run a model: packed if the self-check proves that exact, else padded, else one by one through its
own library."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch

from maxsimd.engine.checkpoint import LoadedModel, Task
from maxsimd.engine.checkpoint.heads import after_reference
from maxsimd.engine.checkpoint.reference import Reference, declares, takes
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution import relative
from maxsimd.engine.execution.attention.backend import AttentionBackend
from maxsimd.engine.execution.runner import (
    ATTENTION_NAME,
    ClsOnlyLastLayer,
    ModelRunner,
    PackedRunner,
    install_cls_only,
    register_attention,
    remove_cls_only,
)
from maxsimd.engine.execution.self_check.proof import compare, compare_in_parts, pooler_for
from maxsimd.engine.execution.self_check.rules import leaves_ends_out, why_not_packed, why_one_by_one
from maxsimd.engine.execution.self_check.samples import Comparison, Sample
from maxsimd.pooling.methods import PoolingCursor
from maxsimd.pooling.ragged import to_device
from maxsimd.pooling.sparse import GivenWords, TokenWeights, WordsHead
from maxsimd.scheduler import Chunk, Step

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Steps without padding. `cls_only` is the last layer if it computes first rows alone."""

    name: ClassVar = "packed"
    not_packed: ClassVar = None
    comparison: Comparison
    cls_only: ClsOnlyLastLayer | None
    chunked: bool


@dataclass(frozen=True, slots=True, eq=False)
class Padded:
    """Padded batches; `not_packed` is the reason."""

    name: ClassVar = "padded"
    comparison: Comparison
    not_packed: str


@dataclass(frozen=True, slots=True, eq=False)
class OneByOne:
    """One sequence at a time through the model's own library; `not_packed` is the reason."""

    name: ClassVar = "one by one"
    not_packed: str


Execution = Packed | Padded | OneByOne


def choose_execution(
    model: LoadedModel,
    device: torch.device,
    backend: AttentionBackend,
    samples: Sequence[Sample],
    packing_allowed: bool,
) -> Execution:
    """The fastest execution that the samples prove, for a backbone in float32. Leaves the backbone as this
    execution needs it."""
    if len({len(sample.sequence) for sample in samples}) < 2:
        return _one_by_one("too few random texts of different lengths could be run to prove anything else")
    alone = why_one_by_one(model)
    if alone is not None:
        return _one_by_one(alone)
    pooler = _remove_pooler(model.backbone, samples[0])
    reason = "packing is off"
    if packing_allowed:
        packed = try_packed(model, device, backend, samples)
        if isinstance(packed, Packed):
            return packed
        reason = packed
    padded = _try_padded(model, device, samples)
    if isinstance(padded, Comparison):
        log.warning("runs padded, which is slower: %s", reason)
        return Padded(padded, reason)
    if pooler is not None:
        model.backbone.pooler = pooler
    return _one_by_one(f"{reason}; {padded}")


def try_packed(
    model: LoadedModel, device: torch.device, backend: AttentionBackend, samples: Sequence[Sample]
) -> Packed | str:
    """Packed execution if it is exact, else a description of the mismatch. Leaves the backbone with packed
    attention if it is, with its own if not."""
    if model.compression is not None:
        return "documents have fewer rows behind some of its layers than before them"
    backbone: Any = model.backbone
    own = getattr(backbone.config, "_attn_implementation", None)
    poolers = pooler_for(model.tasks)
    register_attention()
    undo = relative.install(backbone, ATTENTION_NAME)
    try:
        _set_attention(backbone, ATTENTION_NAME)
        runner = PackedRunner(model, device, backend)
        comparison = compare(runner, poolers, samples)
        mismatch = None if comparison.agrees else f"packed and one-by-one results differ: {comparison}"
        if not runner.windows:
            # Such a model might still separate sequences by their positions, at the cost of a full mask.
            mismatch = "its attention cannot be replaced"
        mismatch = why_not_packed(model, runner.windows, backend.supports_causal_ends) or mismatch
    except Exception as error:
        mismatch = f"packed attention failed: {error}"
    if mismatch is not None:
        undo()
        _set_attention(backbone, own)
        return mismatch
    cls_only = _cls_only_if_exact(model, device, backend, samples)
    # An earlier chunk cannot mask the end that a later one brings.
    chunked = (
        model.causal and not leaves_ends_out(model) and _is_exact_in_parts(model, device, backend, samples)
    )
    return Packed(comparison, cls_only, chunked)


def make_runner(
    execution: Execution, model: LoadedModel, device: torch.device, backend: AttentionBackend
) -> ModelRunner:
    if isinstance(execution, Packed):
        return PackedRunner(model, device, backend, execution.cls_only, execution.chunked)
    if isinstance(execution, Padded):
        return PaddedRunner(model, device)
    references = {name: task.reference for name, task in model.tasks.items()}
    return OwnForwardRunner({name: made for name, made in references.items() if made is not None})


def tasks_for(execution: Execution, model: LoadedModel) -> Mapping[str, Task]:
    """The model's tasks as they pool the rows of the execution's runner."""
    if isinstance(execution, OneByOne):
        return {name: with_finished_items(task) for name, task in model.tasks.items()}
    return {name: replace(task, reference=None) for name, task in model.tasks.items()}


def _one_by_one(reason: str) -> OneByOne:
    log.warning("runs its sequences one by one, which is much slower: %s", reason)
    return OneByOne(reason)


def _try_padded(model: LoadedModel, device: torch.device, samples: Sequence[Sample]) -> Comparison | str:
    """The comparison if padded batches are exact, else a description of the mismatch."""
    if model.vision is not None:
        return "pictures are not run in padded batches"
    try:
        comparison = compare(PaddedRunner(model, device), pooler_for(model.tasks), samples)
    except Exception as error:
        return f"padded execution failed: {type(error).__name__}: {error}"
    return comparison if comparison.agrees else f"padded and one-by-one results differ: {comparison}"


def _cls_only_if_exact(
    model: LoadedModel, device: torch.device, backend: AttentionBackend, samples: Sequence[Sample]
) -> ClsOnlyLastLayer | None:
    """A last layer that computes first rows alone, if the model needs no others and gives the same; else
    None, with the backbone unchanged."""
    if any(task.pooling != "cls" for task in model.tasks.values()):
        return None
    cls_only = install_cls_only(model.backbone)
    if cls_only is None:
        return None
    with suppress(Exception):
        runner = PackedRunner(model, device, backend, cls_only)
        if compare(runner, pooler_for(model.tasks), samples).agrees:
            return cls_only
    remove_cls_only(model.backbone, cls_only)
    return None


def _is_exact_in_parts(
    model: LoadedModel, device: torch.device, backend: AttentionBackend, samples: Sequence[Sample]
) -> bool:
    """Whether the longest sample may be cut into chunks and begin with a shared prefix."""
    if max(len(sample.sequence) for sample in samples) < 2:
        return False
    runner = PackedRunner(model, device, backend, chunked=True)
    try:
        comparison = compare_in_parts(runner, pooler_for(model.tasks), samples)
    except Exception as error:
        log.warning("long sequences are not prefilled in chunks: %s", error)
        return False
    if not comparison.agrees:
        log.warning("long sequences are not prefilled in chunks, which differ: %s", comparison)
    return comparison.agrees


def _remove_pooler(backbone: Any, sample: Sample) -> torch.nn.Module | None:
    """Removes and returns a backbone's pooler, whose work the heads do on pooled rows; None if there is none,
    or the backbone does not run without it."""
    pooler: torch.nn.Module | None = getattr(backbone, "pooler", None)
    if pooler is None:
        return None
    backbone.pooler = None
    device = next(backbone.parameters()).device
    ids = torch.from_numpy(sample.sequence.tokens.ids).long()[None].to(device)
    try:
        with torch.inference_mode():
            backbone(input_ids=ids)
    except Exception:
        backbone.pooler = pooler
        return None
    return pooler


def _set_attention(backbone: Any, name: str | None) -> None:
    if name is not None and backbone.config._attn_implementation != name:
        backbone.set_attn_implementation(name)


# The share of a batch that may be padding, and the tokens up to which padding is cheaper than another pass.
PADDING = 0.1
SMALL_BATCH = 256


class PaddedRunner(ModelRunner):
    """Passes over [sequences, longest] with an attention mask, each over sequences of similar length: for
    models that cannot be packed."""

    chunked = False

    def __init__(self, model: LoadedModel, device: torch.device) -> None:
        self._model = model
        self._backbone: Any = model.backbone
        self._device = device
        self._options = {"use_cache": False} if declares(self._backbone, "use_cache") else {}

    @torch.inference_mode()
    def forward(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        hidden: list[torch.Tensor] = []
        chunks: list[Chunk] = []
        starts: list[int] = []
        for indices in by_length([len(chunk) for chunk in step.chunks]):
            batch = [step.chunks[index] for index in indices]
            states = self._run(batch)  # [n, longest, hidden]
            row = sum(map(len, hidden))
            hidden.append(states.flatten(0, 1))
            chunks += batch
            starts += range(row, row + len(hidden[-1]), states.shape[1])
        return torch.cat(hidden), PoolingCursor(tuple(chunks), tuple(starts))

    def _run(self, chunks: list[Chunk]) -> torch.Tensor:
        n, longest = len(chunks), max(len(chunk) for chunk in chunks)
        pad = getattr(self._backbone.config, "pad_token_id", None) or 0
        input_ids, attention_mask, type_ids = np.zeros((3, n, longest), dtype=np.int64)
        input_ids[:] = pad
        for i, chunk in enumerate(chunks):
            sequence = chunk.sequence
            input_ids[i, : len(sequence)] = sequence.tokens.ids
            attention_mask[i, : sequence.tokens.num_attended] = 1
            if (types := sequence.tokens.type_ids) is not None:
                type_ids[i, : len(sequence)] = types
        inputs = {"input_ids": input_ids}
        if takes(self._backbone, "attention_mask"):
            inputs["attention_mask"] = attention_mask
        if self._model.takes_type_ids:
            inputs["token_type_ids"] = type_ids
        tensors = {name: to_device(ids, self._device) for name, ids in inputs.items()}
        output: torch.Tensor = self._backbone(**tensors, **self._options).last_hidden_state
        return output


def by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Splits sequences into batches of similar length: indices into `lengths`, shortest first. A batch takes
    the next longer sequence while it is small or has little padding."""
    batches: list[list[int]] = [[]]
    tokens = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        tokens += lengths[index]
        rows = lengths[index] * (len(batches[-1]) + 1)
        if rows > SMALL_BATCH and rows - tokens > PADDING * rows:
            batches.append([])
            tokens = lengths[index]
        batches[-1].append(index)
    return batches


class OwnForwardRunner(ModelRunner):
    """Runs sequences one by one through the model's own library: slow, and right by definition. Its rows are
    finished items, made by the task's reference."""

    chunked = False

    def __init__(self, references: Mapping[str, Reference]) -> None:
        self._references = dict(references)

    @torch.inference_mode()
    def forward(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        items = [self._references[chunk.sequence.payload.task](chunk.sequence) for chunk in step.chunks]
        starts = (0, *accumulate(len(item) for item in items[:-1]))
        return torch.cat(items), PoolingCursor(step.chunks, starts)


def with_finished_items(task: Task) -> Task:
    """The task for rows that are finished items: all rows of a sequence, or its only one (in a sparse task,
    the weights of all words)."""
    if isinstance(task.head, TokenWeights):
        raise ModelLoadError(
            "a model whose tokens are weighed cannot be run one by one; leave its layers sparse_linear and "
            "colbert_linear away"
        )
    if isinstance(task.head, WordsHead):
        return replace(task, pooling="given-words", head=GivenWords(task.head), reference=None)
    pooling = "all" if task.pooling == "all" else "cls"
    return replace(task, pooling=pooling, head=after_reference(task.head), reference=None)
