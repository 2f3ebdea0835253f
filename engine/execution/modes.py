"""How a model is run: packed where that is proven to be exact, else padded where that is, else one by one
through its own library.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from maxsimd.engine.checkpoint import LoadedModel, Task
from maxsimd.engine.execution import cls_only_last_layer, relative
from maxsimd.engine.execution.attention.base import AttentionBackend
from maxsimd.engine.execution.attention.interface import NAME, register
from maxsimd.engine.execution.attention.recorded import RecordedBackend
from maxsimd.engine.execution.cls_only_last_layer import ClsOnlyLastLayer
from maxsimd.engine.execution.own_forward import OwnForwardRunner, finished
from maxsimd.engine.execution.packed_runner import ModelRunner, PackedRunner
from maxsimd.engine.execution.padded_runner import PaddedRunner
from maxsimd.engine.execution.selfcheck.comparison import Comparison
from maxsimd.engine.execution.selfcheck.proof import compare, compare_in_parts, pooler_for
from maxsimd.engine.execution.selfcheck.rules import leaves_ends_out, why_not_packed, why_one_by_one
from maxsimd.engine.execution.selfcheck.samples import Sample

log = logging.getLogger(__name__)

Backend = AttentionBackend[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Steps without padding. `cls_only` is the last layer if it computes only first rows; `chunked` says
    whether sequences may be cut between steps and share prefixes."""

    comparison: Comparison
    cls_only: ClsOnlyLastLayer | None
    chunked: bool


@dataclass(frozen=True, slots=True, eq=False)
class Padded:
    """Padded batches; `not_packed` says why."""

    comparison: Comparison
    not_packed: str


@dataclass(frozen=True, slots=True, eq=False)
class OneByOne:
    """One sequence at a time through the model's own library; `not_packed` says why it is neither of the
    others."""

    not_packed: str


Execution = Packed | Padded | OneByOne


def choose_execution(
    model: LoadedModel,
    device: torch.device,
    backend: Backend,
    samples: Sequence[Sample],
    packing_allowed: bool,
) -> Execution:
    """The fastest execution that is proven on the samples, for a backbone in float32.

    Leaves the backbone as this execution needs it."""
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
        backbone: Any = model.backbone
        backbone.pooler = pooler
    return _one_by_one(f"{reason}; {padded}")


def try_packed(
    model: LoadedModel, device: torch.device, backend: Backend, samples: Sequence[Sample]
) -> Packed | str:
    """Packed execution where it is exact, else a description of the mismatch.

    Leaves the backbone with packed attention if it is, and with its own attention if it is not."""
    if model.compression is not None:
        return "documents have fewer rows behind some of its layers than before them"
    backbone: Any = model.backbone
    own = getattr(backbone.config, "_attn_implementation", None)
    recorded = RecordedBackend(backend)
    poolers = pooler_for(model.tasks)
    register()
    undo = relative.install(backbone, NAME)
    try:
        _set_attention(backbone, NAME)
        runner = PackedRunner(model, device, recorded)
        comparison = compare(runner, poolers, samples)
        mismatch = None if comparison.agrees else f"packed and one-by-one results differ: {comparison}"
        if recorded.calls == 0:
            # Such a model might still separate sequences by their positions, at the cost of a full mask.
            mismatch = "its attention cannot be replaced"
        mismatch = why_not_packed(model, recorded.windows, backend.supports_causal_ends) or mismatch
    except Exception as error:
        mismatch = f"packed attention failed: {error}"
    if mismatch is not None:
        undo()
        _set_attention(backbone, own)
        return mismatch
    cls_only = _cls_only_if_exact(model, device, backend, samples)
    # What a later chunk brings cannot be left out by an earlier one.
    chunked = (
        model.causal and not leaves_ends_out(model) and _is_exact_in_parts(model, device, backend, samples)
    )
    return Packed(comparison, cls_only, chunked)


def make_runner(
    execution: Execution, model: LoadedModel, device: torch.device, backend: Backend
) -> ModelRunner:
    """The runner for an execution."""
    match execution:
        case Packed():
            return PackedRunner(model, device, backend, execution.cls_only, execution.chunked)
        case Padded():
            return PaddedRunner(model, device)
        case OneByOne():
            references = {name: task.reference for name, task in model.tasks.items()}
            return OwnForwardRunner({name: made for name, made in references.items() if made is not None})


def tasks_for(execution: Execution, model: LoadedModel) -> Mapping[str, Task]:
    """The model's tasks as they pool the rows of the execution's runner."""
    if isinstance(execution, OneByOne):
        return {name: finished(task) for name, task in model.tasks.items()}
    return {name: replace(task, reference=None) for name, task in model.tasks.items()}


def _one_by_one(reason: str) -> OneByOne:
    log.warning("runs its sequences one by one, which is much slower: %s", reason)
    return OneByOne(reason)


def _try_padded(model: LoadedModel, device: torch.device, samples: Sequence[Sample]) -> Comparison | str:
    """The comparison where padded batches are exact, else a description of the mismatch."""
    if model.vision is not None:
        return "pictures are not run in padded batches"
    try:
        comparison = compare(PaddedRunner(model, device), pooler_for(model.tasks), samples)
    except Exception as error:
        return f"padded execution failed: {type(error).__name__}: {error}"
    return comparison if comparison.agrees else f"padded and one-by-one results differ: {comparison}"


def _cls_only_if_exact(
    model: LoadedModel, device: torch.device, backend: Backend, samples: Sequence[Sample]
) -> ClsOnlyLastLayer | None:
    """A last layer that computes only first rows, if the model needs no others and gives the same with it;
    else None, and the backbone as it was."""
    if not backend.supports_first_rows or any(task.pooling != "cls" for task in model.tasks.values()):
        return None
    cls_only = cls_only_last_layer.install(model.backbone)
    if cls_only is None:
        return None
    runner = PackedRunner(model, device, backend, cls_only)
    try:
        is_exact = compare(runner, pooler_for(model.tasks), samples).agrees
    except Exception:
        is_exact = False
    if is_exact:
        return cls_only
    cls_only_last_layer.remove(model.backbone, cls_only)
    return None


def _is_exact_in_parts(
    model: LoadedModel, device: torch.device, backend: Backend, samples: Sequence[Sample]
) -> bool:
    """Whether a sequence may be cut into chunks and begin with a shared prefix, as tried with the longest
    sample."""
    longest = max(samples, key=lambda sample: len(sample.sequence))
    if len(longest.sequence) < 2:
        return False
    runner = PackedRunner(model, device, backend, chunked=True)
    try:
        comparison = compare_in_parts(runner, pooler_for(model.tasks), longest)
    except Exception as error:
        log.warning("long sequences are not prefilled in chunks: %s", error)
        return False
    if not comparison.agrees:
        log.warning("long sequences are not prefilled in chunks, which differ: %s", comparison)
    return comparison.agrees


def _remove_pooler(backbone: Any, sample: Sample) -> torch.nn.Module | None:
    """Removes a backbone's pooler, whose work the heads do on pooled rows alone, and returns it; None if
    there is none, or the backbone does not run without it."""
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
