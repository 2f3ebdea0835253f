"""Packed execution: a step as one forward pass over [1, T] tokens, without padding.

Sequences stand end to end, and each attends to itself through a registered attention function. An attention
backend may want rows in another order: only the `PoolingCursor` knows which rows belong to which chunk."""

from maxsimd.engine.execution.devices import choose_device, choose_dtype
from maxsimd.engine.execution.runner import ModelRunner

__all__ = ["ModelRunner", "choose_device", "choose_dtype"]
