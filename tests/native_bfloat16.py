"""Every family is tried in bfloat16 where the processor multiplies it: emulation is slow."""

import pytest

from maxsimd.engine.ops.cpu.library import multiplies_bfloat16

needs_native_bfloat16 = pytest.mark.skipif(not multiplies_bfloat16(), reason="bfloat16 is emulated here")
