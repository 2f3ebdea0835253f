"""Packed execution: a step as one forward pass over [1, T] tokens, without padding.

Sequences stand end to end and attend within themselves through a registered attention function. Where a
backend lays rows out otherwise than in step order, the `PoolingCursor` says so and no one else knows.
"""

from maxsimd.engine.execution.packed_runner import ModelRunner
from maxsimd.engine.execution.prepare import PreparedModel, choose_device, choose_dtype, prepare

__all__ = ["ModelRunner", "PreparedModel", "choose_device", "choose_dtype", "prepare"]
