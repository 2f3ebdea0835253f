"""The elementwise part of gated feed-forward layers as a Triton kernel: `activation(gate) * up` of one
product that made both. With SiLU it is SwiGLU, with GELU GeGLU.

Bytes a row of `width` numbers of either half in 16 bits: 4 `width` read and 2 `width` written; apart, the
activation and the product read 6 and write 4. Source of the formulas: Shazeer 2020 (arXiv 2002.05202),
equations 5 and 6.

Order of roundings: activation and product are float32, and the result is rounded once. transformers rounds
after the activation too.
"""

import torch
import triton
import triton.language as tl

from maxsimd.engine.ops.elementwise import Activation

# Numbers of a row that a program may compute, and those of each of its warps: 8 a thread, a load of 16 bytes.
_BLOCKS = (1024, 512, 256)
NUMBERS_OF_A_WARP = 256

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_TWO_SQRT_TWO_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit  # type: ignore[untyped-decorator]
def gated_kernel(  # type: ignore[no-untyped-def]
    gate_up,  # [rows, 2 * width]
    out,  # [rows, width], contiguous
    width,
    gate_up_row,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = gate_up + row * gate_up_row + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        activated = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        activated = 0.5 * gate * (1.0 + tl.erf(gate * _SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the logistic function of 2 u.
        twice = _TWO_SQRT_TWO_OVER_PI * (gate + 0.044715 * gate * gate * gate)
        activated = gate / (1.0 + tl.exp(-twice))
    else:
        tl.static_assert(ACTIVATION == "relu")
        activated = tl.where(gate < 0.0, 0.0, gate)  # NaN stays
    tl.store(out + row * width + columns, (activated * up).to(out.dtype.element_ty), mask=inside)


def block_for(width: int) -> int:
    """The largest block that leaves few columns of its programs idle."""
    fitting = (block for block in _BLOCKS if triton.cdiv(width, block) * block * 8 <= width * 9)
    return next(fitting, _BLOCKS[-1])


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`activation(gate) * up` [rows, width], for [rows, 2 width] with the gate first."""
    rows, both = gate_up.shape
    width = both // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        block = block_for(width)
        gated_kernel[(rows, triton.cdiv(width, block))](
            gate_up,
            out,
            width,
            gate_up.stride(0),
            ACTIVATION=activation,
            BLOCK=block,
            num_warps=block // NUMBERS_OF_A_WARP,
        )
    return out
