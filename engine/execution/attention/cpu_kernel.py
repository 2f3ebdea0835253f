"""Attention for a CPU that runs our compiled kernels: sequences as they stand, without padding.

A token's result is the same to the last bit whatever else is in the step, and however its sequence is cut.
"""

import torch

from maxsimd.engine.execution.attention.base import PackedAttention, Prefixes
from maxsimd.engine.execution.layout import Arrangement, Layout
from maxsimd.engine.ops import cpu as kernels
from maxsimd.engine.ops.cpu.attention import attention


def is_compiled_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our kernels for attention and linear layers run on this device in this precision."""
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and kernels.is_available()


def attend_compiled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, window: int | None
) -> torch.Tensor:
    """One kernel over all sequences."""
    out = _outputs(q, v)
    attention(q, k, v, _sequences(layout), [], scale, layout.causal, window, out)
    out[layout.groups[-1].rows.stop :] = 0
    return out


def attend_first_rows_compiled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float
) -> torch.Tensor:
    """As `attend_compiled`, but only for the first token of each sequence; other rows are left undefined."""
    out = _outputs(q, v)
    sequences = _sequences(layout).clone()
    sequences[:, 1] = 1
    attention(q, k, v, sequences, [], scale, layout.causal, None, out)
    return out


def attend_chunk_compiled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, window: int | None
) -> torch.Tensor:
    """A chunk's queries against its own and all earlier keys, which are a prefix to it."""
    tokens = q.shape[1]
    before = k.shape[1] - tokens
    out = _outputs(q, v)
    sequence = torch.tensor([(0, tokens, tokens, 0)])
    prefix = (k[:, :before], v[:, :before])
    attention(q, k[:, before:], v[:, before:], sequence, [prefix], scale, True, window, out)
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
    attention(q, k, v, _after_prefixes(layout), prefixes, scale, True, window, out)


def _outputs(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[1], q.shape[0], v.shape[-1])  # [rows, heads, head_dim]


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


def compiled_attention() -> PackedAttention:
    """Attention by our kernels, which take sequences and steps of any length."""
    return PackedAttention(
        "compiled",
        attend_compiled,
        attend_first_rows_compiled,
        attend_chunk_compiled,
        attend_after_prefix_compiled,
        Arrangement(False, False, row_multiple=1),
        knows_float32=True,
    )
