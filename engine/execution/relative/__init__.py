"""Encoders with relative positions, run packed. transformers makes a matrix of all pairs of a step's tokens
for them; here each sequence has its own positions, through the step's attention.

What an encoder computes besides attention is its own modules' work.
"""

from maxsimd.engine.execution.relative.install import has_relative_positions, install

__all__ = ["has_relative_positions", "install"]
