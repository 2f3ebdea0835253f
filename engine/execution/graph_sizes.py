"""For which sizes of steps CUDA graphs are captured, and which step runs in which; pure functions of numbers.

A graph computes all of its rows whatever a step has, so it must save more than its empty rows cost. An eager
pass takes as long as the host takes to launch it, or the device to compute it, whichever is more: with 24
layers of 1,024 hidden units 6 to 25 ms to launch, by the attention that is launched, and 6 ms to compute
4,096 rows (an H100, `bench/results/gpu-h100.json`). A replay only takes the device's time.
"""

from maxsimd.engine.execution.attention.base import CaptureSize

ROWS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Enough for most steps; empty sequences make the attention of a graph a little slower.
_FEW_SEQUENCES = 32
# Beyond the host's time, a step may leave this share of a graph's rows empty: much less costs it nothing, and
# spares the host's threads the work of launching.
_EMPTY = 0.125
# Where the device takes this many times as long as the host, graphs would only take memory.
_DEVICE_BOUND = 8.0


def sizes_for(rows: int, sequences: int, longest: int) -> tuple[CaptureSize, ...]:
    """The sizes for steps of at most `rows` tokens and `sequences` sequences, of which the longest has
    `longest`: each with few sequences, and with the most. The largest comes first, so that the others need no
    more memory."""
    found = {
        CaptureSize(size, min(size, most, sequences), min(size, longest))
        for size in {*(size for size in ROWS if size < rows), min(rows, ROWS[-1])}
        for most in (_FEW_SEQUENCES, sequences)
    }
    return tuple(sorted(found, reverse=True))


def is_worth_capturing(host: float, device: float) -> bool:
    """Whether graphs help with steps that take the host and the device these milliseconds eagerly."""
    return device <= host * _DEVICE_BOUND


def least_tokens(rows: int, host: float, replay: float) -> int:
    """The fewest tokens with which a step gains from a graph of `rows` rows whose replay takes `replay`
    milliseconds, where the host takes `host` to launch an eager pass."""
    return 0 if replay <= host else int(rows * (1 - _EMPTY))
