"""When Python's garbage collector walks through everything: at quiet moments, because all threads stand still
meanwhile.

Nearly all memory is freed at once, by counting references. The collector is for objects that refer to each
other: errors and the frames that they came through, mostly. Afterwards the C library gives the system what is
free in its heaps; else it keeps it wherever something behind it is still in use, and a server that once had
many large requests at a time stays as large as it was then.
"""

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from maxsimd.engine.device.host import give_back_memory

# More collections of young objects than there ever are between two full ones.
_NEVER = 1_000_000_000
_LOOK_SECONDS = 0.25
# Between two full collections passes this many times as long as the first took: with a full cache of
# embeddings in memory it is a tenth of a second.
_REST = 200
# While the server is always busy there is one after this long, or once the process has grown by so much: what
# is not freed may be bodies of requests that failed.
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
    last, took, least_bytes = now(), 0.0, resident()
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        has_aged = gc.get_count()[2] > 0
        is_late = now() - last > _LONGEST_SECONDS
        least_bytes = min(least_bytes, resident())
        has_grown = resident() - least_bytes > _GROWN_BYTES
        if now() - last > _REST * took and (has_grown or (has_aged and (is_late or is_quiet()))):
            begun = now()
            gc.collect()
            last, took = now(), now() - begun
            await asyncio.to_thread(give_back_memory)
            least_bytes = resident()


def resident_bytes() -> int:
    """How many bytes of this process are in memory; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
