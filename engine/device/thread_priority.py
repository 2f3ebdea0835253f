"""Who goes first when there are more threads than cores."""

import contextlib
import os
import sys
import threading

_NICENESS = 4


def lower_thread_priority() -> None:
    """Lets other threads of the process go before the calling one and those that it starts.

    For the thread that computes on the CPU: it is busy for many milliseconds at a time on every core, while
    the event loop only ever needs a moment, but at once. Linux alone has a niceness for each thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
