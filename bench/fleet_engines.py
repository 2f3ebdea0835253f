"""Engines that are not there, for a simulated fleet: a queue and a cache each, on the simulation's clock."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from maxsimd.scheduler.fleet import Member

# A model of an engine's times, in seconds: each part, each token that is encoded, and each document that is
# compared. They stand for a small model on a few cores: `maxsimd bench fleet-overhead` measures 4 ms for a
# request with one cached document, and 27 us for each that it has more, HTTP with them.
PART, TOKEN, ROW = 2e-3, 1 / 40_000, 1e-5


@dataclass(slots=True)
class SimulatedEngine:
    """One member's engine, which does one part after another. Its cache has room for `capacity` documents,
    those longest unused forgotten first. `slowness` is how many times as long all takes."""

    member: Member
    capacity: int
    slowness: float = 1.0
    worked: float = 0.0
    _free_at: float = 0.0
    _cached: OrderedDict[int, int] = field(default_factory=OrderedDict)

    def serve(self, at: float, documents: Iterable[tuple[int, int]]) -> tuple[float, int]:
        """A part that comes `at` a time, with documents by their numbers and tokens: when it is done, and how
        many of them are cached, or occur in it before."""
        hits = encoded = count = 0
        for document, tokens in documents:
            count += 1
            if document in self._cached:
                hits += 1
                self._cached.move_to_end(document)
            else:
                encoded += tokens
                self._cached[document] = tokens
        while len(self._cached) > self.capacity:
            self._cached.popitem(last=False)
        seconds = (PART + encoded * TOKEN + count * ROW) * self.slowness
        self._free_at = max(self._free_at, at) + seconds
        self.worked += seconds
        return self._free_at, hits

    def queued_tokens(self, at: float) -> int:
        """What waits by then, in tokens, as an engine says with each reply: a slow one knows no more."""
        return int(max(0.0, self._free_at - at) / (TOKEN * self.slowness))
