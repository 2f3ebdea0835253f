"""Turns on a device that several models share: by weight and by time, whatever the steps' lengths."""

import asyncio
import random
from dataclasses import dataclass

import pytest

from maxsimd.engine.actors.turns import Turn, Turns


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


async def _model(turn: Turn, clock: Clock, draw: random.Random, longest: float) -> None:
    """Runs steps of up to so many seconds one after the other."""
    while True:
        async with turn:
            started = clock.now
            clock.now += draw.uniform(0, longest)
            turn.charge(started)


async def _run(turns: list[Turn], clock: Clock, longest: list[float], seconds: float) -> list[float]:
    """The seconds of each once the clock has come so far."""
    before = [turn.seconds for turn in turns]
    draw = random.Random(0)
    models = [
        asyncio.create_task(_model(turn, clock, draw, most))
        for turn, most in zip(turns, longest, strict=True)
    ]
    end = clock.now + seconds
    while clock.now < end:
        await asyncio.sleep(0)
    for model in models:
        model.cancel()
    await asyncio.gather(*models, return_exceptions=True)
    return [turn.seconds - already for turn, already in zip(turns, before, strict=True)]


@pytest.mark.parametrize("weights", [(1, 3), (5, 2, 1)])
async def test_time_is_shared_by_weight_whatever_the_length_of_steps(weights: tuple[float, ...]) -> None:
    clock = Clock()
    turns = Turns(clock)
    members = [turns.join(weight) for weight in weights]
    used = await _run(members, clock, [0.01, 0.2, 0.05][: len(weights)], 200.0)
    for seconds, weight in zip(used, weights, strict=True):
        assert seconds / sum(used) == pytest.approx(weight / sum(weights), rel=0.03)


async def test_an_idle_one_costs_nothing_and_saves_up_a_moment() -> None:
    clock = Clock()
    turns = Turns(clock)
    busy, idle = turns.join(1.0), turns.join(1.0)
    assert await _run([busy], clock, [0.1], 100.0) == [pytest.approx(100.0, abs=0.2)]
    used = await _run([busy, idle], clock, [0.1, 0.1], 10.0)
    assert used[1] == pytest.approx(5.0, abs=0.5)


async def test_steps_that_overlap_are_paid_for_once() -> None:
    clock = Clock()
    turns = Turns(clock)
    first, second = turns.join(1.0), turns.join(1.0)
    clock.now = 3.0
    assert first.charge(1.0) == 2.0
    clock.now = 4.0
    assert second.charge(2.0) == 1.0
    assert first.charge(5.0) == 0.0


async def test_whoever_is_cancelled_holds_up_nobody() -> None:
    turns = Turns(Clock())
    members = [turns.join(1.0) for _ in range(3)]
    draw = random.Random(1)
    for _ in range(100):
        tasks = [asyncio.create_task(_hold(turn)) for turn in members]
        for _ in range(draw.randrange(8)):
            await asyncio.sleep(0)
        gone = draw.choice(tasks)
        gone.cancel()
        left = [task for task in tasks if task is not gone]
        async with asyncio.timeout(10):
            await asyncio.gather(*left)
            await asyncio.gather(gone, return_exceptions=True)
        assert turns.holder is None


async def _hold(turn: Turn) -> None:
    async with turn:
        await asyncio.sleep(0)


def test_a_weight_that_means_nothing_is_refused() -> None:
    for weight in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="must be positive and finite"):
            Turns(Clock()).join(weight)
