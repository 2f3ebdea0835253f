"""Attention for a GPU: torch's variable-length flash attention over the rows as they stand."""

import inspect
from collections.abc import Callable
from itertools import accumulate

import torch

from maxsimd.engine.packed.attention import PackedAttention, attend_groups_after_prefix
from maxsimd.engine.packed.layout import Arrangement, Layout


def is_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has variable-length attention for this device and precision."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    # Earlier versions have neither grouped-query attention nor key lengths of their own.
    return {"enable_gqa", "seqused_k", "window_size"} <= set(inspect.signature(varlen_attn).parameters)


def attend_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, window: int | None
) -> torch.Tensor:
    """One kernel over all sequences. Needs a layout without padding (one sequence a group)."""
    from torch.nn.attention.varlen import varlen_attn

    offsets = _shared(
        layout, "offsets", lambda: [0, *accumulate(group.length for group in layout.groups)], q.device
    )
    longest = max(group.length for group in layout.groups)
    used = None
    if any(group.key_lengths[0] < group.length for group in layout.groups):
        used = _shared(layout, "used", lambda: [group.key_lengths[0] for group in layout.groups], q.device)
    if layout.causal:
        sides = (-1 if window is None else window - 1, 0)
    else:
        sides = (-1, -1) if window is None else (window - 1, window - 1)
    queries, keys, values = (x.transpose(0, 1).contiguous() for x in (q, k, v))
    out = varlen_attn(
        queries,
        keys,
        values,
        offsets,
        offsets,
        longest,
        longest,
        scale=scale,
        window_size=sides,
        enable_gqa=k.shape[0] != q.shape[0],
        seqused_k=used,
    )
    assert isinstance(out, torch.Tensor)
    return out


def _shared(
    layout: Layout, name: str, numbers: Callable[[], list[int]], device: torch.device
) -> torch.Tensor:
    """An int32 tensor that all layers of a step share."""
    tensor = layout.masks.get(name)
    if tensor is None:
        tensor = torch.tensor(numbers(), dtype=torch.int32).to(device, non_blocking=True)
        layout.masks[name] = tensor
    return tensor


# One query a sequence would mean one product a sequence, so there is nothing for first rows alone.
# Chunks that share a prefix attend to it in batched products, as elsewhere.
VARLEN = PackedAttention(attend_varlen, None, attend_groups_after_prefix, Arrangement(False, True, 1))
