"""The limits of a device, measured: the figures give rates as shares of these."""

import torch

from maxsimd.bench.timing import medians

_SIDE = 4096
_COPY_BYTES = 1 << 30
_SMALL = 256  # the size of both where there is no GPU and the figures mean nothing


def product_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product."""
    side = _SIDE if device.type == "cuda" else _SMALL
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * side**3 / medians({"product": lambda: a @ b}, device, 20)["product"]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes/s read and written by a copy."""
    size = _COPY_BYTES if device.type == "cuda" else _SMALL * 1024
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * size / medians({"copy": lambda: target.copy_(source)}, device, 20)["copy"]
