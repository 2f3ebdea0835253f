"""From a request's documents to parts, each for one member."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from maxsimd.scheduler.fleet.members import Cell, Digests, Member, Reach, reach_of

Tokens = NDArray[np.int64]

# Consistent hashing with bounded loads (Mirrokni, Thorup & Zadimoghaddam 2018, arXiv 1608.01350): no member
# may have more than this many times the mean of those that a request is spread over, and one step beyond, or
# few requests would move.
_BOUND = 1.25


class Split(Enum):
    """The ways to spread a request.

    `BY_OWNER`: documents go where their embeddings are cached. `BY_TOKENS`: anywhere, as nothing is cached.
    `NEVER`: the model reads all documents together."""

    BY_OWNER = "by owner"
    BY_TOKENS = "by tokens"
    NEVER = "never"


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """A request's documents [N]: the `digests` of their texts, how many `tokens` they have, and what they
    weigh: less than their tokens where a member is known to have cached a document."""

    digests: Digests
    tokens: Tokens
    weights: Tokens


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Documents of a request, by their `indices` in it, ascending, for the first of the `members`; the others
    follow in the order in which they are to be asked where it cannot. `weight` is what they weigh. One that
    `is_whole` has all documents, which belong together."""

    members: tuple[Member, ...]
    indices: NDArray[np.int64]
    weight: int
    is_whole: bool = False


def plan(documents: Documents, reach: Reach, loads: Tokens, split: Split, least_tokens: int) -> list[Part]:
    """The parts of a request: each document in exactly one, equal documents in the same.

    `loads` is what waits at each of the reach's members [G] by now, in tokens. A request with at most
    `least_tokens` goes to one member, and no part by tokens weighs less where it need not. Raises ValueError
    without members.
    """
    members = reach.members
    if not members:
        raise ValueError("there is no member that could take a part")
    if not len(documents.digests):
        return []
    unique, inverse = np.unique(documents.digests, return_inverse=True)
    of_unique = np.maximum(1, np.bincount(inverse, weights=documents.weights).astype(np.int64))
    if split is Split.BY_OWNER:
        order = reach.ranked(unique)  # [N, G]
        room = _BOUND * (loads.sum() + of_unique.sum()) / len(members) + least_tokens - loads
        choose = _at_one if documents.tokens.sum() <= least_tokens else _at_owners
        chosen = choose(order, of_unique, room)
    elif split is Split.BY_TOKENS:
        chosen = _by_tokens(of_unique, loads, least_tokens)
    else:
        chosen = np.full(len(unique), np.argmin(loads), dtype=np.intp)
    parts = _parts(chosen[inverse], documents, reach)
    return [replace(part, is_whole=True) for part in parts] if split is Split.NEVER else parts


def _at_one(order: NDArray[np.intp], weights: Tokens, room: NDArray[np.float64]) -> NDArray[np.intp]:
    """All documents [N] to the member that owns most of them, of those that have room; or to the one with the
    least work. `order` [N, G] is whose each document is, `room` [G] what may be added to each."""
    owned = np.bincount(order[:, 0], weights=weights, minlength=len(room))
    return np.full(len(order), np.argmax(np.where(room > 0, owned, room - 1.0)), dtype=np.intp)


def _at_owners(order: NDArray[np.intp], weights: Tokens, room: NDArray[np.float64]) -> NDArray[np.intp]:
    """Each document [N] to the first of its members that has room, as above. There is room for all: more than
    they weigh together."""
    room = room.copy()
    chosen = np.full(len(order), -1, dtype=np.intp)
    for choice in order.T:
        waiting = np.flatnonzero(chosen < 0)
        if not len(waiting):
            break
        for member in range(len(room)):
            asking = waiting[choice[waiting] == member]
            # Documents before which there is room: the last may go over.
            before = np.cumsum(weights[asking]) - weights[asking]
            taken = asking[before < room[member]]
            chosen[taken] = member
            room[member] -= weights[taken].sum()
    return chosen


