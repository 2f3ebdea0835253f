"""What all launches have in common: where they can run, and which generation of hardware it is."""

import functools
import importlib.util
import os

import torch

# Read by Triton when a kernel is defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def runs_on(device: torch.device) -> bool:
    """Whether Triton is there and can run on a device: CUDA always, a CPU only where it interprets."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device.type == "cuda" or INTERPRETED


@functools.cache
def generation(device: torch.device) -> int:
    """The major number of a GPU's compute capability; 0 for what is none."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs a GPU works on at the same time, at the least; 1 for what is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is not below `n`, and no less than the 16 that a product's sides
    need."""
    return max(16, 1 << (n - 1).bit_length())
