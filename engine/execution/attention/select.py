"""Which packed attention a device runs: the fastest that is there and shown to be right on it."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution.attention.base import PackedAttention
from maxsimd.engine.execution.attention.cpu_kernel import compiled_attention
from maxsimd.engine.execution.attention.torch_grouped import (
    GROUPED,
    attend_chunk,
    attend_groups_after_prefix,
    attend_one_by_one,
)
from maxsimd.engine.execution.attention.varlen import is_flash_available, is_varlen_available, with_libraries
from maxsimd.engine.execution.layout import Group, Layout, SharedGroup
from maxsimd.engine.execution.prefill_kv import Carry
from maxsimd.engine.execution.selfcheck.comparison import largest
from maxsimd.engine.ops import triton as triton_ops

log = logging.getLogger(__name__)

# Of random values of size 1, attended in the model's precision: rounding alone is ten times less.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# Rows and keys of the sequences that are tried: with tiles that are full, cut, and left over.
_SHAPES = ((1, 1), (70, 70), (257, 257), (33, 20))
_ROWS = (0, 1, 71, 328)  # the first of each


def choose_attention(
    name: str, model: LoadedModel, device: torch.device, dtype: torch.dtype, compiled: bool
) -> PackedAttention:
    """The attention for a name (auto, varlen, flash, triton, torch).

    `auto` takes the first that runs here and agrees with plain torch on random sequences, with a warning for
    each that does not agree. `compiled` says whether the compiled kernels may be used. Raises ModelLoadError
    for a name that cannot run here."""
    if name == "torch":
        return GROUPED
    if name == "auto" and device.type == "cpu":
        return compiled_attention() if compiled else GROUPED
    found = candidates(device, dtype)
    if name != "auto":
        if name not in found:
            raise ModelLoadError(
                f"attention by {name} cannot run on this {device.type} in {_shown(dtype)}; use auto"
            )
        return found[name]()
    for candidate, make in found.items():
        attention = make()
        trouble = why_wrong(attention, model, device, dtype)
        if trouble is None:
            return attention
        log.warning("attention by %s is not used: %s", candidate, trouble)
    return GROUPED


def why_wrong(
    attention: PackedAttention, model: LoadedModel, device: torch.device, dtype: torch.dtype
) -> str | None:
    """None where random sequences attend as they do one by one in float32, else what is the matter.

    For a causal model also a chunk, and sequences after a prefix."""
    heads, kv_heads, head_dim, window = _shape(model)
    random = torch.Generator().manual_seed(0)
    scale = head_dim**-0.5
    whole, shared = _whole(model.causal, all_keys=True), _after_prefix()
    rows = sum(length for length, _ in _SHAPES)
    states = [torch.randn(n, rows, head_dim, generator=random) for n in (heads, kv_heads, kv_heads)]
    exact_q, exact_k, exact_v = (state.to(dtype).float() for state in states)
    q, k, v = (state.to(device, dtype) for state in states)
    try:
        found = [
            (
                attention.everywhere(q, k, v, layout, scale, window),
                attend_one_by_one(exact_q, exact_k, exact_v, layout, scale, window),
            )
            for layout in ([whole] if model.causal else [whole, _whole(False, all_keys=False)])
        ]
        if model.causal:
            found.append(
                (
                    attention.chunk(q[:, -9:], k, v, whole, scale, window),
                    attend_chunk(exact_q[:, -9:], exact_k, exact_v, whole, scale, window),
                )
            )
            ours, exact = q.new_zeros(rows, heads, head_dim), torch.zeros(rows, heads, head_dim)
            attention.after_prefix(q, k, v, shared, [(k, v)] * len(shared.shared), scale, window, ours)
            wide = [(exact_k, exact_v)] * len(shared.shared)
            attend_groups_after_prefix(exact_q, exact_k, exact_v, shared, wide, scale, window, exact)
            found.append((ours, exact))
        worst = largest(ours.float().cpu() - exact for ours, exact in found)
    except Exception as error:
        return f"it failed: {error}"
    return None if worst <= _TOLERANCE[dtype] else f"it differs from plain attention by {worst:.2g}"


def candidates(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], PackedAttention]]:
    """What can run on a device that is not left to the CPU's own ways, fastest first."""
    found: dict[str, Callable[[], PackedAttention]] = {}
    if is_varlen_available(device, dtype):
        found["varlen"] = lambda: with_libraries(device)["varlen"]
    if is_flash_available(device, dtype):
        found["flash"] = lambda: with_libraries(device)["flash"]
    if triton_ops.runs_on(device):
        found["triton"] = _triton
    return found


def _triton() -> PackedAttention:
    from maxsimd.engine.execution.attention.triton_kernel import TRITON

    return TRITON


def _shape(model: LoadedModel) -> tuple[int, int, int, int | None]:
    """Heads, those of keys and values, their dimensions and the window, as far as the config tells."""
    backbone: Any = model.backbone
    config = backbone.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 4
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 64 * heads) // heads
    window = getattr(config, "sliding_window", None) or getattr(config, "local_attention", None)
    return heads, kv_heads, head_dim, window if isinstance(window, int) else None


def _whole(causal: bool, all_keys: bool) -> Layout:
    """The sequences by themselves, seeing all of their keys or as many as they are given."""
    groups = [
        Group(row, 1, length, (length if all_keys else keys,))
        for row, (length, keys) in zip(_ROWS, _SHAPES, strict=True)
    ]
    return Layout(tuple(groups), (), causal)


def _after_prefix() -> Layout:
    """The same after a prefix that they share."""
    prefix = Carry()
    shared = [SharedGroup(row, 1, length, prefix) for row, (length, _) in zip(_ROWS, _SHAPES, strict=True)]
    return Layout((), (), True, None, tuple(shared))


def _shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