def _by_tokens(weights: Tokens, loads: Tokens, least_tokens: int) -> NDArray[np.intp]:
    """Documents [N], the heaviest first, each to the member with the least work (Graham 1969): of as many
    members as have enough to do, those with the least work now."""
    count = int(np.clip(weights.sum() // max(1, least_tokens), 1, len(loads)))
    lightest = np.argsort(loads, kind="stable")[:count]
    heap = [(int(loads[member]), int(member)) for member in lightest]
    heapify(heap)
    chosen = np.empty(len(weights), dtype=np.intp)
    for document in np.argsort(-weights, kind="stable"):
        load, member = heap[0]
        chosen[document] = member
        heapreplace(heap, (load + int(weights[document]), member))
    return chosen


def _parts(chosen: NDArray[np.intp], documents: Documents, reach: Reach) -> list[Part]:
    members = reach.members
    firsts, a_document = np.unique(chosen, return_index=True)
    # Fallbacks in the order of one of its documents, so that they differ from part to part.
    others = reach.ranked(documents.digests[a_document])
    parts = []
    for first, order in zip(firsts.tolist(), others.tolist(), strict=True):
        indices = np.flatnonzero(chosen == first).astype(np.int64)
        in_turn = (members[first], *(members[member] for member in order if member != first))
        parts.append(Part(in_turn, indices, int(documents.weights[indices].sum())))
    return parts


class Loads:
    """Estimated tokens at each member: those that this front has sent and that are not answered, and what
    each reply said waits there beside them, from other fronts. For one thread."""

    def __init__(self) -> None:
        self._sent: dict[str, int] = {}
        self._others: dict[str, int] = {}

    def sent(self, member: Member, tokens: int) -> None:
        """Tokens go to a member."""
        self._sent[member.name] = self._sent.get(member.name, 0) + tokens

    def answered(self, member: Member, tokens: int, queued_tokens: int | None) -> None:
        """They are answered, or lost; a reply says how many are queued at the member by then."""
        left = self._sent.get(member.name, 0) - tokens
        self._sent[member.name] = max(0, left)
        if queued_tokens is not None:
            self._others[member.name] = max(0, queued_tokens - max(0, left))

    def forget_queued(self) -> None:
        """Forgets what replies have said, which is old: those who said it would else not be asked again."""
        self._others.clear()

    def forget_others(self, members: Iterable[Member]) -> None:
        """Forgets all other members."""
        names = {member.name for member in members}
        for counts in (self._sent, self._others):
            for name in counts.keys() - names:
                del counts[name]

    def of(self, members: Sequence[Member]) -> NDArray[np.int64]:
        """Tokens at each member."""
        return np.array(
            [self._sent.get(member.name, 0) + self._others.get(member.name, 0) for member in members],
            dtype=np.int64,
        )


# Documents that a front remembers, and seconds for which it trusts what replies said of queues.
_REMEMBERED, _QUEUES_FOR = 200_000, 1.0
# Weight of a cached document, relative to one that is encoded.
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
        """The weights of documents [N] with these `tokens`: small where a member of the cell that they go to
        has them."""
        alive = {member.name for member in reach.members}
        keys = zip(reach.numbers(digests).tolist(), digests.tolist(), strict=True)
        is_cached = np.fromiter((self._names.get(key) in alive for key in keys), np.bool_, len(digests))
        return np.where(is_cached, np.ceil(tokens * _CACHED_SHARE), tokens).astype(np.int64)


class Planner:
    """Plans one front's requests by what it knows: the load of each member, and documents that they have
    cached. For one thread."""

    def __init__(self) -> None:
        self.loads = Loads()
        self.seen = Seen(_REMEMBERED)
        self._forgot = 0.0

    def plan(
        self,
        cells: Sequence[Cell],
        digests: Digests,
        tokens: Tokens,
        split: Split,
        least_tokens: int,
        now: float,
        draw: int,
        is_cached: bool = True,
    ) -> tuple[Reach, list[Part]]:
        """The members that a request is spread over, and its parts, see `plan`. `now` is in seconds, `draw` a
        random number of 64 bits. With `is_cached` members look for its documents in their caches."""
        if now > self._forgot + _QUEUES_FOR:
            self.loads.forget_queued()
            self._forgot = now
        reach = reach_of(cells, self.load, draw)
        weights = self.seen.weights(reach, digests, tokens) if is_cached else tokens
        documents = Documents(digests, tokens, weights)
        return reach, plan(documents, reach, self.loads.of(reach.members), split, least_tokens)

    def load(self, cell: Cell) -> float:
        """The mean load of a cell's members."""
        return float(self.loads.of(cell.members).mean())
