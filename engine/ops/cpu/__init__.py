"""Compiled kernels for CPUs with AVX-512: MaxSim, linear layers and attention, as C++ in `src/`.

Each module here wraps one of them for torch tensors. They are optional: `is_available` says whether they were
built and this processor can run them, and every caller has an alternative."""

from maxsimd.engine.ops.cpu.library import is_available

__all__ = ["is_available"]
