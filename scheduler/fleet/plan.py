"""From a request's documents to parts, each for one member."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from maxsimd.scheduler.fleet.members import Cell, Digests, Member, Reach, as_one_cell, reach_of

Tokens = NDArray[np.int64]

# Consistent hashing with bounded loads (Mirrokni, Thorup & Zadimoghaddam 2018, arXiv 1608.01350): no member
# may have more than this many times the mean of those that a request is spread over, and one step beyond, or
# few requests would move.
_BOUND = 1.25


class Split(Enum):
    """The ways to spread a request.

    `BY_OWNER`: documents go where their embeddings are cached, unless that member is busy. `AT_OWNER`: they
    go there, busy or not: only their owner has the documents. `BY_TOKENS`: anywhere, as nothing is cached.
    `NEVER`: the model reads all documents together."""

    BY_OWNER = "by owner"
    AT_OWNER = "at owner"
    BY_TOKENS = "by tokens"
    NEVER = "never"


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Documents of a request, by their ascending `indices`, for the first of the `members`, or else for the
    next ones. With `is_whole` it has all documents, which belong together."""

    members: tuple[Member, ...]
    indices: NDArray[np.int64]
    weight: int
    is_whole: bool = False


def plan(
    digests: Digests,
    tokens: Tokens,
    weights: Tokens,
    reach: Reach,
    loads: Tokens,
    split: Split,
    least_tokens: int,
) -> list[Part]:
    """The parts of a request: each document in exactly one, equal documents in the same.

    Documents [N] have `digests` of their texts, `tokens`, and `weights`: less than the tokens where a member
    has cached a document. `loads` are the tokens that wait at each of the reach's members [G]. A request with
    at most `least_tokens` goes to one member, and no part by tokens weighs less where it need not."""
    members = reach.members
    if not len(digests):
        return []
    unique, inverse = np.unique(digests, return_inverse=True)
    of_unique = np.maximum(1, np.bincount(inverse, weights=weights).astype(np.int64))
    if split is Split.BY_OWNER:
        order = reach.ranked(unique)  # [N, G]
        room = _BOUND * (loads.sum() + of_unique.sum()) / len(members) + least_tokens - loads
        choose = _at_one if tokens.sum() <= least_tokens else _at_owners
        chosen = choose(order, of_unique, room)
    elif split is Split.AT_OWNER:
        chosen = reach.ranked(unique)[:, 0]
    elif split is Split.BY_TOKENS:
        chosen = _by_tokens(of_unique, loads, least_tokens)
    else:
        chosen = np.full(len(unique), np.argmin(loads), dtype=np.intp)
    chosen = chosen[inverse]
    firsts, a_document = np.unique(chosen, return_index=True)
    # Fallbacks in the order of one of its documents, so that they differ from part to part.
    others = reach.ranked(digests[a_document])
    parts = []
    for first, order in zip(firsts.tolist(), others.tolist(), strict=True):
        indices = np.flatnonzero(chosen == first).astype(np.int64)
        in_turn = (members[first], *(members[member] for member in order if member != first))
        parts.append(Part(in_turn, indices, int(weights[indices].sum()), is_whole=split is Split.NEVER))
    return parts


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


class Loads:
    """Estimated tokens at each member: unanswered ones of this front, and those of other fronts by the latest
    reply. For one thread."""

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
    """The `capacity` documents that this front has sent last, with the member that answered: a guess at what
    members have cached. For one thread."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._names: OrderedDict[tuple[int, int], str] = OrderedDict()

    def remember(self, reach: Reach, digests: Iterable[int], member: Member) -> None:
        """One of a request's members has scored documents."""
        number = member.slot // reach.cell.size
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
        reach = reach_of(cells, self.load, draw) if split is not Split.AT_OWNER else Reach(as_one_cell(cells))
        weights = self.seen.weights(reach, digests, tokens) if is_cached else tokens
        loads = self.loads.of(reach.members)
        return reach, plan(digests, tokens, weights, reach, loads, split, least_tokens)

    def load(self, cell: Cell) -> float:
        """The mean load of a cell's members."""
        return float(self.loads.of(cell.members).mean())
