"""Norms and rotary positions, compiled: float32, or bfloat16 with float32 sums. A row's bits do not depend on
other rows in the call or on the number of threads."""

import torch

from maxsimd.engine.ops.cpu.library import (
    KINDS,
    address,
    check_float32,
    kernels,
    strided,
    with_close_columns,
)


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    residual: torch.Tensor | None = None,
    *,
    is_centered: bool,
) -> torch.Tensor:
    """The norm of `x` [rows, width], or of its float32 sum with the residual: LayerNorm if it `is_centered`,
    else RMSNorm. Weight and bias are float32 [width]."""
    rows, width = x.shape
    check_float32(width, weight, bias)
    if residual is not None and (residual.shape != x.shape or residual.dtype is not x.dtype):
        raise ValueError(f"a residual of {tuple(residual.shape)} does not fit rows of {tuple(x.shape)}")
    x, residual = with_close_columns(x), None if residual is None else with_close_columns(residual)
    out = x.new_empty(x.shape)
    kernels().maxsimd_norm(
        KINDS[x.dtype],
        *strided(x),
        *strided(residual),
        rows,
        width,
        weight.data_ptr(),
        address(bias),
        epsilon,
        is_centered,
        out.data_ptr(),
    )
    return out


def norm_rotary_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int],
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> None:
    """See `ops/elementwise.py`. The norms are float32 weights [head_dim] of queries and of keys, and their
    epsilon."""
    rows, _, head_dim = qkv.shape
    if qkv.stride(2) != 1 or qkv.stride(1) != head_dim or head_dim % 2 or sum(heads) > qkv.shape[1]:
        raise ValueError("heads must lie side by side and have an even size")
    if cos.shape != (rows, head_dim) or sin.shape != cos.shape:
        raise ValueError(f"cosines and sines must be {(rows, head_dim)}, not {tuple(cos.shape)}")
    cos, sin = cos.to(qkv.dtype).contiguous(), sin.to(qkv.dtype).contiguous()
    query, key, epsilon = (None, None, 0.0) if norms is None else norms
    check_float32(head_dim, query, key)
    kernels().maxsimd_norm_rotary(
        KINDS[qkv.dtype],
        *strided(qkv),
        rows,
        *heads,
        head_dim,
        cos.data_ptr(),
        sin.data_ptr(),
        address(query),
        address(key),
        epsilon,
    )
