"""Triton kernels for GPUs: MaxSim, attention, and projection with normalisation.

Each module holds one kernel, its tiles by architecture, and the function that launches it on torch tensors.
They run on a CPU too when Triton interprets them (TRITON_INTERPRET=1), which is how they are tested where
there is no GPU. Triton is optional: `runs_on` says whether a kernel can run on a device.
"""

from maxsimd.engine.ops.triton.launch import runs_on

__all__ = ["runs_on"]
