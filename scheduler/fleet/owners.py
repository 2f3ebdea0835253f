"""Whose document it is: each document's digest ranks the members, and the first of them owns it.

Rendezvous hashing (Thaler & Ravishankar 1998, "Using name-based mappings to increase hit rates"): a member
that comes takes an equal share from each of the others, and one that goes leaves its documents to all,
without a table that anybody must agree on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Digests = NDArray[np.uint64]

# Constants of SplitMix64 (Steele, Lea & Flood 2014), which spreads each bit over all of a number.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Member:
    """An engine that takes parts of requests. The `slot` is a number from 0 that whoever replaces it takes
    over, and so its documents; the `name` is this process's own. Members with different fingerprints (model,
    precision, version) give different scores."""

    slot: int
    name: str
    fingerprint: str


def digest_of(text: str) -> int:
    """A text's digest, 64 bits of BLAKE2b: of the text alone: options of a request change no owner."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def ranked(digests: Digests, slots: Sequence[int]) -> NDArray[np.intp]:
    """For each document [N] the slots' places in `slots`, its owner first: [N, slots]."""
    return np.argsort(~_weights(digests, slots), axis=1, kind="stable")


def mixed(numbers: Digests) -> Digests:
    """Numbers of 64 bits in which each bit depends on all bits of those given (SplitMix64)."""
    numbers = numbers + _STEP
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _FIRST
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _SECOND
    return numbers ^ (numbers >> np.uint64(31))


def _weights(digests: Digests, slots: Sequence[int]) -> Digests:
    """How much each member [G] is a document's [N]: [N, G]. A slot counts by its number alone, so that it
    weighs the same whoever else there is."""
    of_slots = mixed(np.array(slots, dtype=np.uint64))
    return mixed(digests[:, None] ^ of_slots[None, :])
