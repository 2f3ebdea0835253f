"""The matrix product of two tiles, for all kernels."""

import triton
import triton.language as tl

from maxsimd.engine.ops.triton.launch import INTERPRETED

# The interpreter multiplies bfloat16 numbers as if they were 16-bit integers.
_WIDEN = tl.constexpr(INTERPRETED)


@triton.jit
def add_product(total, a, b):  # type: ignore[no-untyped-def]
    """`total + a @ b`, with float32 sums [m, n] of products of [m, k] and [k, n] in their own precision,
    float32 included."""
    if _WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")
