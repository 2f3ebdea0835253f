"""How many documents are asked of another member once a member comes or goes.

A request goes to a cell as often as it has members, and each of its documents to the owner there. Such a
document has moved where its member did not own it before, in the cell in which it was: it is encoded again.
What a full cache has forgotten is not counted, nor what a member has by chance."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from maxsimd.scheduler.fleet import Cell, Member, cells_of, ranked

_DOCUMENTS = 20_000


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
    cell_before = {member.name: cell for cell in cells_of(before, cell_size) for member in cell.members}
    share = 0.0
    for cell in cells_of(after, cell_size):
        if all(_is_as_before(member, cell, cell_before) for member in cell.members):
            continue
        owners = _owners(cell, digests)
        has_owned = np.zeros(_DOCUMENTS, dtype=np.bool_)
        # Each of the cells from which its members are, by its first member: cells are compared slowly.
        for old in {each.members[0].name: each for each in _old_cells(cell, cell_before)}.values():
            has_owned |= owners == _owners(old, digests)
        share += len(cell.members) / len(after) * float(1 - has_owned.mean())
    return share


def _changes(members: int) -> Iterator[tuple[str, tuple[Member, ...], tuple[Member, ...]]]:
    fleet = _fleet(members)
    newer, last = Member(0, "newer", "f"), fleet[-1]
    yield "one more comes", fleet, _fleet(members + 1)
    yield "one dies, another takes its slot", fleet, (newer, *fleet[1:])
    if members > 1:
        yield "the last goes", fleet, fleet[:-1]
        yield "the first goes, its slot stays free", fleet, fleet[1:]
        # As where slots are ranks, which a cluster may number anew once one has left.
        yield "the first goes, the last takes its slot", fleet, (Member(0, last.name, "f"), *fleet[1:-1])


def _fleet(members: int) -> tuple[Member, ...]:
    return tuple(Member(slot, f"m{slot}", "f") for slot in range(members))


def _old_cells(cell: Cell, cell_before: dict[str, Cell]) -> list[Cell]:
    return [cell_before[member.name] for member in cell.members if member.name in cell_before]


def _is_as_before(member: Member, cell: Cell, cell_before: dict[str, Cell]) -> bool:
    return member.name in cell_before and cell_before[member.name].members == cell.members


def _owners(cell: Cell, digests: NDArray[np.uint64]) -> NDArray[np.str_]:
    names = np.array([member.name for member in cell.members])
    return names[ranked(digests, [member.slot for member in cell.members])[:, 0]]
