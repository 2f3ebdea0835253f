"""Packed execution: a step as one forward pass over [1, T] tokens, without padding.

Sequences stand end to end and attend within themselves through a registered attention function. Where a
backend lays rows out otherwise than in step order, the `PoolingCursor` says so and no one else knows.
"""

from maxsimd.engine.packed.prepare import PreparedModel, choose_device, choose_dtype, prepare
from maxsimd.engine.packed.runner import ModelRunner

__all__ = ["ModelRunner", "PreparedModel", "choose_device", "choose_dtype", "prepare"]
