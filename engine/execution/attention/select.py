"""Selects a device's attention backend: our kernels where they are shown to be right, else plain torch."""

import logging
from collections.abc import Iterator
from typing import Any

import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution.attention.backend import AttentionBackend, GroupedBackend, OneByOneBackend
from maxsimd.engine.execution.attention.cpu import CompiledBackend
from maxsimd.engine.execution.attention.gpu import TritonBackend
from maxsimd.engine.execution.layout import Group, Layout, PrefillChunk, PrefillKV, SharedGroup
from maxsimd.engine.execution.relative import has_relative_positions
from maxsimd.engine.execution.self_check.samples import largest
from maxsimd.engine.ops import triton as triton_ops
from maxsimd.engine.ops.qkv import KV, QKV

log = logging.getLogger(__name__)


def choose_attention(
    name: str, model: LoadedModel, device: torch.device, dtype: torch.dtype, compiled: bool
) -> AttentionBackend:
    """The backend for a name: auto, triton or torch.

    On a GPU `auto` takes our kernel if it agrees with plain torch on random sequences, and warns if it does
    not. `compiled` allows the kernels for CPUs. Raises ModelLoadError for a kernel that cannot run here."""
    if name == "torch":
        return GroupedBackend()
    if name == "auto" and device.type == "cpu":
        return CompiledBackend() if compiled else GroupedBackend()
    is_there = triton_ops.runs_on(device)
    if name == "triton" and not is_there:
        advice = triton_ops.MISSING if triton_ops.is_missing_on(device) else "use auto"
        raise ModelLoadError(f"attention by triton cannot run on this {device.type}; {advice}")
    if has_relative_positions(model.backbone):
        level = logging.INFO if name == "auto" else logging.WARNING
        log.log(level, "attention: plain torch, which alone adds relative positions on this device")
        return GroupedBackend()
    backend = TritonBackend() if is_there else GroupedBackend()
    mismatch = find_mismatch(backend, model, device, dtype) if name == "auto" and is_there else None
    if mismatch is not None:
        log.warning("attention by triton is not used: %s", mismatch)
        backend = GroupedBackend()
    log.debug("attention: %s", backend.name)
    return backend


# For random values of size 1 in the model's precision: ten times what rounding alone does.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# Rows and keys of the sequences that are tried, with full, partial and empty blocks; the first row of each.
_SHAPES = ((1, 1), (70, 70), (257, 257), (33, 20))
_FIRST_ROWS = (0, 1, 71, 328)
_ROWS = 361
# The last rows, as a chunk of one sequence with all rows.
_CHUNK = 9


def find_mismatch(
    backend: AttentionBackend, model: LoadedModel, device: torch.device, dtype: torch.dtype
) -> str | None:
    """None if random sequences attend as one by one in float32, else a description of the mismatch. A causal
    model also has a chunk of a cut sequence, and sequences after a shared prefix."""
    heads, kv_heads, head_dim, window = head_shape(model)
    random = torch.Generator().manual_seed(0)
    # Float32 values that the precision represents exactly.
    query, key, value = (
        torch.randn(n, _ROWS, head_dim, generator=random, dtype=torch.float32).to(dtype).float()
        for n in (heads, kv_heads, kv_heads)
    )
    exact = QKV(query, key, value, head_dim**-0.5, window)
    query, key, value = (x.to(device, dtype) for x in (query, key, value))
    ours = QKV(query, key, value, exact.scaling, exact.window)
    try:
        differences = [
            found.float().cpu() - expected
            for layout in _layouts(model.causal)
            for found, expected in zip(
                _attended(backend, ours, layout), _attended(OneByOneBackend(), exact, layout), strict=True
            )
        ]
        worst = largest(differences)
    except Exception as error:
        return f"it failed: {error}"
    return None if worst <= _TOLERANCE[dtype] else f"it differs from plain attention by {worst:.2g}"


def head_shape(model: LoadedModel) -> tuple[int, int, int, int | None]:
    """Heads, key heads, their size, and the window, as far as the config has them."""
    backbone: Any = model.backbone
    config = backbone.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 4
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 64 * heads) // heads
    window = getattr(config, "sliding_window", None) or getattr(config, "local_attention", None)
    return heads, kv_heads, head_dim, window if isinstance(window, int) else None


def _attended(backend: AttentionBackend, qkv: QKV, layout: Layout) -> Iterator[torch.Tensor]:
    """A backend's results for the parts of a layout. The prefix and the context have all keys and values."""
    metadata, kv = backend.prepare(layout, qkv.query.device), KV(qkv.key, qkv.value)
    if layout.groups:
        yield backend.full(qkv, metadata)
    parts = (backend.with_prefill_kv, layout.prefill_chunks), (backend.shared_prefix, layout.shared_groups)
    for attend, chunks in parts:
        if chunks:
            out = torch.zeros_like(qkv.new_output())
            attend(qkv, [kv] * len(chunks), metadata, out)
            yield out


def _layouts(causal: bool) -> Iterator[Layout]:
    """Whole sequences that see all of their keys; then fewer, or for a causal model chunks and prefixes."""
    shapes = list(zip(_FIRST_ROWS, _SHAPES, strict=True))
    yield Layout(causal, tuple(Group(row, 1, rows, (rows,)) for row, (rows, _) in shapes))
    if not causal:
        yield Layout(False, tuple(Group(row, 1, rows, (keys,)) for row, (rows, keys) in shapes))
        return
    chunk = PrefillChunk(_ROWS - _CHUNK, _ROWS - _CHUNK, _ROWS, PrefillKV(), is_stored=False)
    yield Layout(True, prefill_chunks=(chunk,))
    prefix = PrefillKV()
    yield Layout(True, shared_groups=tuple(SharedGroup(row, 1, rows, prefix) for row, (rows, _) in shapes))
