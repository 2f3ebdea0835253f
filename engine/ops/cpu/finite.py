"""Finds NaN and infinite numbers in many arrays at once, compiled."""

from collections.abc import Sequence

import numpy as np
import torch

from maxsimd.engine.ops.cpu.library import kernels

# The bits of a number's exponent, all of which are set where it is not finite. Numbers of 16 bits have theirs
# twice in 32.
_EXPONENTS = {torch.float32: 0x7F80_0000, torch.bfloat16: 0x7F80_7F80, torch.float16: 0x7C00_7C00}


def first_not_finite(arrays: Sequence[torch.Tensor]) -> int | None:
    """Which of the arrays is the first with a number that is NaN or infinite; None if none is. They are
    contiguous, on the CPU, in float32, bfloat16 or float16."""
    of_each = np.array(
        [
            [array.data_ptr() for array in arrays],
            [array.nbytes for array in arrays],
            [_EXPONENTS[array.dtype] for array in arrays],
            [array.itemsize for array in arrays],
        ],
        dtype=np.int64,
    )
    found = kernels().maxsimd_first_not_finite(*(each.ctypes.data for each in of_each), len(arrays))
    return None if found < 0 else int(found)
