"""What all launches need to know of a device: whether it runs Triton kernels, and its generation and size."""

import functools
import importlib.util
import os

import torch

# Triton reads this variable when a kernel is defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def runs_on(device: torch.device) -> bool:
    """Whether Triton is installed and runs on a device: on CUDA always, on a CPU only as an interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device.type == "cuda" or INTERPRETED


@functools.cache
def generation(device: torch.device) -> int:
    """The major number of a GPU's compute capability; 0 for other devices."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of a GPU's multiprocessors; 1 for other devices."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`, and at least 16, the smallest side of a product's
    tile."""
    return max(16, 1 << (n - 1).bit_length())
