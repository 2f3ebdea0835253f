"""Triton kernels for GPUs: MaxSim, attention, projection with normalisation, and what layers are fused of.

Each module holds one kernel, its tiles by what a device offers, and the function that launches it on torch
tensors; attention, the largest, is spread over three. They also run on a CPU when Triton interprets them
(TRITON_INTERPRET=1), which is how they are tested without a GPU. Triton is optional: CUDA builds of torch
bring it, and so does the extra `cuda`. `runs_on` says whether the kernels can run on a device."""

from maxsimd.engine.ops.triton.launch import MISSING, is_missing_on, runs_on

__all__ = ["MISSING", "is_missing_on", "runs_on"]
