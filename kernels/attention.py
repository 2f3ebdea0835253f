"""Attention within each sequence of packed rows, compiled: bfloat16, with float32 sums."""

from collections.abc import Sequence

import torch

from maxsimd.kernels.library import kernels


def is_supported(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether heads of this precision and size can be attended to."""
    head_dim = q.shape[-1]
    return q.dtype is torch.bfloat16 and head_dim == v.shape[-1] and head_dim % 16 == 0


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: torch.Tensor,
    prefixes: Sequence[tuple[torch.Tensor, torch.Tensor]],
    scale: float,
    causal: bool,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """softmax(q k^T * scale) v for bfloat16 q [heads, rows, head_dim] and k, v [key_heads, rows, head_dim].

    `sequences`, int64 [n, 4], holds of each its first row, how many queries to compute from there, how many
    keys of its own they may see, and the index of the prefix whose keys and values [key_heads, length,
    head_dim] stand before these, or -1. A causal query sees the keys up to its own; with a window, only those
    less than so many positions away. Writes these queries' rows of `out` [rows, heads, head_dim], zero where
    no key is seen."""
    q, k, v = map(_readable, (q, k, v))
    strides = torch.tensor([stride for x in (q, k, v) for stride in x.stride()[:2]])
    pairs = [(_readable(keys), _readable(values)) for keys, values in prefixes]  # kept alive by this name
    table = torch.tensor(
        [
            (*(x.data_ptr() for x in pair), *(n for x in pair for n in x.stride()[:2]), pair[0].shape[1])
            for pair in pairs
        ],
        dtype=torch.int64,
    )
    kernels().maxsimd_attention(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        strides.data_ptr(),
        q.shape[0],
        k.shape[0],
        q.shape[2],
        sequences.data_ptr(),
        len(sequences),
        table.data_ptr(),
        len(pairs),
        causal,
        window or 0,
        scale,
        out.data_ptr(),
    )


def _readable(x: torch.Tensor) -> torch.Tensor:
    """Dimensions are read in pairs, one behind the other."""
    return x if x.stride(2) == 1 and x.stride(1) % 2 == 0 else x.contiguous()
