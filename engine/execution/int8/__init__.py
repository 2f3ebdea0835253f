"""Linear layers with weights in int8 for CPUs without AVX-512 BF16, which the other kernels need.

Rows are rounded to bytes, each with a scale of its own, and multiplied by whichever of several ways is right
and fastest on this processor.
"""

from maxsimd.engine.execution.int8.choose import choose_path
from maxsimd.engine.execution.int8.layers import round_layers

__all__ = ["choose_path", "round_layers"]
