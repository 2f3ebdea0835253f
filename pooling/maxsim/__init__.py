"""MaxSim over packed ragged embeddings, in several backends with one signature.

`reference` says what is right; the others must agree with it.
"""

from collections.abc import Callable, Sequence

import torch

from maxsimd.pooling.maxsim.cpu import maxsim_cpu
from maxsimd.pooling.maxsim.reference import maxsim_reference
from maxsimd.pooling.ragged import Ragged

# (queries, documents, pairs of (query index, document index)) -> float32 scores [pairs]
MaxSim = Callable[[Ragged, Ragged, Sequence[tuple[int, int]]], torch.Tensor]

__all__ = ["MaxSim", "choose_maxsim", "maxsim_cpu", "maxsim_reference"]


def choose_maxsim(name: str, device: torch.device) -> tuple[str, MaxSim]:
    """The backend for a name (auto, torch, cpu, triton), and the name it goes by.

    `auto` is Triton on a CUDA device that has it and the CPU backend elsewhere, which is plain torch and
    runs on any device. Raises ValueError where the named backend cannot run on the device.
    """
    if name == "torch":
        return "torch", maxsim_reference
    if name == "cpu" or (name == "auto" and device.type != "cuda"):
        return "cpu", maxsim_cpu
    try:
        from maxsimd.pooling.maxsim.triton_kernel import maxsim_triton, runs_on
    except ImportError:
        usable = False
    else:
        usable = runs_on(device)
    if usable:
        return "triton", maxsim_triton
    if name == "auto":
        return "cpu", maxsim_cpu
    raise ValueError(
        f"the MaxSim backend 'triton' cannot run on {device.type}; use --maxsim auto, torch or cpu"
    )
