"""The proof, at load, that running a model packed equals running its sequences one by one."""

from typing import Any

import numpy as np
import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.packed import last_layer
from maxsimd.engine.packed.attention import NAME, Attention, register
from maxsimd.engine.packed.last_layer import FirstRowsOnly
from maxsimd.engine.packed.runner import PackedRunner, PaddedRunner
from maxsimd.scheduler import Chunk, Role, Sequence, Step

# Relative to the hidden states' own size; float32 noise is a hundred times smaller, a wrong mask or
# position a thousand times larger.
TOLERANCE = 1e-3


def why_not_packed(
    model: LoadedModel, device: torch.device, attention: Attention, grouped: bool
) -> str | None:
    """None when packed and one-by-one runs of random sequences agree, else what is the matter.

    Leaves the backbone with packed attention after success and with its own after failure. Meant for a
    float32 backbone; the sequences reach beyond the model's sliding window, if it has one.
    """
    backbone: Any = model.backbone
    own = backbone.config._attn_implementation
    steps = _random_steps(model)
    padded = PaddedRunner(model, device)
    alone = [padded.forward(Step(0, (chunk,)))[0][: len(chunk)] for step in steps for chunk in step.chunks]
    register()
    try:
        backbone.set_attn_implementation(NAME)
        runner = PackedRunner(model, device, attention, grouped)
        together = []
        for step in steps:
            hidden, cursor = runner.forward(step)
            rows = dict(zip(cursor.chunks, cursor.starts, strict=True))
            together += [hidden[rows[chunk] :][: len(chunk)] for chunk in step.chunks]
    except Exception as error:
        backbone.set_attn_implementation(own)
        return f"packed attention failed: {error}"
    size = max(float(states.abs().max()) for states in alone)
    worst = max(float((a - b).abs().max()) for a, b in zip(alone, together, strict=True))
    if not worst <= TOLERANCE * max(size, 1e-6):
        backbone.set_attn_implementation(own)
        return f"packed and one-by-one hidden states differ by {worst:.2g}"
    return None


def gate_if_exact(
    model: LoadedModel, device: torch.device, attention: Attention, grouped: bool
) -> FirstRowsOnly | None:
    """A gate that leaves the last layer's first rows alone, where the model needs no others and is shown to
    give the same with it; else None, and the backbone as it was."""
    # Where sequences are not grouped, one query a sequence would mean one product a sequence.
    if not grouped or any(task.pooling != "cls" for task in model.tasks.values()):
        return None
    gate = last_layer.install(model.backbone)
    if gate is None:
        return None
    plain = PackedRunner(model, device, attention, grouped)
    gated = PackedRunner(model, device, attention, grouped, gate)
    for step in _random_steps(model):
        gate.rows = None
        hidden, cursor = plain.forward(step)
        first = hidden[list(cursor.starts)]
        only, _ = gated.forward(step)
        if only.shape != first.shape or not torch.allclose(only, first, rtol=TOLERANCE, atol=TOLERANCE):
            last_layer.remove(model.backbone, gate)
            return None
    return gate


def _random_steps(model: LoadedModel) -> list[Step]:
    backbone: Any = model.backbone
    random = np.random.default_rng(0)
    vocabulary = backbone.get_input_embeddings().weight.shape[0]
    window = getattr(backbone.config, "sliding_window", None) or getattr(
        backbone.config, "local_attention", None
    )
    beyond = 2 * window + 3 if isinstance(window, int) and window <= 1024 else 40
    lengths = [5, 1, 17, 6, min(beyond, model.max_tokens), 18]
    sequences = []
    for key, length in enumerate(lengths):
        length = min(length, model.max_tokens)
        ids = random.integers(0, vocabulary, length).astype(np.int32)
        # One sequence whose last tokens nobody attends to, as in ColBERT's query expansion.
        attended = length - 7 if length == 17 and not model.causal else length
        sequences.append(Sequence(key, 0, key, Role.TEXT, "proof", ids, attended=attended))
    chunks = tuple(Chunk(sequence, 0, len(sequence)) for sequence in sequences)
    return [Step(0, chunks), Step(1, chunks[:1])]
