"""How Python itself is set up in a process that serves."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# How long a thread may hold Python's lock while another wants it. Python's own 5 ms are too long: the device
# thread takes the lock after each operation, also while a large request is being prepared. By
# `maxsimd bench crowd` a small request waits twice as long with 0.5 ms as with 0.1; less gains nothing.
_SWITCH_SECONDS = 0.0001


@contextmanager
def switching_often() -> Iterator[None]:
    """Threads take turns at Python's lock often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def garbage_left_alone() -> Iterator[None]:
    """What there is by now is not walked through by the garbage collector, which would stop everything for a
    tenth of a second or more now and then. For after a start, which leaves very many objects behind."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
