"""Numbers on their way between host and device, without either waiting for the other."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

# Pinned memory is dear and stays with the process: what is larger goes through it in pieces.
_PIECE_BYTES = 32 * 1024 * 1024


def to_device(numbers: NDArray[np.generic] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of host numbers on the device; on the CPU the numbers themselves.

    A CUDA device copies from pinned memory, on its stream, while the caller goes on; for copies to other
    devices the caller waits."""
    tensor = numbers if isinstance(numbers, torch.Tensor) else torch.from_numpy(numbers)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of device numbers in pinned host memory, there once the work launched so far is done; from other
    devices than CUDA's a copy for which the caller waits; on the CPU the numbers themselves."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def joined_on(device: torch.device, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of host tensors [rows, ...], end to end, on the device, as `join_into` makes it."""
    if device.type != "cuda":
        return torch.cat(list(parts)).to(device)
    out = torch.empty(
        sum(part.shape[0] for part in parts), *parts[0].shape[1:], dtype=parts[0].dtype, device=device
    )
    join_into(parts, out)
    return out


def join_into(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Copies host tensors [rows, ...], end to end, into `out` of the same rows and precision on a device.

    A GPU copies from pinned memory, on its stream, while the caller goes on. Each piece is joined in pinned
    memory while the one before it is copied."""
    if out.device.type != "cuda":
        torch.cat(list(parts), out=out)
        return
    done = 0
    for piece in _pieces(parts, _PIECE_BYTES):
        rows = sum(part.shape[0] for part in piece)
        pinned = torch.empty(rows, *out.shape[1:], dtype=out.dtype, pin_memory=True)
        torch.cat(piece, out=pinned)
        out[done : done + rows].copy_(pinned, non_blocking=True)
        done += rows


def _pieces(parts: Sequence[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Runs of parts of at most `most` bytes together, or of one larger part."""
    piece: list[torch.Tensor] = []
    room = most
    for part in parts:
        if piece and part.nbytes > room:
            yield piece
            piece, room = [], most
        piece.append(part)
        room -= part.nbytes
    if piece:
        yield piece
