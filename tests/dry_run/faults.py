"""What a dry run finds: each would be an error or a wait on a real GPU."""


class Fault(AssertionError):
    """Something that must not happen on the way of a step."""


class MixedDevices(Fault):
    """An operation on tensors of both the host and the device."""


class HostWaits(Fault):
    """The host would wait for the device: for a number of its own, or for a copy of memory that is not
    pinned."""


class Race(Fault):
    """Memory of the host is read or overwritten while the device may still write or read it."""


class NotCapturable(Fault):
    """Something within a captured graph that a replay would not do again: a copy, or memory of the host."""


class FreedMemory(Fault):
    """A replay would read memory that was freed since the capture."""


class WrongLaunch(Fault):
    """A kernel is handed what it does not take."""
