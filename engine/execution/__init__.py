"""Packed execution: a step as one forward pass over [1, T] tokens, without padding.

Sequences stand end to end and attend within themselves through a registered attention function. Where an
attention backend wants rows in another order, the `PoolingCursor` says which row is whose, and nothing else
needs to know."""

from maxsimd.engine.execution.devices import choose_device, choose_dtype
from maxsimd.engine.execution.runner import ModelRunner

__all__ = ["ModelRunner", "choose_device", "choose_dtype"]
