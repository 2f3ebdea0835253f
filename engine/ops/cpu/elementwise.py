"""Norms of rows, and rotary positions of queries and keys, compiled: float32, or bfloat16 with float32 sums.

A row's result is the same to the last bit whatever other rows are in the call, and however many threads there
are.
"""

import torch

from maxsimd.engine.ops.cpu.library import BFLOAT16, FLOAT32, kernels

_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer norm of `x` [rows, width], or of its sum with the residual, which stays float32. Weight and
    bias are float32 [width]."""
    return _norm(x, residual, weight, bias, epsilon, is_centered=True)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm of `x` [rows, width]. The weight is float32 [width]."""
    return _norm(x, None, weight, None, epsilon, is_centered=False)


def norm_rotary_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int],
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> None:
    """Norms and turns in place the queries and keys in `qkv` [rows, all heads, head_dim], of which the first
    `heads[0]` are queries and the next `heads[1]` keys. `cos` and `sin` are [rows, head_dim], in the
    precision of `qkv`. The norms are float32 weights [head_dim] for queries and for keys, and epsilon."""
    rows, _, head_dim = qkv.shape
    if qkv.stride(2) != 1 or qkv.stride(1) != head_dim or head_dim % 2 or sum(heads) > qkv.shape[1]:
        raise ValueError("heads must lie side by side and have an even size")
    if cos.shape != (rows, head_dim) or sin.shape != cos.shape:
        raise ValueError(f"cosines and sines must be {(rows, head_dim)}, not {tuple(cos.shape)}")
    cos, sin = cos.to(qkv.dtype).contiguous(), sin.to(qkv.dtype).contiguous()
    query, key, epsilon = (None, None, 0.0) if norms is None else norms
    _check_weights(head_dim, query, key)
    kernels().maxsimd_norm_rotary(
        _KINDS[qkv.dtype],
        qkv.data_ptr(),
        qkv.stride(0),
        rows,
        *heads,
        head_dim,
        cos.data_ptr(),
        sin.data_ptr(),
        _address(query),
        _address(key),
        epsilon,
    )


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    *,
    is_centered: bool,
) -> torch.Tensor:
    rows, width = x.shape
    _check_weights(width, weight, bias)
    x = x if x.stride(1) == 1 else x.contiguous()
    if residual is not None and (residual.shape != x.shape or residual.dtype is not x.dtype):
        raise ValueError(f"a residual of {tuple(residual.shape)} does not fit rows of {tuple(x.shape)}")
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    out = x.new_empty(x.shape)
    kernels().maxsimd_norm(
        _KINDS[x.dtype],
        x.data_ptr(),
        x.stride(0),
        _address(residual),
        0 if residual is None else residual.stride(0),
        rows,
        width,
        weight.data_ptr(),
        _address(bias),
        epsilon,
        is_centered,
        out.data_ptr(),
    )
    return out


def _check_weights(count: int, *weights: torch.Tensor | None) -> None:
    for each in weights:
        if each is not None and (
            each.dtype is not torch.float32 or each.shape != (count,) or not each.is_contiguous()
        ):
            raise ValueError(f"weights of a norm must be {count} float32 numbers")


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
