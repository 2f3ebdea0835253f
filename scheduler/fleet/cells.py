"""Cells: members side by side among whom one request is spread.

A request over all members of a large fleet would wait for the slowest of a hundred; over a cell of eight it
has eight parts. The price is that a document which many requests have is cached once a cell.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from maxsimd.scheduler.fleet.owners import Member, mixed

CELL_SIZE = 8
# Makes of a random number another one.
_OTHER = 0xA5A5A5A5A5A5A5A5


@dataclass(frozen=True, slots=True)
class Cell:
    """Members with neighbouring slots, in ascending order, and the cell's `number`."""

    number: int
    members: tuple[Member, ...]


def cells_of(members: Sequence[Member], size: int = CELL_SIZE) -> tuple[Cell, ...]:
    """The cells of members of one fingerprint: slots from 0 to `size` - 1, and so on. One with fewer than
    half as many members joins the one before it: by itself it would cache little, and be slow. Where two
    members have one slot, as while one replaces the other, the later of them counts. Raises ValueError for a
    size below 1, or different fingerprints."""
    if size < 1:
        raise ValueError("a cell must have room for a member")
    if len({member.fingerprint for member in members}) > 1:
        raise ValueError("members of different fingerprints give different scores: they share no request")
    by_slot = {member.slot: member for member in members}
    in_order = (by_slot[slot] for slot in sorted(by_slot))
    cells: list[Cell] = []
    for number, group in groupby(in_order, lambda member: member.slot // size):
        cell = Cell(number, tuple(group))
        while cells and 2 * min(len(cells[-1].members), len(cell.members)) < size:
            cell = _joined(cells.pop(), cell)
        cells.append(cell)
    return tuple(cells)


def _joined(one: Cell, other: Cell) -> Cell:
    """Two cells in one, with the number of the larger: of its documents most stay where they are."""
    larger = one if len(one.members) >= len(other.members) else other
    return Cell(larger.number, one.members + other.members)


def cell_of(cells: Sequence[Cell], key: int | None, load: Callable[[Cell], float], draw: int) -> Cell:
    """The cell that takes a request: always the same for the same `key`, a digest; without one the lighter
    of two that are drawn by a random number `draw` of 64 bits. Larger cells take more, as they have members.
    """
    if len(cells) == 1:
        return cells[0]
    if key is not None:
        return cells[int(_weights(cells, key).argmax())]
    first = int(_weights(cells, draw).argmax())
    again = _weights(cells, draw ^ _OTHER)
    again[first] = 0.0
    return min((cells[first], cells[int(again.argmax())]), key=load)


def _weights(cells: Sequence[Cell], key: int) -> NDArray[np.float64]:
    """Weighted rendezvous hashing: the greatest of -members / ln(u), with u a number between 0 and 1 for each
    cell, belongs to a cell as often as it has members, and a member more moves no more keys than it must."""
    of_cells = mixed(np.array([cell.number for cell in cells], dtype=np.uint64))
    bits = mixed(of_cells ^ np.uint64(key)) >> np.uint64(11)  # as many as a float64 has
    sizes = np.array([len(cell.members) for cell in cells])
    return -sizes / np.log((bits + 0.5) / 2**53)
