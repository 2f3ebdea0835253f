"""How many documents are asked of another member once a member comes or goes.

Requests are drawn as a front draws them, each to the cells with less to do; each of a request's documents
goes to its owner there. It has moved where its member did not own it before, for any request: it is encoded
again. What a full cache has forgotten is not counted, nor what a member has by chance."""

import random
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from maxsimd.scheduler.fleet import Cell, Member, cells_of, reach_of

_DOCUMENTS = 4_000
# Requests drawn of a fleet, a cell, and at the least.
_A_CELL, _REQUESTS = 40, 1_000


def moves_times_members(members: int, cell_size: int) -> dict[str, float]:
    """By change, the share of all requests' documents that move, times the members that there are before or
    after, whichever are more: 1 where as many move as the one that comes or goes has on average."""
    return {
        name: round(moved(before, after, cell_size) * max(len(before), len(after)), 3)
        for name, before, after in _changes(members)
    }


def moves_of_growth(members: int, cell_size: int) -> list[float]:
    """The same for each step from one member to two, three, and on to `members`."""
    fleets = [_fleet(count) for count in range(1, members + 1)]
    return [round(moved(before, after, cell_size) * len(after), 3) for before, after in pairwise(fleets)]


def moved(before: tuple[Member, ...], after: tuple[Member, ...], cell_size: int) -> float:
    """The share of all requests' documents whose member after the change did not own them before."""
    digests = np.random.default_rng(0).integers(0, 2**64, _DOCUMENTS, dtype=np.uint64)
    earlier, later = _Fleet(before, cell_size, digests), _Fleet(after, cell_size, digests)
    has_moved = {cell.number: ~earlier.has_owned(later.owners[cell.number]) for cell in later.cells}
    draws = random.Random(0)
    shares = []
    for _ in range(max(_REQUESTS, _A_CELL * len(later.cells))):
        number, other = later.draw(draws.getrandbits(64))
        is_there = later.is_owned[number]
        shares.append(float(np.where(is_there, has_moved[number], has_moved[other]).mean()))
    return float(np.mean(shares))


class _Fleet:
    """Whose documents [N] are whose: by a cell's number their `owners` there, by name, and whether their slot
    there has a member."""

    def __init__(self, members: tuple[Member, ...], cell_size: int, digests: NDArray[np.uint64]) -> None:
        self.cells = cells_of(members, cell_size)
        self.owners = {cell.number: _owners(cell, digests) for cell in self.cells}
        self.is_owned = {cell.number: cell.is_owned(digests) for cell in self.cells}
        self._cell_of = {member.name: cell.number for cell in self.cells for member in cell.members}
        self._work = dict.fromkeys(self._cell_of, 0)

    def has_owned(self, names: NDArray[np.str_]) -> NDArray[np.bool_]:
        """Whether the members of these names, one for each document [N], own it for some request."""
        owned = np.zeros(len(names), dtype=np.bool_)
        free = {number: ~is_owned for number, is_owned in self.is_owned.items()}
        num_free = np.sum(list(free.values()), axis=0)
        for name in np.unique(names):
            number = self._cell_of.get(str(name))
            if number is not None:
                # Those whose slot there is its own; and those without one that come from other cells.
                comes = self.is_owned[number] | (num_free > free[number]) | (len(self.cells) == 1)
                owned |= (names == name) & (self.owners[number] == name) & comes
        return owned

    def draw(self, draw: int) -> tuple[int, int]:
        """The cells of a request for all documents, by their numbers: the first, and the one for documents
        without a member there. The request is counted as work of its members."""
        reach = reach_of(self.cells, self._load, draw)
        number = reach.cell.number
        other = number if reach.other is None else reach.other.number
        taken = np.where(self.is_owned[number], self.owners[number], self.owners[other])
        for name, count in zip(*np.unique(taken, return_counts=True), strict=True):
            self._work[str(name)] += int(count)
        return number, other

    def _load(self, cell: Cell) -> float:
        return float(np.mean([self._work[member.name] for member in cell.members]))


def _changes(members: int) -> Iterator[tuple[str, tuple[Member, ...], tuple[Member, ...]]]:
    fleet = _fleet(members)
    newer = Member(0, "newer", "f")
    yield "one more comes", fleet, _fleet(members + 1)
    yield "one dies, another takes its slot", fleet, (newer, *fleet[1:])
    if members > 1:
        yield "the last goes", fleet, fleet[:-1]
        yield "the first goes, its slot stays free", fleet, fleet[1:]


def _fleet(members: int) -> tuple[Member, ...]:
    return tuple(Member(slot, f"m{slot}", "f") for slot in range(members))


def _owners(cell: Cell, digests: NDArray[np.uint64]) -> NDArray[np.str_]:
    return np.array([member.name for member in cell.members])[cell.ranked(digests)[:, 0]]
