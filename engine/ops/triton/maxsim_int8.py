"""Four int8 numbers of a 32-bit word to numbers of 16 bits, exactly, without going through float32.

A row of words becomes all their first bytes, then all second ones, and so on: no number leaves its thread.
"""

import triton
import triton.language as tl

from maxsimd.engine.ops.triton.launch import INTERPRETED

_PLAIN = tl.constexpr(INTERPRETED)


def _for_each_byte(instructions: str, constants: str) -> tl.constexpr:
    """Assembly that takes two words and returns four registers; the i-th holds byte i of both words."""
    # Of bytes 0 to 3 of the first word and 4 to 7 of the second: byte i of both, each in the lower half of 16
    # bits.
    selectors = ("0x4400", "0x5511", "0x6622", "0x7733")
    each = [instructions.format(selector=selector, out=f"${i}") for i, selector in enumerate(selectors)]
    return tl.constexpr("{ .reg .b32 a, s, t, c;" + constants + "".join(each) + "}")


# A bfloat16 0x4300 is 128 and has 7 bits of mantissa, each worth 1: with the lower 7 bits of a number in them
# it is 128 + these. With the sign in the lowest bit of its exponent it is 128, or 256 for a negative number.
# The difference is the number: without sign 0 to 127, with one 0 to 127 less 128.
_TO_BFLOAT16 = _for_each_byte(
    "prmt.b32 a, $4, $5, {selector};"
    "lop3.b32 s, a, 0x007f007f, 0x43004300, 0xea;"  # (a & b) | c
    "lop3.b32 t, a, 0x00800080, 0x43004300, 0xea;"
    "fma.rn.bf16x2 {out}, t, c, s;",
    "mov.b32 c, 0xbf80bf80;",  # -1, twice
)
# A float16 0x6400 is 1024 and has 10 bits of mantissa, each worth 1. With the sign's bit inverted, a number
# is 128 more than it was, and 0 to 255: 1152 is taken off.
_TO_FLOAT16 = _for_each_byte(
    "prmt.b32 a, $4, $5, {selector};"
    "lop3.b32 s, a, 0x00ff00ff, 0x64806480, 0x6a;"  # (a & b) ^ c
    "sub.f16x2 {out}, s, c;",
    "mov.b32 c, 0x64806480;",
)
_CONSTRAINTS = tl.constexpr("=r,=r,=r,=r,r,r")


@triton.jit  # type: ignore[untyped-decorator]
def unpack_words(words, dtype: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The int8 numbers of 32-bit words [ROWS, COLUMNS / 4], as `dtype` [ROWS, COLUMNS]: the lowest byte of
    every word of a row, then the second bytes, and so on."""
    if _PLAIN or dtype == tl.float32:
        b0 = ((words << 24) >> 24).to(tl.float32).to(dtype)
        b1 = ((words << 16) >> 24).to(tl.float32).to(dtype)
        b2 = ((words << 8) >> 24).to(tl.float32).to(dtype)
        b3 = (words >> 24).to(tl.float32).to(dtype)
    elif dtype == tl.bfloat16:
        b0, b1, b2, b3 = tl.inline_asm_elementwise(
            _TO_BFLOAT16,
            _CONSTRAINTS,
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        b0, b1, b2, b3 = tl.inline_asm_elementwise(
            _TO_FLOAT16,
            _CONSTRAINTS,
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    low, high = _side_by_side(b0, b1, ROWS, COLUMNS // 2), _side_by_side(b2, b3, ROWS, COLUMNS // 2)
    return _side_by_side(low, high, ROWS, COLUMNS)


@triton.jit  # type: ignore[untyped-decorator]
def _side_by_side(a, b, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two tensors of half the columns as one [ROWS, COLUMNS]."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (ROWS, COLUMNS))


@triton.jit  # type: ignore[untyped-decorator]
def grouped_by_byte(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The columns of x [ROWS, COLUMNS] in the order of `unpack_words`: 0, 4, 8, ..., then 1, 5, 9, ..."""
    return tl.reshape(tl.permute(tl.reshape(x, (ROWS, COLUMNS // 4, 4)), (0, 2, 1)), (ROWS, COLUMNS))
