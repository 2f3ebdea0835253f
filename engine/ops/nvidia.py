"""Which devices run our Triton kernels and CUDA's own libraries."""

import torch


def is_nvidia(device: torch.device) -> bool:
    """Whether a device is an NVIDIA GPU: torch's builds for ROCm call AMD's GPUs cuda too."""
    return device.type == "cuda" and torch.version.hip is None


def runs_plain_torch(device: torch.device) -> bool:
    """Whether a device is an accelerator for which we have no kernels: plain torch runs on it, and what it
    computes is compared with the CPU at load."""
    return device.type != "cpu" and not is_nvidia(device)
