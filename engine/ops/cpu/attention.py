"""Attention within each sequence of packed rows, compiled: float32, or bfloat16 with float32 sums. A query's
bits do not depend on others in the call, on how many of its keys come from a prefix, or on the number of
threads."""

from collections.abc import Sequence

import torch

from maxsimd.engine.ops.cpu.library import KINDS, address, kernels
from maxsimd.engine.ops.qkv import KV, QKV, PositionBias

_DIMS = 16  # the kernel takes head sizes that are multiples of this


def attention(
    qkv: QKV, sequences: torch.Tensor, prefixes: Sequence[KV], causal: bool, out: torch.Tensor
) -> None:
    """softmax(query key^T * scaling) value, for queries, keys and values of one precision.

    `sequences`, int64 [n, 4], has for each sequence its first row, the queries from there, their visible
    keys, and the index in `prefixes` of the keys and values before its own, or -1. A causal query sees the
    keys up to its own. Writes these rows of `out` [rows, heads, head_dim of the values]; a row without keys
    is zero. Raises ValueError for a sequence beyond the reach of relative positions, and for a prefix beside
    them."""
    tensors = (qkv.key, qkv.value, out, *(tensor for prefix in prefixes for tensor in prefix))
    if {tensor.dtype for tensor in tensors} != {qkv.query.dtype}:
        raise TypeError(f"queries are {qkv.query.dtype}, and keys, values and output must be too")
    largest = max(qkv.query.shape[-1], qkv.value.shape[-1])
    dims = largest + -largest % _DIMS
    q, k, v = (_readable(_padded(x, dims)) for x in (qkv.query, qkv.key, qkv.value))
    padded_out = _padded(out, dims)
    strides = torch.tensor([stride for x in (q, k, v) for stride in x.stride()[:2]])
    # The padded prefixes must outlive the call, which gets their addresses.
    pairs = [(_readable(_padded(keys, dims)), _readable(_padded(values, dims))) for keys, values in prefixes]
    table = torch.tensor(
        [
            (*(x.data_ptr() for x in pair), *(n for x in pair for n in x.stride()[:2]), pair[0].shape[1])
            for pair in pairs
        ],
        dtype=torch.int64,
    )
    positions, held = _positions(qkv, sequences, len(pairs))  # noqa: RUF059 (held outlives the call)
    kernels().maxsimd_attention(
        KINDS[q.dtype],
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
        address(positions),
        causal,
        qkv.window or 0,
        qkv.scaling,
        padded_out.data_ptr(),
    )
    if padded_out is not out:
        out.copy_(padded_out[..., : out.shape[-1]])


def _positions(
    qkv: QKV, sequences: torch.Tensor, prefixes: int
) -> tuple[torch.Tensor | None, tuple[torch.Tensor, ...]]:
    """The addresses and sizes of the tables of relative positions, if any, and the tables."""
    relative = qkv.relative
    if relative is None:
        return None, ()
    if prefixes:
        raise ValueError("a prefix has no relative positions here")
    if len(sequences) and int(sequences[:, 1:3].max()) > relative.reach + 1:
        raise ValueError(f"a sequence is longer than its relative positions reach, {relative.reach}")
    if isinstance(relative, PositionBias):
        tables: tuple[torch.Tensor, ...] = (relative.divided(qkv.scaling),)
        addresses = [tables[0].data_ptr(), 0, 0]
    else:
        tables = relative.units
        addresses = [0, *(table.data_ptr() for table in tables)]
    return torch.tensor([*addresses, relative.reach, tables[0].shape[-1]]), tables


def _padded(x: torch.Tensor, dims: int) -> torch.Tensor:
    """x with its last dimension padded to `dims` with zeros; x itself if it has that size."""
    missing = dims - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _readable(x: torch.Tensor) -> torch.Tensor:
    """x for the kernel: contiguous rows, which start at an even element in bfloat16."""
    even = x.dtype is torch.float32 or x.stride(1) % 2 == 0
    return x if x.stride(2) == 1 and even else x.contiguous()
