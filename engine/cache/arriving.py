"""New embeddings on their way from the device into the cache."""

from dataclasses import dataclass

from maxsimd.engine.cache.entry import CachedEmbedding
from maxsimd.pooling.ragged import Ragged
from maxsimd.pooling.transfer import to_host


@dataclass(frozen=True, slots=True)
class About:
    """What is kept beside an embedding: its key, the tokens that were run for it, and whether it was cut."""

    key: bytes
    tokens: int
    truncated: bool


class Arriving:
    """A step's new embeddings, copied to the host in one go; `entries` may be asked for when the work that
    was launched before is done."""

    def __init__(self, abouts: list[About], kept: Ragged) -> None:
        self._abouts = abouts
        scales = None if kept.scales is None else to_host(kept.scales)
        self._on_host = Ragged(to_host(kept.values), kept.offsets, scales)

    def entries(self) -> list[tuple[bytes, CachedEmbedding]]:
        """Each embedding by itself: clones, so that none keeps the whole step's alive."""
        host = self._on_host
        scales = [None] * len(host) if host.scales is None else host.scales.split(host.lengths)
        return [
            (about.key, CachedEmbedding(rows.clone(), None if scale is None else scale.clone(), about.tokens,
                                        about.truncated))
            for about, rows, scale in zip(self._abouts, host, scales, strict=True)
        ]  # fmt: skip
