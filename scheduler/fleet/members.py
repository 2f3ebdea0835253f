"""Members of a fleet, the documents that each owns, and the cells that share a request.

A document belongs to the member that rendezvous hashing names (Thaler & Ravishankar 1998, "Using name-based
mappings to increase hit rates"): a new member takes an equal share from each other one, without a table."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

Digests = NDArray[np.uint64]

# Constants of SplitMix64 (Steele, Lea & Flood 2014), which spreads each bit over all of a number.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Member:
    """An engine that takes parts of requests. The `slot`, from 0, goes to whoever replaces it, and so do its
    documents; the `name` is this process's own. Another `fingerprint` means other scores."""

    slot: int
    name: str
    fingerprint: str


def digest_of(document: bytes) -> int:
    """The digest of a document alone, 64 bits of BLAKE2b, so that options of a request change no owner."""
    return int.from_bytes(blake2b(document, digest_size=8).digest(), "little")


def ranked(digests: Digests, slots: Sequence[int]) -> NDArray[np.intp]:
    """For each document [N] the slots' places in `slots`, its owner first: [N, slots]. A slot counts by its
    number alone: other members do not change its weight."""
    weights = mixed(digests[:, None] ^ mixed(np.array(slots, dtype=np.uint64))[None, :])
    return np.argsort(~weights, axis=1, kind="stable")


def mixed(numbers: Digests) -> Digests:
    """Numbers of 64 bits in which each bit depends on all bits of those given (SplitMix64)."""
    numbers = numbers + _STEP
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _FIRST
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _SECOND
    return numbers ^ (numbers >> np.uint64(31))


CELL_SIZE = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """Members, by ascending slots, of the slots from `number` * `size` to (`number` + 1) * `size` - 1."""

    number: int
    members: tuple[Member, ...]
    size: int = CELL_SIZE

    @property
    def is_full(self) -> bool:
        """Each slot has a member."""
        return len(self.members) == self.size

    def ranked(self, digests: Digests) -> NDArray[np.intp]:
        """For each document [N] the members' indices in `members`, its owner first: [N, members]."""
        return ranked(digests, [member.slot for member in self.members])

    def is_owned(self, digests: Digests) -> NDArray[np.bool_]:
        """Whether each document's [N] slot, of all the cell's slots, has a member."""
        if self.is_full:
            return np.ones(len(digests), dtype=np.bool_)
        first = self.number * self.size
        owners = first + ranked(digests, range(first, first + self.size))[:, 0]
        return np.isin(owners, [member.slot for member in self.members])


@dataclass(frozen=True, slots=True)
class Reach:
    """Whom one request is spread over: a cell, and where that is not full another one, for documents whose
    slot in the first has no member."""

    cell: Cell
    other: Cell | None = None

    @property
    def members(self) -> tuple[Member, ...]:
        """All of them, those of the cell first."""
        return self.cell.members if self.other is None else self.cell.members + self.other.members

    def ranked(self, digests: Digests) -> NDArray[np.intp]:
        """For each document [N] the members' indices in `members`, its owner first: [N, members]."""
        own = self.cell.ranked(digests)
        if self.other is None:
            return own
        others = self.other.ranked(digests) + len(self.cell.members)
        is_owned = self.cell.is_owned(digests)[:, None]
        return np.where(is_owned, np.hstack((own, others)), np.hstack((others, own)))

    def numbers(self, digests: Digests) -> NDArray[np.int64]:
        """The number of the owner's cell for each document [N]."""
        if self.other is None:
            return np.full(len(digests), self.cell.number, dtype=np.int64)
        return np.where(self.cell.is_owned(digests), self.cell.number, self.other.number).astype(np.int64)


def cells_of(members: Sequence[Member], size: int = CELL_SIZE) -> tuple[Cell, ...]:
    """The cells of members of one fingerprint: slots from 0 to `size` - 1, and so on. Where two members have
    one slot, as while one replaces the other, the later of them counts. Raises ValueError for a size below 1,
    or different fingerprints."""
    if size < 1:
        raise ValueError("a cell must have room for a member")
    if len({member.fingerprint for member in members}) > 1:
        raise ValueError("members of different fingerprints give different scores: they share no request")
    by_slot = {member.slot: member for member in members}
    in_order = (by_slot[slot] for slot in sorted(by_slot))
    groups = groupby(in_order, lambda member: member.slot // size)
    return tuple(Cell(number, tuple(group), size) for number, group in groups)


def as_one_cell(cells: Sequence[Cell]) -> Cell:
    """A cell of all members, in which each document has one owner, whatever their load."""
    return Cell(
        0, tuple([member for cell in cells for member in cell.members]), sum(each.size for each in cells)
    )


def reach_of(cells: Sequence[Cell], load: Callable[[Cell], float], draw: int) -> Reach:
    """Whom a request is spread over: the lighter of two cells that are drawn by a random number `draw` of 64
    bits (Mitzenmacher 2001, "The power of two choices"); and the other of them where there is need."""
    if len(cells) == 1:
        return Reach(cells[0])
    first = draw % len(cells)
    second = (first + 1 + (draw >> 32) % (len(cells) - 1)) % len(cells)
    cell, other = sorted((cells[first], cells[second]), key=load)
    return Reach(cell, None if cell.is_full else other)


def free_slot(wanted: int | None, taken: Collection[int]) -> int:
    """The slot of a member that comes: the wanted one, or the lowest that nobody has."""
    if wanted is not None and wanted not in taken:
        return wanted
    return next(slot for slot in range(len(taken) + 1) if slot not in taken)


def agreed_slots(slots: Mapping[str, int], size: int = CELL_SIZE) -> dict[str, int]:
    """The slots that members are to have, by name. A member keeps its slot, and so its documents, unless
    another has it too (two came at once), or the members need fewer cells: then it takes the lowest free
    one."""
    needed = -(-len(slots) // size) * size
    agreed: dict[str, int] = {}
    taken: set[int] = set()
    others = []
    for slot, name in sorted((slot, name) for name, slot in slots.items()):
        if slot in taken or slot >= needed:
            others.append(name)
        else:
            agreed[name] = slot
            taken.add(slot)
    for name in others:
        agreed[name] = free_slot(None, taken)
        taken.add(agreed[name])
    return agreed
