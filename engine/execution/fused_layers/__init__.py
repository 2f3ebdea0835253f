"""Layers of a packed model in few launches, found by structure and tried before they are used: on a GPU
modules that take the positions of those that transformers builds, on a CPU layers with rotary
positions, and a table of all layers built as BERT's."""

from maxsimd.engine.execution.fused_layers.replace import Fused, fuse

__all__ = ["Fused", "fuse"]
