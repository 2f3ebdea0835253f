"""When the device counts as stuck: by ticks of the event loop, by what it said and by what is expected."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from maxsimd.engine import EngineConfig
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
    watchdog = Watchdog(60, steps, lambda: "where it stands")
    for _ in range(59):
        watchdog.tick(1.0)
    with pytest.raises(StuckDeviceError, match="no progress for 60 seconds") as stuck:
        watchdog.tick(1.0)
    assert stuck.value.__notes__ == ["where it stands"]


def test_each_sign_of_the_device_counts_as_progress(steps: Any) -> None:
    watchdog = Watchdog(3, steps, str)
    for _ in range(10):
        assert _ticks_until_stuck(watchdog, 2) is None
        steps.num_signs += 1
    assert _ticks_until_stuck(watchdog, 9) == 4, "one tick sees the sign, and three see none"


def test_another_models_turn_is_not_held_against_a_step(steps: Any) -> None:
    turns = Turns()
    own, another = turns.join(1.0), turns.join(1.0)
    watchdog = Watchdog(3, steps, str, own)
    turns.holder = another
    assert _ticks_until_stuck(watchdog, 100) is None
    turns.holder = own
    assert _ticks_until_stuck(watchdog, 9) == 3


def test_a_device_without_a_step_is_never_stuck(steps: Any) -> None:
    watchdog = Watchdog(3, steps, str)
    assert _ticks_until_stuck(watchdog, 2) is None
    steps.in_flight = 0
    assert _ticks_until_stuck(watchdog, 100) is None
    steps.in_flight = 1
    assert _ticks_until_stuck(watchdog, 9) == 3


def test_the_first_step_may_take_ten_times_as_long(steps: Any) -> None:
    steps.step_times = StepTimes()
    assert Watchdog(3, steps, str).allowance == 30
    steps.step_times.observe(1, 0.01)
    assert Watchdog(3, steps, str).allowance == pytest.approx(20)
    steps.step_times.observe(100, 0.01)
    assert Watchdog(3, steps, str).allowance == 3


@pytest.mark.parametrize(("work", "expected"), [(100, 10.0), (10, 1.0), (0, 1.0)])
def test_work_on_a_slow_device_has_20_times_what_is_expected(steps: Any, work: int, expected: float) -> None:
    steps.step_times, steps.running_work = StepTimes(), work
    steps.step_times.observe(10, 1.0)
    assert Watchdog(3, steps, str).allowance == 20 * expected


async def test_with_a_timeout_of_0_nothing_is_watched(steps: Any) -> None:
    watchdog = Watchdog(0, steps, str)
    assert watchdog.allowance == math.inf
    async with asyncio.timeout(20):
        await watchdog.run()


async def test_time_in_which_the_loop_does_not_run_counts_as_one_tick(
    steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock says: the machine may have slept, or the process been stopped."""
    times: list[float] = []
    asleep: list[float] = []

    async def sleep(seconds: float) -> None:
        asleep.append(seconds)
        times.append(times[-1] + 10_000 if times else 0.0)

    watchdog = Watchdog(60, steps, str)
    monkeypatch.setattr("maxsimd.engine.actors.watchdog.asyncio.sleep", sleep)
    monkeypatch.setattr("time.monotonic", lambda: times[-1])
    with pytest.raises(StuckDeviceError):
        await watchdog.run()
    assert asleep == [1.0] * 60


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_a_timeout_that_makes_no_sense_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="step_timeout_seconds must be 0 or more"):
        EngineConfig(step_timeout_seconds=seconds)


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
