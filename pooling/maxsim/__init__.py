"""MaxSim over packed ragged embeddings, in several backends with one signature.

`reference` says what is right; the others must agree with it.
"""

from collections.abc import Callable, Sequence

import torch

from maxsimd.kernels import gpu
from maxsimd.pooling.maxsim import compiled
from maxsimd.pooling.maxsim.compiled import maxsim_compiled
from maxsimd.pooling.maxsim.cpu import maxsim_cpu
from maxsimd.pooling.maxsim.reference import maxsim_reference
from maxsimd.pooling.ragged import Ragged

# (queries, documents, pairs of (query index, document index)) -> float32 scores [pairs]
MaxSim = Callable[[Ragged, Ragged, Sequence[tuple[int, int]]], torch.Tensor]

__all__ = ["MaxSim", "choose_maxsim", "maxsim_compiled", "maxsim_cpu", "maxsim_reference"]


def choose_maxsim(name: str, device: torch.device, compiled_allowed: bool = True) -> tuple[str, MaxSim]:
    """The backend for a name (auto, torch, cpu, compiled, triton), and the name it goes by.

    `auto` is Triton on a CUDA device that has it, elsewhere the compiled kernel where it is allowed and runs,
    else the CPU backend, which is plain torch and runs on any device. Raises ValueError where the named
    backend cannot run on the device.
    """
    if name == "torch":
        return "torch", maxsim_reference
    if compiled.runs_on(device) and (name == "compiled" or (name == "auto" and compiled_allowed)):
        return "compiled", maxsim_compiled
    if name == "cpu" or (name == "auto" and device.type != "cuda"):
        return "cpu", maxsim_cpu
    if name != "compiled" and gpu.runs_on(device):
        from maxsimd.pooling.maxsim.triton import maxsim_triton

        return "triton", maxsim_triton
    if name == "auto":
        return "cpu", maxsim_cpu
    raise ValueError(
        f"the MaxSim backend {name!r} cannot run on this {device.type}; use --maxsim auto, torch or cpu"
    )
