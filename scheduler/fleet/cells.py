"""Cells: members side by side among whom one request is spread.

A request over all members of a large fleet would wait for the slowest of a hundred; over a cell of eight it
has eight parts. The price is that a document which many requests have is cached once a cell.

A cell has room for a fixed number of slots, and a document belongs to one of those, whether or not a member
has it by now. Where none has, the document goes to its owner in another cell, which may have it cached from
other requests. So a member that comes takes its own share of documents and moves no others, and one that goes
leaves its share to all, also where it is the first or the last of a cell.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from maxsimd.scheduler.fleet.owners import Digests, Member, ranked

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
        """In which cell, by its number, each document [N] has its owner."""
        if self.other is None:
            return np.full(len(digests), self.cell.number, dtype=np.int64)
        return np.where(self.cell.is_owned(digests), self.cell.number, self.other.number).astype(np.int64)

    def number_of(self, member: Member) -> int:
        """Of the cell that one of the members belongs to."""
        return member.slot // self.cell.size


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


def reach_of(cells: Sequence[Cell], load: Callable[[Cell], float], draw: int) -> Reach:
    """Whom a request is spread over: the lighter of two cells that are drawn by a random number `draw` of 64
    bits (Mitzenmacher 2001, "The power of two choices"); and the other of them where there is need."""
    if len(cells) == 1:
        return Reach(cells[0])
    first = draw % len(cells)
    second = (first + 1 + (draw >> 32) % (len(cells) - 1)) % len(cells)
    cell, other = sorted((cells[first], cells[second]), key=load)
    return Reach(cell, None if cell.is_full else other)
