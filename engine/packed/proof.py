"""The proof, at load, that running a model packed equals running its sequences one by one."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.packed import last_layer
from maxsimd.engine.packed.attention import NAME, Attention, PackedAttention, register
from maxsimd.engine.packed.last_layer import FirstRowsOnly
from maxsimd.engine.packed.padded import PaddedRunner
from maxsimd.engine.packed.runner import PackedRunner
from maxsimd.engine.packed.sample_layers import sample_layers
from maxsimd.scheduler import Chunk, Role, Sequence, Step

# Relative to the hidden states' own size; float32 noise is a hundred times smaller, a wrong mask or
# position a thousand times larger.
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class Proof:
    """Why a model cannot be packed, or None, and the gate for its last layer, if it may have one."""

    not_packed: str | None
    gate: FirstRowsOnly | None


def prove(model: LoadedModel, device: torch.device, attention: PackedAttention) -> Proof:
    """Finds out in float32 how a model can be run, on a sample of its layers, which stay float32.

    Leaves the backbone with packed attention where that is exact."""
    with sample_layers(model.backbone):
        model.backbone.float()
        not_packed = why_not_packed(model, device, attention)
        if not_packed is not None:
            return Proof(not_packed, None)
        return Proof(None, gate_if_exact(model, device, attention))


def why_not_packed(model: LoadedModel, device: torch.device, attention: PackedAttention) -> str | None:
    """None when packed and one-by-one runs of random sequences agree, else what is the matter.

    Leaves the backbone with packed attention after success and with its own after failure. Meant for a
    float32 backbone; the sequences reach beyond the model's sliding window, if it has one.
    """
    backbone: Any = model.backbone
    own = backbone.config._attn_implementation
    steps = random_steps(model)
    padded = PaddedRunner(model, device)
    alone = [padded.forward(Step(0, (chunk,)))[0][: len(chunk)] for step in steps for chunk in step.chunks]
    register()
    try:
        backbone.set_attn_implementation(NAME)
        counted = _Counted(attention.everywhere)
        runner = PackedRunner(model, device, replace(attention, everywhere=counted))
        together = []
        for step in steps:
            hidden, cursor = runner.forward(step)
            rows = dict(zip(cursor.chunks, cursor.starts, strict=True))
            together += [hidden[rows[chunk] :][: len(chunk)] for chunk in step.chunks]
    except Exception as error:
        backbone.set_attn_implementation(own)
        return f"packed attention failed: {error}"
    if counted.calls == 0:
        # Such a model might still tell sequences apart by their positions, at the cost of a full mask.
        return "its attention cannot be replaced"
    size = max(float(states.abs().max()) for states in alone)
    worst = max(float((a - b).abs().max()) for a, b in zip(alone, together, strict=True))
    if not worst <= TOLERANCE * max(size, 1e-6):
        backbone.set_attn_implementation(own)
        return f"packed and one-by-one hidden states differ by {worst:.2g}"
    return None


class _Counted:
    """An attention function that knows how often it was called."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self.calls = 0

    def __call__(self, *arguments: Any) -> torch.Tensor:
        self.calls += 1
        return self._attention(*arguments)


def gate_if_exact(
    model: LoadedModel, device: torch.device, attention: PackedAttention
) -> FirstRowsOnly | None:
    """A gate that leaves the last layer's first rows alone, where the model needs no others and is shown to
    give the same with it; else None, and the backbone as it was."""
    if attention.first_rows is None or any(task.pooling != "cls" for task in model.tasks.values()):
        return None
    gate = last_layer.install(model.backbone)
    if gate is None:
        return None
    plain = PackedRunner(model, device, attention)
    gated = PackedRunner(model, device, attention, gate)
    step = random_steps(model)[0]
    hidden, cursor = plain.forward(step)
    first = hidden[list(cursor.starts)]
    only, _ = gated.forward(step)
    if only.shape != first.shape or not torch.allclose(only, first, rtol=TOLERANCE, atol=TOLERANCE):
        last_layer.remove(model.backbone, gate)
        return None
    return gate


def random_steps(model: LoadedModel, task: str = "proof") -> list[Step]:
    """A step of several random sequences for a model, and one of a single one."""
    backbone: Any = model.backbone
    random = np.random.default_rng(0)
    vocabulary = backbone.get_input_embeddings().weight.shape[0]
    window = getattr(backbone.config, "sliding_window", None) or getattr(
        backbone.config, "local_attention", None
    )
    beyond = 2 * window + 3 if isinstance(window, int) and window <= 1024 else 11
    # Two sequences have tokens at their end that nobody attends to, as in ColBERT's query expansion; some of
    # the second's see no token at all through a window.
    shapes = [(5, 5), (1, 1), (17, 10), (beyond, beyond), (beyond, 3)]
    sequences = []
    for key, (length, attended) in enumerate(shapes):
        length = min(length, model.max_tokens)
        ids = random.integers(0, vocabulary, length).astype(np.int32)
        attended = length if model.causal else min(attended, length)
        sequences.append(Sequence(key, 0, key, Role.TEXT, task, ids, attended=attended))
    chunks = tuple(Chunk(sequence, 0, len(sequence)) for sequence in sequences)
    return [Step(0, chunks), Step(1, chunks[:1])]
