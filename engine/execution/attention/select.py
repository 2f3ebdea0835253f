"""Selects a device's attention backend: the fastest that is installed and shown to be right on it."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution.attention.backend import AttentionBackend, GroupedBackend, OneByOneBackend
from maxsimd.engine.execution.attention.cpu import CompiledBackend
from maxsimd.engine.execution.attention.gpu import TritonBackend, VarlenBackend, is_varlen_available
from maxsimd.engine.execution.devices import dtype_name, milliseconds_in_turns_on_cuda
from maxsimd.engine.execution.layout import Group, Layout, PrefillChunk, PrefillKV, SharedGroup
from maxsimd.engine.execution.relative import has_relative_positions
from maxsimd.engine.execution.self_check.samples import largest
from maxsimd.engine.ops import triton as triton_ops
from maxsimd.engine.ops.qkv import KV, QKV

log = logging.getLogger(__name__)


def choose_attention(
    name: str, model: LoadedModel, device: torch.device, dtype: torch.dtype, compiled: bool
) -> AttentionBackend:
    """The backend for a name: auto, varlen, triton or torch.

    `auto` takes the fastest that agrees with plain torch on random sequences, and warns of those that do not.
    `compiled` allows the compiled kernels. Raises ModelLoadError for a name that cannot run here."""
    if name == "torch":
        return GroupedBackend()
    if name == "auto" and device.type == "cpu":
        return CompiledBackend() if compiled else GroupedBackend()
    found = candidates(device, dtype)
    if name not in ("auto", *found):
        is_missing = name == "triton" and triton_ops.is_missing_on(device)
        advice = triton_ops.MISSING if is_missing else "use auto"
        raise ModelLoadError(
            f"attention by {name} cannot run on this {device.type} in {dtype_name(dtype)}; {advice}"
        )
    if has_relative_positions(model.backbone):
        level = logging.INFO if name == "auto" else logging.WARNING
        log.log(level, "attention: plain torch, which alone adds relative positions on this device")
        return GroupedBackend()
    if name != "auto":
        return found[name]()
    right = {candidate: make() for candidate, make in found.items()}
    for candidate in found:
        mismatch = find_mismatch(right[candidate], model, device, dtype)
        if mismatch is not None:
            del right[candidate]
            log.warning("attention by %s is not used: %s", candidate, mismatch)
    if not right:
        log.debug("attention: plain torch, because nothing else is right on this device")
        return GroupedBackend()
    if len(right) == 1 or device.type != "cuda":
        chosen = next(iter(right))
        log.debug("attention: %s, the first that is right on this device", chosen)
        return right[chosen]
    times = time_backends(right, model, device, dtype, time_on_cuda)
    chosen = fastest(times)
    measured = ", ".join(f"{name} {taken:.3f} ms" for name, taken in times.items())
    log.debug("attention: %s, by a short timing on this device: %s", chosen, measured)
    return right[chosen]


def candidates(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], AttentionBackend]]:
    """The backends for GPUs that can run on a device, preferred first."""
    found: dict[str, Callable[[], AttentionBackend]] = {}
    if triton_ops.runs_on(device):
        # First, because CUDA graphs of any size can be captured with it.
        found["triton"] = TritonBackend
    if is_varlen_available(device, dtype):
        found["varlen"] = lambda: VarlenBackend(device)
    return found


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


# Tokens of the timed sequences: 16,384 in all, as in a full step, truncated to the model's limit. A quarter
# of them takes a GPU less time than launching.
LENGTHS = (1024, 640, 512, 512, 320, 256, 256, 192, 128, 96, 64, 48, 32, 16) * 4
# Milliseconds of the device for each backend.
_BUDGET = 20.0
# A later backend must be faster than earlier ones by more than this: less may be chance, and the first is
# cheaper to launch.
_MARGIN = 0.1
Timer = Callable[[Callable[[], object]], float]


def time_on_cuda(run: Callable[[], object]) -> float:
    return milliseconds_in_turns_on_cuda({"": run}, _BUDGET)[""]


def fastest(milliseconds: Mapping[str, float]) -> str:
    """The first that takes at most 10% longer than the fastest."""
    least = min(milliseconds.values())
    return next(name for name, taken in milliseconds.items() if taken <= least * (1 + _MARGIN))


@torch.inference_mode()
def time_backends(
    backends: Mapping[str, AttentionBackend],
    model: LoadedModel,
    device: torch.device,
    dtype: torch.dtype,
    timer: Timer,
) -> dict[str, float]:
    """Milliseconds of each backend for whole sequences of typical lengths, with the model's heads; if it has
    a window, for a layer with and one without it."""
    heads, kv_heads, head_dim, window = head_shape(model)
    lengths = [min(length, model.max_tokens) for length in LENGTHS]
    starts = itertools.accumulate(lengths, initial=0)
    groups = [Group(row, 1, length, (length,)) for row, length in zip(starts, lengths, strict=False)]
    layout, rows = Layout(model.causal, tuple(groups)), sum(lengths)
    # Heads stand side by side in a row, as models have them.
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
