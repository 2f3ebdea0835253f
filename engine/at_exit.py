"""Ends the threads of engines that nobody has stopped: inside torch or numpy they may abort the process
while the interpreter goes away."""

import atexit
import os
import weakref
from contextlib import suppress
from typing import Protocol

# Seconds that each thread may take.
_SECONDS = 5.0


class HasThreads(Protocol):
    """Ends its threads within some seconds, if there are any; may be called more than once."""

    def close(self, seconds: float | None = None) -> object: ...


_open: weakref.WeakSet[HasThreads] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    # A forked process has none of the threads, and locks that nobody will release.
    os.register_at_fork(after_in_child=_open.clear)


def close_at_exit(owner: HasThreads) -> None:
    """Closes it when the interpreter ends, unless it is closed or gone by then."""
    _open.add(owner)


def note_closed(owner: HasThreads) -> None:
    _open.discard(owner)


@atexit.register
def _close_all() -> None:
    for owner in list(_open):
        with suppress(Exception):  # such as the closed event loop of one that was stopped
            owner.close(_SECONDS)
