"""Tests of bfloat16 for every family run where the processor multiplies it. Elsewhere it is emulated, slowly,
and one checkpoint of each kind is tried in `tests/parity/test_execution.py`."""

import pytest

from maxsimd.engine.ops.cpu.instruction_sets import multiplies_bfloat16

needs_native_bfloat16 = pytest.mark.skipif(
    not multiplies_bfloat16(), reason="this processor emulates bfloat16"
)
