"""Layers of a packed model on a GPU in few launches: modules that take the positions of those that
transformers builds, found by structure and tried before they are used."""

from maxsimd.engine.execution.fused_layers.replace import fuse

__all__ = ["fuse"]
