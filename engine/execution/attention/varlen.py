"""Packed attention by libraries for GPUs: torch's variable-length attention, or the package flash-attn.

Both take sequences that stand end to end. What they have no way for (chunks of a cut sequence and shared
prefixes, key lengths with flash-attn) is left to our own kernel, or to plain torch without Triton.
"""

import importlib
import importlib.util
import inspect
from itertools import accumulate

import torch

from maxsimd.engine.execution.attention.base import PackedAttention
from maxsimd.engine.execution.attention.torch_grouped import GROUPED
from maxsimd.engine.execution.layout import Arrangement, Layout
from maxsimd.engine.ops import triton as triton_ops
from maxsimd.pooling.transfer import to_device

_PRECISIONS = (torch.bfloat16, torch.float16)


def is_varlen_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has variable-length attention for this device and precision."""
    if device.type != "cuda" or dtype not in _PRECISIONS:
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    # Earlier versions have neither grouped-query attention nor key lengths of their own.
    return {"enable_gqa", "seqused_k", "window_size"} <= set(inspect.signature(varlen_attn).parameters)


def is_flash_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether flash-attn is installed and runs on this device in this precision."""
    if device.type != "cuda" or dtype not in _PRECISIONS or importlib.util.find_spec("flash_attn") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def attend_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, window: int | None
) -> torch.Tensor:
    """torch's kernel over all sequences. Needs a layout without padding (one sequence a group)."""
    from torch.nn.attention.varlen import varlen_attn

    offsets = _offsets(layout, q.device)
    queries, keys, values = (x.transpose(0, 1).contiguous() for x in (q, k, v))
    out = varlen_attn(
        queries,
        keys,
        values,
        offsets,
        offsets,
        layout.longest,
        layout.longest,
        scale=scale,
        window_size=_sides(layout, window),
        enable_gqa=k.shape[0] != q.shape[0],
        seqused_k=_key_lengths(layout, q.device),
    )
    assert isinstance(out, torch.Tensor)
    return out


def attend_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, window: int | None
) -> torch.Tensor:
    """flash-attn's kernel over all sequences, where each sees all of its keys. Needs a layout without
    padding."""
    if not layout.attends_to_all:
        return _fallback(q.device).everywhere(q, k, v, layout, scale, window)
    function = importlib.import_module("flash_attn").flash_attn_varlen_func
    offsets = _offsets(layout, q.device)
    queries, keys, values = (x.transpose(0, 1).contiguous() for x in (q, k, v))
    out: torch.Tensor = function(
        queries,
        keys,
        values,
        offsets,
        offsets,
        layout.longest,
        layout.longest,
        softmax_scale=scale,
        causal=layout.causal,
        window_size=_sides(layout, window),
    )
    return out


def with_libraries(device: torch.device) -> dict[str, PackedAttention]:
    """The two ways, with what else a step may need on this device."""
    rest = _fallback(device)
    arrangement = Arrangement(False, rest.arrangement.groups_shared, 1)
    return {
        name: PackedAttention(
            name, everywhere, None, rest.chunk, rest.after_prefix, arrangement, False, static
        )
        for name, everywhere, static in (("varlen", attend_varlen, tables), ("flash", attend_flash, None))
    }


def tables(layout: Layout, sequences: int) -> dict[object, torch.Tensor]:
    """What torch's kernel is told of a step, filled up with sequences without rows."""
    lengths = [group.length for group in layout.groups]
    keys = [group.key_lengths[0] for group in layout.groups]
    more = sequences - len(lengths)
    return {
        "offsets": torch.tensor([0, *accumulate(lengths + [0] * more)], dtype=torch.int32),
        "used": torch.tensor(keys + [0] * more, dtype=torch.int32),
    }


def _fallback(device: torch.device) -> PackedAttention:
    if not triton_ops.runs_on(device):
        return GROUPED
    from maxsimd.engine.execution.attention.triton_kernel import TRITON

    return TRITON


def _offsets(layout: Layout, device: torch.device) -> torch.Tensor:
    """Where each sequence begins, int32 [sequences + 1], copied once a step."""
    offsets = layout.masks.get("offsets")
    if offsets is None:
        lengths = [group.length for group in layout.groups]
        offsets = to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)
        layout.masks["offsets"] = offsets
    return offsets


def _key_lengths(layout: Layout, device: torch.device) -> torch.Tensor | None:
    """How many keys each sequence may see, where these are not all of them."""
    used = layout.masks.get("used")
    if used is None and not layout.attends_to_all:
        numbers = [group.key_lengths[0] for group in layout.groups]
        used = to_device(torch.tensor(numbers, dtype=torch.int32), device)
        layout.masks["used"] = used
    return used


def _sides(layout: Layout, window: int | None) -> tuple[int, int]:
    """How far back and ahead a token sees; -1 is without end."""
    reach = -1 if window is None else window - 1
    return (reach, 0) if layout.causal else (reach, reach)
