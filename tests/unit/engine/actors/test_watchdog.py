"""When the device counts as stuck: by ticks of the event loop, by what it said and by what is expected."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from maxsimd.engine.actors.turns import Turns
from maxsimd.engine.actors.watchdog import StuckDeviceError, Watchdog
from maxsimd.scheduler import StepTimes


@pytest.fixture
def steps() -> Any:
    """Stands for a scheduler whose steps are short."""
    times = StepTimes()
    times.observe(100, 0.01)
    return SimpleNamespace(in_flight=1, running_work=100, num_signs=0, step_times=times)


def _ticks_until_stuck(watchdog: Watchdog, most: int) -> int | None:
    for tick in range(1, most + 1):
        try:
            watchdog.tick(1.0)
        except StuckDeviceError:
            return tick
    return None


def test_a_device_is_stuck_after_the_timeout_without_a_sign(steps: Any) -> None:
    watchdog = Watchdog(3, steps, lambda: "where it stands")
    for _ in range(10):
        assert _ticks_until_stuck(watchdog, 2) is None
        steps.num_signs += 1
    steps.in_flight = 0
    assert _ticks_until_stuck(watchdog, 100) is None
    steps.in_flight = 1
    assert _ticks_until_stuck(watchdog, 2) is None
    with pytest.raises(StuckDeviceError, match="no progress for 3 seconds") as stuck:
        watchdog.tick(1.0)
    assert stuck.value.__notes__ == ["where it stands"]


def test_another_models_turn_is_not_held_against_a_step(steps: Any) -> None:
    turns = Turns()
    own, another = turns.join(1.0), turns.join(1.0)
    watchdog = Watchdog(3, steps, str, own)
    turns.holder = another
    assert _ticks_until_stuck(watchdog, 100) is None
    turns.holder = own
    assert _ticks_until_stuck(watchdog, 9) == 3


def test_first_steps_and_large_ones_may_take_longer(steps: Any) -> None:
    """Ten times the timeout before a step was seen, and 20 times what is expected of a slow device."""
    steps.step_times = StepTimes()
    assert Watchdog(3, steps, str).allowance == 30
    steps.step_times.observe(10, 1.0)
    for work, expected in ((100, 10.0), (10, 1.0), (0, 1.0)):
        steps.running_work = work
        assert Watchdog(3, steps, str).allowance == 20 * expected


async def test_with_a_timeout_of_0_nothing_is_watched(steps: Any) -> None:
    watchdog = Watchdog(0, steps, str)
    assert watchdog.allowance == math.inf
    async with asyncio.timeout(20):
        await watchdog.run()


def test_the_latest_steps_say_how_long_another_takes_at_most() -> None:
    times = StepTimes()
    assert times.most_seconds(10) is None
    times.observe(10, 2.0)
    assert times.most_seconds(10) == times.most_seconds(1) == 2.0
    assert times.most_seconds(30) == 6.0
    times.observe(1, 0.5)
    assert times.most_seconds(1) == 0.5
    assert times.most_seconds(30) == 6.0
    for _ in range(16):
        times.observe(5, 5.0)
    assert times.most_seconds(30) == 30.0, "earlier ones are forgotten"
