"""When the owner of the queue hands steps to the device, and waiting for results beside the device thread."""

import asyncio
import math
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from maxsimd.engine.actors import actor as actors
from maxsimd.engine.actors.runner import Arrivals
from maxsimd.engine.actors.scheduler import SchedulerActor
from maxsimd.engine.errors import RequestFailedError
from maxsimd.engine.metrics import EngineMetrics
from maxsimd.engine.requests import RunOptions
from maxsimd.engine.scoring.scorer import RequestFailure
from maxsimd.scheduler import ResultSlot, Scheduler, Step, StepLimits, WaitingRequest
from tests.unit.scheduler.scheduled_requests import texts
from tests.waiting import until

DEFAULTS = RunOptions()


class Device:
    """A scheduler actor, and what it has sent to the device."""

    def __init__(self, steps_in_flight: int, beside_small: int | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.steps: list[Step] = []
        runner: actors.Mailbox[actors.RunnerMessage] = actors.Mailbox(loop)
        runner.post = self._sent  # type: ignore[method-assign]
        mailbox: actors.Mailbox[actors.SchedulerMessage] = actors.Mailbox(loop)
        scheduler = Scheduler(StepLimits(8, 100, chunked=False, beside_small=beside_small))
        self.metrics = EngineMetrics()
        self.actor = SchedulerActor(mailbox, scheduler, runner, steps_in_flight, self.metrics)

    def _sent(self, message: Any) -> None:
        if isinstance(message, Step):
            self.steps.append(message)

    async def admit(self, request_id: int, lengths: list[int], options: RunOptions = DEFAULTS) -> Any:
        values: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request = WaitingRequest(request_id, options.share)
        request.add(texts(request_id, lengths, 100 * request_id), [])
        await self.actor.receive(actors.OpenRequest(request, len(lengths), options, values))
        return values

    async def report(self, step: Step, first: int, last: int, seconds: float, waited: float = 0.0) -> None:
        chunks = step.chunks[first:last]
        run = (chunk.sequence for chunk in chunks)
        results = tuple((ResultSlot(one.request_id, one.sequence_id % 100), 1.0) for one in run)
        num_tokens = sum(map(len, chunks))
        report = actors.StepReport(step.step_id, len(chunks), num_tokens, 0, seconds, results, waited=waited)
        await self.actor.receive(report)


async def test_the_next_step_is_chosen_in_the_last_stage_of_one() -> None:
    device = Device(steps_in_flight=2)
    await device.admit(1, [4, 4, 4, 4, 4, 4])
    assert len(device.steps) == 1
    await device.admit(2, [2])
    assert len(device.steps) == 1
    await device.actor.receive(actors.StepEnding(device.steps[0].step_id))
    assert len(device.steps) == 2
    assert 2 in {chunk.sequence.request_id for chunk in device.steps[1].chunks}, "it came in time"
    await device.actor.receive(actors.StepEnding(device.steps[1].step_id))
    assert len(device.steps) == 2, "as many as are allowed"
    await device.report(device.steps[0], 0, 2, 0.5)
    assert (len(device.steps), device.actor.in_flight) == (3, 2)
    await device.report(device.steps[1], 0, len(device.steps[1].chunks), 0.5)
    assert len(device.steps) == 3, "a step that ended counts no more as ending"
    device = Device(steps_in_flight=2)
    values = await device.admit(1, [4, 4, 4])
    (step,) = device.steps
    await device.report(step, 0, 1, 0.5)
    assert (len(device.steps), device.actor.in_flight, device.actor.rate.tokens_per_second) == (1, 1, None)
    await device.report(step, 1, 2, 2.0)
    assert device.actor.rate.tokens_per_second == pytest.approx(8 / 2.0)
    assert device.metrics.registry.get_sample_value("maxsimd_step_seconds_sum") == 2.0
    await device.report(device.steps[1], 0, 1, 1.0)
    assert (values.result().values, device.actor.in_flight) == ([1.0, 1.0, 1.0], 0)


async def test_after_a_long_step_the_next_is_chosen_near_its_end() -> None:
    device = Device(steps_in_flight=2, beside_small=8)
    await device.admit(1, [8, 8, 8, 8])
    await device.report(device.steps[0], 0, 1, 0.5)
    device.actor.pace.observe(8_000_000, 1_000_000.0)  # a second for each step from now on
    before = time.perf_counter()
    await device.actor.receive(actors.StepEnding(device.steps[1].step_id))
    assert len(device.steps) == 2
    await device.admit(2, [2])
    assert len(device.steps) == 2
    message = (await asyncio.wait_for(device.actor.mailbox.next(), 600))[0]
    assert time.perf_counter() - before > 0.7, "a quarter of the second is left"
    await device.actor.receive(message)
    assert len(device.steps) == 3
    assert 2 in {chunk.sequence.request_id for chunk in device.steps[2].chunks}, "it came in time"
    # One that ends early is followed at once.
    device.actor.pace.observe(8_000_000, 1_000_000_000.0)
    await device.actor.receive(actors.StepEnding(device.steps[2].step_id))
    assert len(device.steps) == 3
    await device.report(device.steps[1], 0, 1, 0.5)
    await device.report(device.steps[2], 0, len(device.steps[2].chunks), 0.5)
    assert len(device.steps) == 4
    device = Device(steps_in_flight=2, beside_small=8)
    await device.admit(1, [8, 8, 8, 8])
    for step in range(2):
        await device.report(device.steps[step], 0, 1, 0.01, waited=1_000_000.0)
    await device.actor.receive(actors.StepEnding(device.steps[2].step_id))
    await device.actor.receive((await asyncio.wait_for(device.actor.mailbox.next(), 600))[0])
    assert len(device.steps) == 4


async def test_a_value_that_is_not_finite_fails_its_request_alone() -> None:
    for value in (math.nan, math.inf, -math.inf, np.array([[1.0, math.nan]]), np.array([[math.inf], [0.0]])):
        device = Device(steps_in_flight=2)
        broken, whole = await device.admit(1, [4]), await device.admit(2, [4])
        for request_id, given in ((1, value), (2, np.array([[1.0]]))):
            result = (ResultSlot(request_id, 0), given)
            await device.actor.receive(actors.StepReport(device.steps[-1].step_id, 1, 4, 0, 0.1, (result,)))
        with pytest.raises(RequestFailedError, match="not finite"):
            broken.result()
        assert (whole.result().values, device.actor.open_requests) == ([np.array([[1.0]])], 0)


async def test_an_index_that_has_failed_gets_no_value() -> None:
    device = Device(steps_in_flight=1)
    values = await device.admit(1, [4, 4], RunOptions(on_error="report"))
    (step,) = device.steps
    failure = RequestFailure(1, "broken", (0,))
    await device.actor.receive(actors.StepReport(step.step_id, 0, failures=(failure,)))
    await device.report(step, 0, 2, 0.1)
    assert (values.result().values, values.result().errors) == ([None, 1.0], {0: "broken"})


async def test_weights_hold_from_the_next_step_on_for_what_waits_too() -> None:
    device = Device(steps_in_flight=1)
    for request_id, tenant in ((1, "a"), (2, "b")):
        await device.admit(request_id, [1] * 90, RunOptions(0, tenant))
    await device.actor.receive(actors.SetWeights({"b": 7.0}))
    for number in range(10):
        await device.report(device.steps[number], 0, 8, 0.1)
    requests = [chunk.sequence.request_id for step in device.steps[1:] for chunk in step.chunks]
    assert requests.count(2) > 3 * requests.count(1)


class Event:
    def __init__(self, error: Exception | None = None) -> None:
        self.reached, self.arrived = threading.Event(), threading.Event()
        self.error = error

    def synchronize(self) -> None:
        self.reached.set()
        assert self.arrived.wait(1200)
        if self.error is not None:
            raise self.error


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "maxsimd-arrivals"]


