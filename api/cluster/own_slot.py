"""A scorer's slot, by which documents are its own: no other scorer has it."""

import logging
from collections.abc import Sequence

from maxsimd.api.fleet.address import Address
from maxsimd.api.fleet.roster import Listed
from maxsimd.scheduler.fleet.slots import agreed_slots, free_slot

log = logging.getLogger("maxsimd.cluster")


class OwnSlot:
    """The slot of one scorer. Ray numbers replicas anew when one of them leaves; a scorer stays with its
    slot, and its cache with the documents that are its own."""

    def __init__(self) -> None:
        self._listed: Sequence[Listed] = ()
        self._address: Address | None = None
        self._number = -1

    @property
    def number(self) -> int:
        """A number from 0; below it until one has been chosen."""
        return self._number

    def choose(self, rank: int, address: Address) -> None:
        """Takes the slot of the replica's rank, or where another scorer has that the lowest free one; it
        listens at an address."""
        self._address = address
        self._number = free_slot(rank, [each.slot for each in self._listed])

    def set_listed(self, listed: Sequence[Listed]) -> None:
        """These scorers are there now; what they say of this one may be old."""
        self._listed = listed
        if self._address is None:
            return
        slots = {_name(each.address): each.slot for each in listed} | {_name(self._address): self._number}
        number = agreed_slots(slots)[_name(self._address)]
        if number != self._number:
            log.info("scorer %d is scorer %d from now on", self._number, number)
            self._number = number


def _name(address: Address) -> str:
    return repr(address)
