"""Layers of a packed model in few launches, found by structure and tried before they are used: on a GPU
modules that take the positions of those that transformers builds, on a CPU a table of all layers for small
steps."""

from maxsimd.engine.execution.fused_layers.replace import Fused, fuse

__all__ = ["Fused", "fuse"]