async def test_each_waits_for_its_own_and_is_given_its_own_error() -> None:
    before, arrivals = len(_threads()), Arrivals(torch.device("cpu"))
    assert len(_threads()) == before, "a CPU needs no such thread"
    events = [Event(), Event(RuntimeError("lost")), Event()]
    waiting = [asyncio.create_task(arrivals.until(event)) for event in events]
    await until(lambda: len(_threads()) == before + 1)
    assert all(thread.daemon for thread in _threads())
    events[1].arrived.set()
    events[2].arrived.set()
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting)
    events[0].arrived.set()
    first, second, third = await asyncio.gather(*waiting, return_exceptions=True)
    assert (first, str(second), third) == (None, "lost", None)
    arrivals.close()
    await until(lambda: len(_threads()) == before)
    arrivals = Arrivals(torch.device("cpu"))
    slow, never, last = Event(), Event(), Event()
    waiting = [asyncio.create_task(arrivals.until(event)) for event in (slow, never, last)]
    await until(slow.reached.is_set)
    for task in waiting[:2]:
        task.cancel()
    await asyncio.gather(*waiting[:2], return_exceptions=True)
    await asyncio.sleep(0.05)
    slow.arrived.set()
    last.arrived.set()
    async with asyncio.timeout(600):
        await waiting[2]
    arrivals.close()
