"""Compiled kernels for CPUs with AVX-512, from C++ in `src/`; the modules wrap them for torch tensors.

They are optional: `is_available` says whether they were built and run here, and every caller has a
fallback."""

from maxsimd.engine.ops.cpu.library import is_available

__all__ = ["is_available"]
