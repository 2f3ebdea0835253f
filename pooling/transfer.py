"""Numbers on their way between host and device, without either waiting for the other."""

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(numbers: NDArray[np.generic] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of host numbers on the device; on the CPU the numbers themselves.

    A GPU copies from pinned memory, on its stream, while the caller goes on."""
    tensor = numbers if isinstance(numbers, torch.Tensor) else torch.from_numpy(numbers)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of device numbers in pinned host memory, there once the work launched so far is done; on the CPU
    the numbers themselves."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
