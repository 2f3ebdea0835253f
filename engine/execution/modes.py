"""How a model is run: packed where that is proven, else padded where that is, else one by one through its own
library."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from maxsimd.engine.checkpoint import LoadedModel, Task
from maxsimd.engine.execution import first_token_gate
from maxsimd.engine.execution.attention.base import NAME, Attention, PackedAttention, register
from maxsimd.engine.execution.first_token_gate import FirstRowsOnly
from maxsimd.engine.execution.layout import Layout
from maxsimd.engine.execution.own_forward import OwnForwardRunner, finished
from maxsimd.engine.execution.packed_runner import ModelRunner, PackedRunner
from maxsimd.engine.execution.padded_runner import PaddedRunner
from maxsimd.engine.execution.selfcheck.comparison import Comparison
from maxsimd.engine.execution.selfcheck.proof import compare, compare_in_parts, pooler_for
from maxsimd.engine.execution.selfcheck.rules import why_not_packed, why_one_by_one
from maxsimd.engine.execution.selfcheck.samples import Sample

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Steps without padding; `gate` is for a last layer that is needed for first rows alone, `chunked` says
    whether sequences may be cut between steps and share prefixes."""

    comparison: Comparison
    gate: FirstRowsOnly | None
    chunked: bool


@dataclass(frozen=True, slots=True, eq=False)
class Padded:
    """Padded batches; `not_packed` says why."""

    comparison: Comparison
    not_packed: str


@dataclass(frozen=True, slots=True, eq=False)
class OneByOne:
    """One sequence at a time through the model's own library; `not_packed` says why neither of the others."""

    not_packed: str


Execution = Packed | Padded | OneByOne


def choose_execution(
    model: LoadedModel,
    device: torch.device,
    attention: PackedAttention,
    samples: Sequence[Sample],
    packing_allowed: bool,
) -> Execution:
    """The fastest execution that is proven on the samples, for a backbone in float32.

    Leaves the backbone as that execution needs it."""
    if len({len(sample.sequence) for sample in samples}) < 2:
        return _one_by_one("too few random texts of different lengths could be run to prove anything else")
    alone = why_one_by_one(model)
    if alone is not None:
        return _one_by_one(alone)
    pooler = _take_off_pooler(model.backbone, samples[0])
    reason = "packing is off"
    if packing_allowed:
        packed = try_packed(model, device, attention, samples)
        if isinstance(packed, Packed):
            return packed
        reason = packed
    padded = _try_padded(model, device, samples)
    if isinstance(padded, Comparison):
        log.warning("runs padded, which is slower: %s", reason)
        return Padded(padded, reason)
    if pooler is not None:
        backbone: Any = model.backbone
        backbone.pooler = pooler
    return _one_by_one(f"{reason}; {padded}")


def try_packed(
    model: LoadedModel, device: torch.device, attention: PackedAttention, samples: Sequence[Sample]
) -> Packed | str:
    """Packed execution where it is exact, else a description of the mismatch.

    Leaves the backbone with packed attention in the one case and with its own in the other."""
    backbone: Any = model.backbone
    own = getattr(backbone.config, "_attn_implementation", None)
    counted = _Counted(attention.everywhere)
    poolers = pooler_for(model.tasks)
    register()
    try:
        backbone.set_attn_implementation(NAME)
        runner = PackedRunner(model, device, replace(attention, everywhere=counted))
        comparison = compare(runner, poolers, samples)
        mismatch = None if comparison.agrees else f"packed and one-by-one results differ: {comparison}"
        if counted.calls == 0:
            # Such a model might still tell sequences apart by their positions, at the cost of a full mask.
            mismatch = "its attention cannot be replaced"
        mismatch = mismatch or why_not_packed(model, counted.windows)
    except Exception as error:
        mismatch = f"packed attention failed: {error}"
    if mismatch is not None:
        _set_attention(backbone, own)
        return mismatch
    gate = _gate_if_exact(model, device, attention, samples)
    return Packed(comparison, gate, model.causal and _is_exact_in_parts(model, device, attention, samples))


def make_runner(
    execution: Execution, model: LoadedModel, device: torch.device, attention: PackedAttention
) -> ModelRunner:
    """The runner for what was chosen."""
    match execution:
        case Packed():
            return PackedRunner(model, device, attention, execution.gate, execution.chunked)
        case Padded():
            return PaddedRunner(model, device)
        case OneByOne():
            references = {name: task.reference for name, task in model.tasks.items()}
            return OwnForwardRunner({name: made for name, made in references.items() if made is not None})


def tasks_for(execution: Execution, model: LoadedModel) -> Mapping[str, Task]:
    """The model's tasks as they pool the rows of that runner."""
    if isinstance(execution, OneByOne):
        return {name: finished(task) for name, task in model.tasks.items()}
    return {name: replace(task, reference=None) for name, task in model.tasks.items()}


def _one_by_one(reason: str) -> OneByOne:
    log.warning("runs its sequences one by one, which is much slower: %s", reason)
    return OneByOne(reason)


class _Counted:
    """An attention function that knows how often it was called, and with which windows."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self.calls = 0
        self.windows: set[int | None] = set()

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Layout,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        self.calls += 1
        self.windows.add(window)
        return self._attention(q, k, v, layout, scale, window)


def _try_padded(model: LoadedModel, device: torch.device, samples: Sequence[Sample]) -> Comparison | str:
    """The comparison where padded batches are exact, else a description of the mismatch."""
    try:
        comparison = compare(PaddedRunner(model, device), pooler_for(model.tasks), samples)
    except Exception as error:
        return f"padded execution failed: {type(error).__name__}: {error}"
    return comparison if comparison.agrees else f"padded and one-by-one results differ: {comparison}"


def _gate_if_exact(
    model: LoadedModel, device: torch.device, attention: PackedAttention, samples: Sequence[Sample]
) -> FirstRowsOnly | None:
    """A gate that leaves the last layer's first rows alone, where the model needs no others and is shown to
    give the same with it; else None, and the backbone as it was."""
    if attention.first_rows is None or any(task.pooling != "cls" for task in model.tasks.values()):
        return None
    gate = first_token_gate.install(model.backbone)
    if gate is None:
        return None
    runner = PackedRunner(model, device, attention, gate)
    try:
        is_exact = compare(runner, pooler_for(model.tasks), samples).agrees
    except Exception:
        is_exact = False
    if is_exact:
        return gate
    first_token_gate.remove(model.backbone, gate)
    return None


def _is_exact_in_parts(
    model: LoadedModel, device: torch.device, attention: PackedAttention, samples: Sequence[Sample]
) -> bool:
    """Whether a sequence may be cut into chunks and begin with a shared prefix, shown on the longest
    sample."""
    longest = max(samples, key=lambda sample: len(sample.sequence))
    if len(longest.sequence) < 2:
        return False
    runner = PackedRunner(model, device, attention, chunked=True)
    try:
        comparison = compare_in_parts(runner, pooler_for(model.tasks), longest)
    except Exception as error:
        log.warning("long sequences are not prefilled in chunks: %s", error)
        return False
    if not comparison.agrees:
        log.warning("long sequences are not prefilled in chunks, which differ: %s", comparison)
    return comparison.agrees


def _take_off_pooler(backbone: Any, sample: Sample) -> torch.nn.Module | None:
    """Takes a backbone's pooler away, whose work the heads do on pooled rows only, and returns it; None where
    there is none, or the backbone cannot do without."""
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
