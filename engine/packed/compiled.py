"""Attention for a CPU that runs our compiled kernels: sequences as they stand, without padding."""

import torch

from maxsimd import kernels
from maxsimd.engine.packed.attention import PackedAttention, Prefixes
from maxsimd.engine.packed.grouped import (
    attend_chunk,
    attend_first_rows,
    attend_grouped,
    attend_groups_after_prefix,
)
from maxsimd.engine.packed.layout import ROW_MULTIPLE, Arrangement, Layout
from maxsimd.kernels.attention import attention, is_supported


def is_compiled_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our kernels for attention and linear layers run on this device in this precision."""
    return device.type == "cpu" and dtype is torch.bfloat16 and kernels.is_available()


def attend_compiled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, window: int | None
) -> torch.Tensor:
    """One kernel over all sequences; heads of a size that it does not know go the plain way."""
    if not is_supported(q, v):
        return attend_grouped(q, k, v, layout, scale, window)
    out = q.new_empty(q.shape[1], q.shape[0], v.shape[-1])
    attention(q, k, v, _sequences(layout), [], scale, layout.causal, window, out)
    out[layout.groups[-1].rows.stop :] = 0
    return out


def attend_first_rows_compiled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float
) -> torch.Tensor:
    """As `attend_compiled`, but only for the first token of each sequence; other rows are left undefined."""
    if not is_supported(q, v):
        return attend_first_rows(q, k, v, layout, scale)
    out = q.new_empty(q.shape[1], q.shape[0], v.shape[-1])
    sequences = _sequences(layout).clone()
    sequences[:, 1] = 1
    attention(q, k, v, sequences, [], scale, layout.causal, None, out)
    return out


def attend_after_prefix_compiled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    prefixes: Prefixes,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """One kernel over all sequences that share prefixes."""
    if not is_supported(q, v):
        attend_groups_after_prefix(q, k, v, layout, prefixes, scale, window, out)
        return
    attention(q, k, v, _after_prefixes(layout), prefixes, scale, True, window, out)


def _sequences(layout: Layout) -> torch.Tensor:
    """First row, queries, keys and no prefix of each sequence, int64 [n, 4]; worked out once a step."""
    sequences = layout.masks.get("sequences")
    if sequences is None:
        sequences = torch.tensor(
            [
                (group.first_row + i * group.length, group.length, keys, -1)
                for group in layout.groups
                for i, keys in enumerate(group.key_lengths)
            ]
        )
        layout.masks["sequences"] = sequences
    return sequences


def _after_prefixes(layout: Layout) -> torch.Tensor:
    """Likewise of the sequences that share prefixes, each of which belongs to a group."""
    sequences = layout.masks.get("after prefixes")
    if sequences is None:
        sequences = torch.tensor(
            [
                (group.first_row + i * group.length, group.length, group.length, prefix)
                for prefix, group in enumerate(layout.shared)
                for i in range(group.count)
            ]
        )
        layout.masks["after prefixes"] = sequences
    return sequences


def compiled_attention(few_shapes: bool) -> PackedAttention:
    """With `few_shapes` steps have rows that libraries for products like; our own kernels take any."""
    arrangement = Arrangement(False, False, ROW_MULTIPLE if few_shapes else 1)
    return PackedAttention(
        "compiled",
        attend_compiled,
        attend_first_rows_compiled,
        attend_chunk,
        attend_after_prefix_compiled,
        arrangement,
        knows_float32=False,
    )
