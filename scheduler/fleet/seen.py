"""Which documents were lately scored where, so that one whose embedding is cached weighs little in a plan."""

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from maxsimd.scheduler.fleet.cells import Reach
from maxsimd.scheduler.fleet.owners import Digests, Member

# What a document weighs whose embedding is cached, beside one that is encoded.
_CACHED_SHARE = 0.02


class Seen:
    """The documents that this front has lately sent, with the member that answered: at most `capacity`, those
    longest unused forgotten first. A guess, since members have caches of their own. For one thread."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._names: OrderedDict[tuple[int, int], str] = OrderedDict()

    def remember(self, reach: Reach, digests: Iterable[int], member: Member) -> None:
        """One of a request's members has scored documents."""
        number = reach.number_of(member)
        for digest in digests:
            key = number, digest
            self._names[key] = member.name
            self._names.move_to_end(key)
        while len(self._names) > self._capacity:
            self._names.popitem(last=False)

    def weights(self, reach: Reach, digests: Digests, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """What documents [N] with these `tokens` weigh: little where a member of the cell that they go to has
        them."""
        alive = {member.name for member in reach.members}
        keys = zip(reach.numbers(digests).tolist(), digests.tolist(), strict=True)
        is_cached = np.fromiter((self._names.get(key) in alive for key in keys), np.bool_, len(digests))
        return np.where(is_cached, np.ceil(tokens * _CACHED_SHARE), tokens).astype(np.int64)
