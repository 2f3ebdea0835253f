"""New embeddings on their way from the device into the cache."""

from dataclasses import dataclass

import torch

from maxsimd.engine.cache.entry import CachedEmbedding
from maxsimd.pooling.ragged import Ragged, to_host


@dataclass(frozen=True, slots=True)
class About:
    """What is cached beside an embedding: its key, the tokens that were run, and whether it was cut."""

    key: bytes
    tokens: int
    truncated: bool


class Arriving:
    """A step's new embeddings, copied to the host in one go; they may be read once the work that was launched
    before is done. Raises ValueError where there are not as many abouts as embeddings."""

    def __init__(self, abouts: list[About], embeddings: Ragged) -> None:
        if len(abouts) != len(embeddings):
            raise ValueError(f"{len(embeddings)} embeddings cannot go by {len(abouts)} keys")
        self._abouts = abouts
        scales = None if embeddings.scales is None else to_host(embeddings.scales)
        self._on_host = Ragged(to_host(embeddings.values), embeddings.offsets, scales)

    def __len__(self) -> int:
        return len(self._abouts)

    @property
    def keys(self) -> list[bytes]:
        return [about.key for about in self._abouts]

    @property
    def nbytes(self) -> int:
        scales = self._on_host.scales
        return self._on_host.values.nbytes + (0 if scales is None else scales.nbytes)

    def entry(self, index: int) -> CachedEmbedding:
        """One embedding: a copy, so that it does not hold the whole step's alive."""
        host, about = self._on_host, self._abouts[index]
        scales = None
        if host.scales is not None:
            scales = _copy(host.scales[int(host.offsets[index]) : int(host.offsets[index + 1])])
        return CachedEmbedding(_copy(host[index]), scales, about.tokens, about.truncated, about.key)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy made by this thread alone. torch would start OpenMP threads for each thread that copies. With
    more of them than cores, those of the device thread sleep between operations instead of spinning: then
    MaxSim takes twice as long, and a forward pass a tenth longer."""
    if tensor.numel() == 0:  # as one of other numbers it cannot be seen
        return torch.empty_like(tensor)
    bytes_ = tensor.view(torch.uint8).numpy().copy()
    return torch.from_numpy(bytes_).view(tensor.dtype)
