"""Which slot each member has, where nobody gives them out: members agree by what each of them says."""

from collections.abc import Collection, Mapping

from maxsimd.scheduler.fleet.cells import CELL_SIZE


def free_slot(wanted: int, taken: Collection[int]) -> int:
    """The slot of a member that comes: the wanted one, or the lowest that nobody has."""
    return wanted if wanted not in taken else _lowest_free(taken)


def agreed_slots(slots: Mapping[str, int], size: int = CELL_SIZE) -> dict[str, int]:
    """By name, the slots that members are to have that have these by now: their own, as long as they run,
    since with another slot a member has other documents.

    Two cases make a member take the lowest free slot: another member has its slot, as where two have come at
    once; and it is in a cell that so few members have no need of, where documents would be cached once more.
    """
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
        agreed[name] = _lowest_free(taken)
        taken.add(agreed[name])
    return agreed


def _lowest_free(taken: Collection[int]) -> int:
    return next(slot for slot in range(len(taken) + 1) if slot not in taken)
