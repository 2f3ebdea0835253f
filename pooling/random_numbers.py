"""Random numbers that are the same in every version of every library, on every machine: what is computed with
them today can be compared with what is computed with them in years.

SplitMix64 (Steele, Lea & Flood 2014, "Fast Splittable Pseudorandom Number Generators"), on unsigned integers
of 64 bits, all modulo 2^64: draw n = 1, 2, ... of a state s is mix(s + n * 0x9E3779B97F4A7C15). The state of
stream t of a seed is draw 1 of the state (draw 1 of the state seed) + t.
"""

import numpy as np
from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
# Numbers from a normal distribution are multiples of its inverse, so that the last bits of a machine's
# logarithm and cosine change nothing.
_NORMAL_STEPS = 65_536


def draws(seed: int, stream: int, count: int) -> NDArray[np.uint64]:
    """The first draws of a stream: integers from 0 to 2^64 - 1, [count]."""
    state = _draw(_draw(np.array([seed], dtype=np.uint64), 1) + np.uint64(stream), 1)
    return _draw(state, np.arange(1, count + 1, dtype=np.uint64))


def signs(seed: int, stream: int, count: int) -> NDArray[np.float32]:
    """1 where the highest bit of a draw is 0, else -1: float32 [count]."""
    return _signs(draws(seed, stream, count))


def signed_choices(
    seed: int, stream: int, count: int, num_choices: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Of each draw a number from 0 to `num_choices` - 1, its 63 lower bits modulo that, and a sign by its
    highest bit: int64 and float32, [count] each."""
    drawn = draws(seed, stream, count)
    lower = drawn & np.uint64((1 << 63) - 1)
    return (lower % np.uint64(num_choices)).astype(np.int64), _signs(drawn)


def normals(seed: int, stream: int, count: int) -> NDArray[np.float64]:
    """Numbers from the standard normal distribution, rounded to multiples of 1/65536: float64 [count].

    By Box & Muller (1958): draws 2i and 2i + 1, counted from 0, of which the 53 highest bits are a and b,
    give r cos(w) and r sin(w), where r = sqrt(-2 log((a + 1) / 2^53)) and w = 2 pi b / 2^53."""
    pairs = (draws(seed, stream, count + count % 2) >> np.uint64(11)).astype(np.float64).reshape(-1, 2)
    radius = np.sqrt(-2 * np.log((pairs[:, 0] + 1) * 2.0**-53))
    angle = 2 * np.pi * (pairs[:, 1] * 2.0**-53)
    both = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:count]
    return np.asarray(np.rint(both * _NORMAL_STEPS) / _NORMAL_STEPS)


def _signs(drawn: NDArray[np.uint64]) -> NDArray[np.float32]:
    return np.where(drawn >> np.uint64(63), -1, 1).astype(np.float32)


def _draw(state: NDArray[np.uint64], number: NDArray[np.uint64] | int) -> NDArray[np.uint64]:
    """Unsigned integers in arrays wrap around, as is meant."""
    mixed = state + np.asarray(number, dtype=np.uint64) * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))
