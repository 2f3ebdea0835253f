"""The check of an attention backend on its device: random sequences against the plain reference on the
CPU."""

from collections.abc import Iterator
from typing import Any

import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.execution.attention.base import AttentionBackend, M
from maxsimd.engine.execution.attention.one_by_one import OneByOneBackend
from maxsimd.engine.execution.layout import Group, Layout, PrefillChunk, SharedGroup
from maxsimd.engine.execution.prefill_kv import PrefillKV
from maxsimd.engine.execution.selfcheck.comparison import largest
from maxsimd.engine.ops.qkv import KV, QKV

# For random values of size 1, attended in the model's precision: rounding alone is ten times less.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# Rows and keys of the sequences that are tried, so that blocks of the kernels are full, cut, and left over;
# and the first row of each.
_SHAPES = ((1, 1), (70, 70), (257, 257), (33, 20))
_FIRST_ROWS = (0, 1, 71, 328)
_ROWS = 361
# The last rows, tried as a chunk of one sequence that has all rows.
_CHUNK = 9


def find_mismatch(
    backend: AttentionBackend[Any], model: LoadedModel, device: torch.device, dtype: torch.dtype
) -> str | None:
    """None if random sequences attend as they do one by one in float32, else a description of the mismatch.

    For a causal model this includes a chunk of a cut sequence and sequences after a shared prefix."""
    exact = _random_qkv(model, dtype)
    if exact.slopes is not None and not backend.supports_slopes:
        return "it takes no slopes (ALiBi)"
    query, key, value = (x.to(device, dtype) for x in (exact.query, exact.key, exact.value))
    slopes = None if exact.slopes is None else exact.slopes.to(device)
    ours = QKV(query, key, value, exact.scaling, exact.window, slopes)
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
    """The numbers of heads and of key heads, their size, and the window, as far as the config has them."""
    backbone: Any = model.backbone
    config = backbone.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 4
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 64 * heads) // heads
    window = getattr(config, "sliding_window", None) or getattr(config, "local_attention", None)
    return heads, kv_heads, head_dim, window if isinstance(window, int) else None


def slopes_of(model: LoadedModel) -> torch.Tensor | None:
    """The slopes of ALiBi that the config has, float32 [heads] on the CPU."""
    backbone: Any = model.backbone
    slopes = getattr(backbone.config.get_text_config(), "alibi_slopes", None)
    return None if slopes is None else torch.tensor(slopes)


def _attended(backend: AttentionBackend[M], qkv: QKV, layout: Layout) -> Iterator[torch.Tensor]:
    """What a backend gives for the parts of a layout; all keys and values are the prefix and the context."""
    metadata = backend.prepare(layout, qkv.query.device)
    kv = KV(qkv.key, qkv.value)
    if layout.groups:
        yield backend.full(qkv, metadata)
    if layout.prefill_chunks:
        out = torch.zeros_like(qkv.new_output())
        backend.with_prefill_kv(qkv, [kv], metadata, out)
        yield out
    if layout.shared_groups:
        out = torch.zeros_like(qkv.new_output())
        backend.shared_prefix(qkv, [kv] * len(layout.shared_groups), metadata, out)
        yield out


def _layouts(causal: bool) -> Iterator[Layout]:
    """The sequences by themselves, seeing all of their keys and fewer; for a causal model as parts of steps
    too."""
    yield Layout(causal, _groups(all_keys=True))
    if not causal:
        yield Layout(False, _groups(all_keys=False))
        return
    chunk = PrefillChunk(_ROWS - _CHUNK, _ROWS - _CHUNK, _ROWS, PrefillKV(), is_stored=False)
    yield Layout(True, prefill_chunks=(chunk,))
    prefix = PrefillKV()
    shared = (SharedGroup(row, 1, rows, prefix) for row, (rows, _) in zip(_FIRST_ROWS, _SHAPES, strict=True))
    yield Layout(True, shared_groups=tuple(shared))


def _groups(*, all_keys: bool) -> tuple[Group, ...]:
    return tuple(
        Group(row, 1, rows, (rows if all_keys else keys,))
        for row, (rows, keys) in zip(_FIRST_ROWS, _SHAPES, strict=True)
    )


def _random_qkv(model: LoadedModel, dtype: torch.dtype) -> QKV:
    """Random values in float32 that the precision represents exactly, for heads as the model has them."""
    heads, kv_heads, head_dim, window = head_shape(model)
    random = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(n, _ROWS, head_dim, generator=random).to(dtype).float()
        for n in (heads, kv_heads, kv_heads)
    )
    return QKV(query, key, value, head_dim**-0.5, window, slopes_of(model))
