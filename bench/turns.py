"""Contenders that take turns: a machine that changes its speed is then fair to all."""

import math
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turns(Generic[T]):
    """By contender and turn: seconds on the clock, those of this process's processors, and the result. Busy
    neighbors change processor time less."""

    seconds: dict[str, list[float]]
    processor: dict[str, list[float]]
    results: dict[str, list[T]]

    def median_ms(self, name: str, digits: int = 1) -> float:
        return round(statistics.median(self.seconds[name]) * 1e3, digits)

    def ratio(self, slow: str, fast: str) -> float:
        return median_ratio(self.seconds[slow], self.seconds[fast])


async def take_turns(
    contenders: Mapping[str, Callable[[], Awaitable[T]]],
    rounds: int,
    warm_up: bool = True,
    seconds: float = math.inf,
) -> Turns[T]:
    """Runs all contenders in each round, and another one first. No round but the first begins after
    `seconds`. The round that warms up does not count."""
    names, until = list(contenders), time.perf_counter() + seconds
    turns: Turns[T] = Turns({n: [] for n in names}, {n: [] for n in names}, {n: [] for n in names})
    for number in range(-1 if warm_up else 0, rounds):
        if number > 0 and time.perf_counter() > until:
            break
        first = number % len(names)
        for name in names[first:] + names[:first]:
            started, before = time.perf_counter(), time.process_time()
            result = await contenders[name]()
            processor, taken = time.process_time() - before, time.perf_counter() - started
            if number >= 0:
                turns.seconds[name].append(taken)
                turns.processor[name].append(processor)
                turns.results[name].append(result)
    return turns


def medians(turns: Sequence[Mapping[str, float]], digits: int) -> dict[str, float]:
    """The median of each figure over the turns that have it."""
    names = dict.fromkeys(name for turn in turns for name in turn)
    values = {name: [turn[name] for turn in turns if name in turn] for name in names}
    return {name: round(statistics.median(each), digits) for name, each in values.items()}


def median_ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """The median over rounds of the values of `slow` divided by those of `fast`."""
    return round(statistics.median(a / b for a, b in zip(slow, fast, strict=True)), 2)
