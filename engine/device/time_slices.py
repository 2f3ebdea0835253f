"""How soon a thread that wakes up gets a core, when there are more threads than cores."""

import ctypes
import os
import platform
import struct
import sys

# The numbers of the system calls sched_setattr and sched_getattr, and their structure: size, policy, flags,
# niceness, priority, then a runtime, a deadline and a period in nanoseconds, and two clamps (man 2
# sched_setattr).
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")
_POLICY, _RUNTIME = 1, 5
_NANOSECONDS = 100_000


def take_short_slices() -> bool:
    """Has the calling thread, and those that it starts from then on, run for short slices of time at once;
    says whether that could be asked for.

    The event loop needs a moment, but at once; a thread that has done its part of a layer waits for those
    that have not. From Linux 6.12 on, a thread that wakes up need not wait for a long slice of another of
    this process to end, and goes before those of other processes whose slices are longer; older kernels
    change nothing. The share of the cores stays the same. (A higher niceness of busy threads would serve the
    event loop as well, and halve their share wherever other processes are busy.)"""
    calls = _CALLS.get(platform.machine())
    if sys.platform != "linux" or calls is None:
        return False
    set_attributes, get_attributes = calls
    call = ctypes.CDLL(None).syscall
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if call(get_attributes, 0, buffer, _ATTRIBUTES.size, 0):
        return False
    attributes = list(_ATTRIBUTES.unpack(buffer.raw))
    if attributes[_POLICY] != os.SCHED_OTHER:  # whoever has chosen another policy has chosen its slices
        return False
    attributes[_RUNTIME] = _NANOSECONDS
    return not call(set_attributes, 0, _ATTRIBUTES.pack(*attributes), 0)
