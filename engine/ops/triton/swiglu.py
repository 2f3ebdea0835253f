"""SwiGLU's elementwise part as a Triton kernel: `silu(gate) * up` of one product that made both.

Bytes a row of `width` numbers of either half in 16 bits: 4 `width` read and 2 `width` written; apart, SiLU
and the product read 6 and write 4. Source of the formula: Shazeer 2020 (arXiv 2002.05202), equation 6.

Order of roundings: SiLU and the product are float32, and the result is rounded once. transformers rounds
after SiLU too.
"""

import torch
import triton
import triton.language as tl

# Numbers of a row that a program of four warps computes: 8 a thread, which are one load of 16 bytes.
BLOCK = 1024
WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def swiglu_kernel(  # type: ignore[no-untyped-def]
    gate_up,  # [rows, 2 * width]
    out,  # [rows, width], contiguous
    width,
    gate_up_row,
    BLOCK: tl.constexpr,
):
    """Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = gate_up + row * gate_up_row + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    activated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + columns, activated.to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` [rows, width], for [rows, 2 width] with the gate first."""
    rows, both = gate_up.shape
    width = both // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        swiglu_kernel[grid](gate_up, out, width, gate_up.stride(0), BLOCK=BLOCK, num_warps=WARPS)
    return out


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The same by plain torch, with the same roundings."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
