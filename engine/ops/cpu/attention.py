"""Attention within each sequence of packed rows, compiled: float32, or bfloat16 with float32 sums.

What comes out for a query is the same to the last bit whatever other sequences and queries there are, however
many of its keys stand in a prefix, and however many threads there are.
"""

from collections.abc import Sequence

import torch

from maxsimd.engine.ops.cpu.library import BFLOAT16, FLOAT32, kernels

_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
_DIMS = 16  # of a head are computed together


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
    """softmax(q k^T * scale) v for q [heads, rows, head_dim] and k, v [key_heads, rows, head_dim] of one
    precision, where the heads of v may have another size.

    `sequences`, int64 [n, 4], holds of each its first row, how many queries to compute from there, how many
    keys of its own they may see, and the index of the prefix whose keys and values [key_heads, length,
    head_dim] stand before these, or -1. A causal query sees the keys up to its own; with a window, only those
    less than so many positions away. Writes these queries' rows of `out` [rows, heads, head_dim], zero where
    no key is seen."""
    if {tensor.dtype for tensor in (k, v, out, *(part for pair in prefixes for part in pair))} != {q.dtype}:
        raise TypeError(f"queries are {q.dtype}, and keys, values and output must be too")
    largest = max(q.shape[-1], v.shape[-1])
    dims = largest + -largest % _DIMS
    wide = _widened(out, dims)
    _attention(
        _widened(q, dims),
        _widened(k, dims),
        _widened(v, dims),
        sequences,
        [(_widened(keys, dims), _widened(values, dims)) for keys, values in prefixes],
        scale,
        causal,
        window,
        wide,
    )
    if wide is not out:
        out.copy_(wide[..., : out.shape[-1]])


def _attention(
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
    """As above for heads of one size, a multiple of 16."""
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
        _KINDS[q.dtype],
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


def _widened(x: torch.Tensor, dims: int) -> torch.Tensor:
    """x with its last dimension filled up with zeros, which change no product; x itself where it is full."""
    missing = dims - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _readable(x: torch.Tensor) -> torch.Tensor:
    """Dimensions are read in one piece, those of bfloat16 in pairs."""
    even = x.dtype is torch.float32 or x.stride(1) % 2 == 0
    return x if x.stride(2) == 1 and even else x.contiguous()
