"""How many arrays and objects a JSON text has, counted without building any of them.

An empty object takes two bytes of a body and sixty of memory, and Python builds millions of them with its
lock held. So they are counted first, with numpy, which lets other threads run.
"""

import re

import numpy as np

# This many bytes are looked at at a time.
_BLOCK = 1 << 18
_QUOTE, _BACKSLASH = ord('"'), ord("\\")


def has_more_containers(body: bytes | bytearray, most: int) -> bool:
    """Whether a JSON text has more arrays and objects than `most`. Of bytes that are no JSON it says
    anything."""
    if body.count(b"{") + body.count(b"[") <= most:
        return False
    is_inside, found = False, 0
    view = memoryview(body)
    start = 0
    while start < len(body):
        stop = _end_of_block(view, start)
        block = np.frombuffer(_without_escapes(bytes(view[start:stop])), dtype=np.uint8)
        inside = np.logical_xor.accumulate(np.concatenate(([is_inside], block == _QUOTE)))[1:]
        found += int(np.count_nonzero(((block == ord("{")) | (block == ord("["))) & ~inside))
        if found > most:
            return True
        is_inside, start = bool(inside[-1]), stop
    return False


def _end_of_block(body: memoryview, start: int) -> int:
    """The end of a block that begins at `start`: no backslash is cut off from what it escapes."""
    stop = min(start + _BLOCK, len(body))
    while stop < len(body) and body[stop - 1] == _BACKSLASH:
        stop += 1
    return stop


def _without_escapes(block: bytes) -> bytes:
    return re.sub(rb"\\.", b"__", block, flags=re.DOTALL)
