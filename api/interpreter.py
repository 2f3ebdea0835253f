"""How Python and the libraries' threads are set up in a process that serves."""

import os
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


# How often OpenMP's threads look whether the others are ready before they sleep: for a tenth of a
# millisecond, which is longer than most of what is done between two layers. On a quiet machine that costs a
# hundredth or two of throughput beside five times as long; by `maxsimd bench neighbours` it leaves a server
# its share beside one busy neighbour, and by `maxsimd bench overload` it halves what refusals cost.
_SPINS = "2000"


def waiting_threads_sleep() -> None:
    """Has OpenMP's threads sleep when they wait for each other, unless the environment says how they wait. To
    be called before torch is imported.

    By default they look for tens of milliseconds, which nobody else can use: where other processes keep the
    cores busy, a thread spends its share of them on waiting for one that has not got its own yet."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def open_standard_files() -> None:
    """Opens /dev/null as standard input, output and error where these are closed. Otherwise sockets get their
    numbers, and libuv aborts when it closes one."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
