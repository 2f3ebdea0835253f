"""What all launches need to know of a device: whether it runs Triton kernels, and its limits."""

import functools
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


def is_nvidia(device: torch.device) -> bool:
    """Whether a device is an NVIDIA GPU: torch's builds for ROCm call AMD's GPUs cuda too."""
    return device.type == "cuda" and torch.version.hip is None


def runs_plain_torch(device: torch.device) -> bool:
    """Whether a device is an accelerator for which we have no kernels: plain torch runs on it, and what it
    computes is compared with the CPU at load."""
    return device.type != "cpu" and not is_nvidia(device)


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


def blocks_of(
    sequences: Sequence[tuple[int, int, int, int]] | NDArray[np.int64],
    causal: bool,
    prefix_keys: int,
    queries: int,
) -> NDArray[np.int32]:
    """Cuts sequences (first row, queries, first key, keys) into blocks of at most `queries` queries.

    Each block is (first row, queries, position of its first query, first key, keys): int32 [blocks, 5]. The
    blocks that see the most keys come first. Positions count from the first key of the prefix; causal queries
    are the last of their sequence's keys."""
    table = np.asarray(sequences, dtype=np.int64).reshape(-1, 4)
    counts = -(-table[:, 1] // queries)
    owner = np.repeat(np.arange(len(table)), counts)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
    row, length, key, keys = table[owner].T
    position = first + (prefix_keys + (keys - length if causal else 0))
    taken = np.minimum(queries, length - first)
    seen = np.minimum(keys, position + taken - prefix_keys) if causal else keys
    blocks = np.stack([row + first, taken, position, key, keys], axis=1)
    return np.ascontiguousarray(blocks[np.argsort(-seen, kind="stable")], dtype=np.int32)


def most_blocks(rows: int, sequences: int, queries: int) -> int:
    """The most blocks of `queries` queries that up to `sequences` sequences in `rows` rows are cut into: all
    but the last of a sequence are full, and a last one has a query at least."""
    return (rows + min(rows, sequences) * (queries - 1)) // queries
