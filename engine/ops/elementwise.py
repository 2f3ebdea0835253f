"""Norms, residual sums, rotary positions and gates: the work between the products of a layer.

Each function runs a Triton kernel on a GPU (or interpreted), and a compiled kernel on a CPU. Its reference in
plain torch has the same roundings: everything is computed in float32 and rounded once. A sum that is returned
is rounded first, as in transformers.

Sources: layer norm, Ba, Kiros & Hinton 2016 (arXiv 1607.06450), equations 3 and 4; RMSNorm, Zhang & Sennrich
2019 (arXiv 1910.07467), equation 4; rotary positions, Su et al. 2021 (arXiv 2104.09864), equation 34, with
halves in place of neighbors as in transformers; the norm of heads, Qwen3 (arXiv 2505.09388), section 2;
gates, Shazeer 2020 (arXiv 2002.05202), equations 5 and 6."""

from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F

from maxsimd.engine.ops import triton
from maxsimd.engine.ops.cpu import elementwise as cpu

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

# A Triton program holds a row, or a head, in its registers: 16 warps hold 16 numbers a thread and tensor
# without spills.
LARGEST_WIDTH, LARGEST_HEAD = 8192, 256


class HeadNorms(NamedTuple):
    """The RMSNorm of each head of queries and of keys: weights [head_dim]."""

    query: torch.Tensor
    key: torch.Tensor
    epsilon: float


def is_rotary_supported(head_dim: int) -> bool:
    """Whether the kernels take heads of this size."""
    return head_dim % 2 == 0 and head_dim <= LARGEST_HEAD


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    residual: torch.Tensor | None = None,
    *,
    is_centered: bool,
) -> torch.Tensor:
    """The norm of `x`, or of `x + residual` in float32: LayerNorm if it `is_centered`, else RMSNorm. The
    result is [rows, width], contiguous, in the dtype of `x`.

    The inputs may have any row stride; `weight` and `bias` are [width]."""
    if not triton.runs_on(x.device):
        return cpu.norm(x, weight, bias, epsilon, residual, is_centered=is_centered)
    from maxsimd.engine.ops.triton import elementwise as kernels

    out = x.new_empty(x.shape)
    kernels.norm(x, residual, weight, bias, epsilon, None, out, is_centered=is_centered)
    return out


def sum_and_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    *,
    is_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x + residual` and its norm, [rows, width] each, contiguous."""
    if not triton.runs_on(x.device):
        total = x + residual
        return total, cpu.norm(total, weight, bias, epsilon, is_centered=is_centered)
    from maxsimd.engine.ops.triton import elementwise as kernels

    total, out = x.new_empty(x.shape), x.new_empty(x.shape)
    kernels.norm(x, residual, weight, bias, epsilon, total, out, is_centered=is_centered)
    return total, out


def norm_rotary_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int],
    norms: HeadNorms | None,
) -> None:
    """Norms and rotates in place the queries and keys in `qkv` [rows, all heads, head_dim]: the first
    `heads[0]` heads are queries, the next `heads[1]` keys. `cos` and `sin` are [rows, head_dim]."""
    if not triton.runs_on(qkv.device):
        cpu.norm_rotary_(qkv, cos, sin, heads, norms)
        return
    from maxsimd.engine.ops.triton import elementwise as kernels

    kernels.norm_rotary_(qkv, cos, sin, heads, norms)


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`activation(gate) * up` [rows, width], for [rows, 2 width] with the gate first. On a CPU this is plain
    torch; compiled layers have it in the product."""
    if not triton.runs_on(gate_up.device):
        return gated_reference(gate_up, activation)
    from maxsimd.engine.ops.triton import elementwise as kernels

    return kernels.gated(gate_up, activation)


def norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    residual: torch.Tensor | None = None,
    *,
    is_centered: bool,
) -> torch.Tensor:
    total, shape = x.float() if residual is None else x.float() + residual.float(), x.shape[-1:]
    if not is_centered:
        return F.rms_norm(total, shape, weight.float(), epsilon).to(x.dtype)
    wide_bias = None if bias is None else bias.float()
    return F.layer_norm(total, shape, weight.float(), wide_bias, epsilon).to(x.dtype)


def gated_reference(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (activated_reference(gate, activation) * up).to(gate_up.dtype)


def activated_reference(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
