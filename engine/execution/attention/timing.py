"""The fastest of several attention backends that are right on a device, by a short timing at load."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.execution.attention.base import AttentionBackend
from maxsimd.engine.execution.attention.check import head_shape
from maxsimd.engine.execution.device_clock import milliseconds_on_cuda
from maxsimd.engine.execution.layout import Group, Layout
from maxsimd.engine.ops.qkv import QKV

# Tokens of the sequences that are timed: 16,384 in all, as in a full step, a few long ones and many short,
# which are cut where a model takes no more. A quarter of them takes a GPU less time than launching does.
LENGTHS = (1024, 640, 512, 512, 320, 256, 256, 192, 128, 96, 64, 48, 32, 16) * 4
# Milliseconds of the device for one backend.
_BUDGET = 20.0
# A later backend is taken if it is faster than the ones before by more than this: less may be chance, and the
# first is cheaper to launch.
_MARGIN = 0.1

Timer = Callable[[Callable[[], object]], float]
time_on_cuda: Timer = functools.partial(milliseconds_on_cuda, budget=_BUDGET)


def fastest(milliseconds: Mapping[str, float]) -> str:
    """The first of the names, in their order, that takes at most 10% longer than the fastest."""
    least = min(milliseconds.values())
    return next(name for name, taken in milliseconds.items() if taken <= least * (1 + _MARGIN))


@torch.inference_mode()
def time_backends(
    backends: Mapping[str, AttentionBackend[Any]],
    model: LoadedModel,
    device: torch.device,
    dtype: torch.dtype,
    timer: Timer,
) -> dict[str, float]:
    """Milliseconds of each backend for attention within whole sequences of typical lengths, for heads as the
    model has them; with a window, for a layer with and one without it."""
    heads, kv_heads, head_dim, window = head_shape(model)
    layout = _layout(model)
    rows = layout.groups[-1].rows.stop
    # As rows in which heads stand side by side, which is how models hand them on.
    # Not the device's own generator, which an attempt at a CUDA graph may have left unusable.
    random = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(rows, n, head_dim, device=device, dtype=dtype, generator=random).transpose(0, 1)
        for n in (heads, kv_heads, kv_heads)
    )
    everything = QKV(query, key, value, head_dim**-0.5)
    layers = [everything] if window is None else [everything, replace(everything, window=window)]
    found = {}
    for name, backend in backends.items():
        metadata = backend.prepare(layout, device)
        found[name] = sum(timer(functools.partial(backend.full, qkv, metadata)) for qkv in layers)
    return found


def _layout(model: LoadedModel) -> Layout:
    groups: list[Group] = []
    row = 0
    for length in (min(length, model.max_tokens) for length in LENGTHS):
        groups.append(Group(row, 1, length, (length,)))
        row += length
    return Layout(model.causal, tuple(groups))
