"""The limits of a device, measured: the figures give rates as shares of these."""

from dataclasses import dataclass

import torch

from maxsimd.bench.timing import medians

# A product of 4096^3 has 512 tiles for 132 multiprocessors, the last of which leave most of them idle.
_SIDE = 8192
_BYTES = 1 << 31
_SMALL = 256  # the size of all where there is no GPU and the figures mean nothing
_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Limits:
    """FLOP/s of a large product in bfloat16, bytes/s that a copy reads and writes, and bytes/s that a sum
    reads."""

    product: float
    copy: float
    read: float

    @property
    def fastest_read(self) -> float:
        """Bytes/s: what a kernel that only reads is held to."""
        return max(self.copy, self.read)

    def figures(self) -> dict[str, float]:
        """In TFLOP/s and TB/s."""
        return {
            "product_tflops": float(f"{self.product / 1e12:.4g}"),
            "copy_tbytes_per_s": float(f"{self.copy / 1e12:.4g}"),
            "read_tbytes_per_s": float(f"{self.read / 1e12:.4g}"),
        }


def measure_limits(device: torch.device) -> Limits:
    """Measures all three, in a few seconds."""
    return Limits(product_peak(device, torch.bfloat16), copy_bandwidth(device), read_bandwidth(device))


def product_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product."""
    side = _SIDE if device.type == "cuda" else _SMALL
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * side**3 / medians({"product": lambda: a @ b}, device, _ROUNDS)["product"]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes/s read and written by a copy."""
    source = _large(device)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / medians({"copy": lambda: target.copy_(source)}, device, _ROUNDS)["copy"]


def read_bandwidth(device: torch.device) -> float:
    """Bytes/s read by a sum, which writes next to nothing."""
    source = _large(device)
    return source.nbytes / medians({"sum": source.sum}, device, _ROUNDS)["sum"]


def copies_beyond_cache(size: int, device: torch.device) -> int:
    """How many copies of data of `size` bytes to use in turns so that none is in the cache of a GPU when its
    turn comes: the others are at least twice as large as the cache."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return 1 + -(-2 * cache // size)


def _large(device: torch.device) -> torch.Tensor:
    size = _BYTES if device.type == "cuda" else _SMALL * 1024
    return torch.ones(size // 4, dtype=torch.float32, device=device)
