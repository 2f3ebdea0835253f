"""Launches without importing Triton: whether a device runs our kernels, its limits, and the blocks of
attention."""

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
    """Whether a device is an accelerator without kernels of ours. Plain torch runs on it, and its results are
    compared with the CPU's at load."""
    return device.type != "cpu" and not is_nvidia(device)


# Triton reads this variable when a kernel is defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


# Advice for a device on which `is_missing_on`.
MISSING = "triton is not installed: pip install '.[cuda]' in the checkout"


def runs_on(device: torch.device) -> bool:
    """Whether Triton is installed and runs our kernels on a device: an NVIDIA GPU, or any if interpreted."""
    return (is_nvidia(device) or INTERPRETED) and _is_installed()


def is_missing_on(device: torch.device) -> bool:
    """Whether a device is a GPU that would run our kernels if Triton were installed."""
    return is_nvidia(device) and not _is_installed()


def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that tiles are chosen by: the major number of a GPU's compute capability, the bytes of
    shared memory of a program, and the multiprocessors. Data center cards have 227 KiB, most others 99."""

    generation: int
    shared_memory: int
    multiprocessors: int


@functools.cache
def limits(device: torch.device) -> Limits:
    """The limits of a GPU; for interpreted kernels those of the smallest."""
    if device.type != "cuda":
        return Limits(0, 99 * 1024, 1)
    found = torch.cuda.get_device_properties(device)
    shared_memory: int = found.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Limits(found.major, shared_memory, found.multi_processor_count)


def next_power_of_two(n: int) -> int:
    """The smallest power of two of at least `n` and 16, the smallest side of a product's tile."""
    return max(16, 1 << (n - 1).bit_length())


def blocks_of(
    sequences: Sequence[tuple[int, int, int, int]] | NDArray[np.int64],
    causal: bool,
    prefix_keys: int,
    queries: int,
) -> NDArray[np.int32]:
    """Splits sequences (first row, queries, first key, keys) into blocks of at most `queries` queries, one a
    program and head: (first row, queries, position of its first query, first key, keys), int32 [blocks, 5].

    Blocks with the most keys come first. Positions count from the first key of the prefix; causal queries are
    the last of their sequence's keys."""
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
    """The most blocks of `queries` queries for up to `sequences` sequences in `rows` rows: all blocks of a
    sequence but its last are full."""
    return (rows + min(rows, sequences) * (queries - 1)) // queries
