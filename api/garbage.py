"""When Python's garbage collector walks through everything: at quiet moments, because all threads stand still
meanwhile.

Nearly all memory is freed at once, by counting references. The collector is for objects that refer to each
other: errors and the frames that they came through, mostly.
"""

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# More collections of young objects than there ever are between two full ones.
_NEVER = 1_000_000_000
_LOOK_SECONDS = 0.25
# While the server is always busy there is a full collection after this long, or once the process has grown
# by so much: what is not freed may be bodies of requests that failed.
_LONGEST_SECONDS = 60.0
_GROWN_BYTES = 128 << 20


@contextmanager
def garbage_left_alone() -> Iterator[None]:
    """What there is by now is not walked through any more, and what comes is only while it is young: with
    some 100,000 objects, which two requests of 10,000 documents have, all would stand still for tens of
    milliseconds, several times a second. For after a start, which leaves very many objects behind; full
    collections are up to `collect_when_quiet`."""
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


async def collect_when_quiet(is_quiet: Callable[[], bool], resident: Callable[[], int]) -> None:
    """Has all that has outlived its youth walked through when `is_quiet`, for as long as this runs; now and
    then anyway where it never is. `resident` is how many bytes the process has in memory."""
    now = asyncio.get_running_loop().time
    last, bytes_then = now(), resident()
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        has_aged = gc.get_count()[2] > 0
        is_due = now() - last > _LONGEST_SECONDS or resident() - bytes_then > _GROWN_BYTES
        if has_aged and (is_due or is_quiet()):
            gc.collect()
            last, bytes_then = now(), resident()


def resident_bytes() -> int:
    """How many bytes of this process are in memory; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
