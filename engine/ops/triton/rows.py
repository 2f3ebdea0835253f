"""How kernels that read and write each row once spread a row over a program: the whole row in registers, 16
bytes a load and thread in 16 bits.
"""

from dataclasses import dataclass

from maxsimd.engine.ops.triton.launch import next_power_of_two

# What a warp of 32 threads loads at a time: 8 numbers of 16 bits a thread.
_OF_A_WARP = 256
_MOST_WARPS = 16


@dataclass(frozen=True, slots=True)
class RowTile:
    """The numbers that a program holds of a row, a power of two, and its warps."""

    numbers: int
    warps: int


def row_tile(width: int) -> RowTile:
    """The tile for rows of `width` numbers, at most `LARGEST_WIDTH`."""
    numbers = next_power_of_two(width)
    return RowTile(numbers, min(_MOST_WARPS, max(1, numbers // _OF_A_WARP)))
