"""Triton kernels for GPUs: MaxSim, attention, projection with normalization, and the work between products.

Modules hold kernels, their tiles by the limits of a device, and the functions that launch them on torch
tensors. On a CPU Triton interprets them for tests (TRITON_INTERPRET=1). Triton is optional: CUDA builds of
torch bring it, and so does the extra `cuda`. `runs_on` says whether the kernels run on a device."""

from maxsimd.engine.ops.triton.launch import MISSING, is_missing_on, runs_on

__all__ = ["MISSING", "is_missing_on", "runs_on"]
