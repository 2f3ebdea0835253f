"""What all launches need to know of a device: whether it runs Triton kernels, and its limits."""

import functools
import importlib.util
import os
from dataclasses import dataclass

import torch

from maxsimd.engine.ops.nvidia import is_nvidia

# Triton reads this variable when a kernel is defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


# The advice for a device for which `is_missing_on` is true.
MISSING = 'triton is not installed: pip install "maxsimd[cuda]"'


def runs_on(device: torch.device) -> bool:
    """Whether Triton is installed and runs our kernels on a device: on NVIDIA's GPUs always, elsewhere only
    as an interpreter."""
    return (is_nvidia(device) or INTERPRETED) and _is_installed()


def is_missing_on(device: torch.device) -> bool:
    """Whether a device is a GPU that would run our kernels if Triton were installed."""
    return is_nvidia(device) and not _is_installed()


def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@dataclass(frozen=True, slots=True)
class Limits:
    """What tiles are chosen by: the major number of a GPU's compute capability, bytes of shared memory that
    one program may have, and the number of multiprocessors.

    Shared memory differs within a generation: 227 KiB in data centres, 99 in most other cards."""

    generation: int
    shared_memory: int
    multiprocessors: int


@functools.cache
def limits(device: torch.device) -> Limits:
    """Those of a GPU; for other devices, where kernels are interpreted, those of the smallest."""
    if device.type != "cuda":
        return Limits(0, 99 * 1024, 1)
    found = torch.cuda.get_device_properties(device)
    shared_memory: int = found.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Limits(found.major, shared_memory, found.multi_processor_count)


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`, and at least 16, the smallest side of a product's
    tile."""
    return max(16, 1 << (n - 1).bit_length())
