"""Requests that wait for a permit before they are prepared: their order, and who is never left behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from maxsimd.engine import EngineDeadError, QueueFullError, RequestTooLargeError, Tenant
from maxsimd.engine.actors.actor import DropRequest
from tests.unit.engine.test_admission import Door


class WaitingDoor(Door):
    """A door whose requests wait. It holds each that has its permit until it is let go."""

    def __init__(self, queued_tokens: int = 1000, **options: Any) -> None:
        super().__init__(wait_seconds=None, queued_tokens=queued_tokens, **options)
        self.granted: list[str] = []
        self._held: dict[str, asyncio.Event] = {}
        self._calls: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, tokens: int, **options: Any) -> asyncio.Task[None]:
        """A request of that many tokens, by estimate, that waits for its permit or has it."""
        self._held[name] = asyncio.Event()

        async def call() -> None:
            with self.permit(tokens, **options) as permit:
                await self.admission.until_granted(permit)
                self.granted.append(name)
                await self._held[name].wait()

        self._calls[name] = asyncio.create_task(call())
        await settle()
        return self._calls[name]

    async def let_go(self, *names: str) -> None:
        for name in names:
            self._held[name].set()
        await settle()

    async def run_queue(self) -> None:
        """Has the scheduler forget all that waits for a step."""
        while not self.actor.mailbox._letters.empty():
            await self.actor.receive((await self.actor.mailbox.next())[0])
        for number in list(self.actor._open):
            await self.actor.receive(DropRequest(number))
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@asynccontextmanager
async def waiting_door(**options: Any) -> AsyncIterator[WaitingDoor]:
    door = WaitingDoor(**options)
    running = asyncio.create_task(door.admission.run())
    try:
        yield door
        assert (door.metric("waiting_requests"), door.metric("preparing_tokens")) == (0, 0)
    finally:
        running.cancel()


async def test_requests_wait_in_order_for_room_and_none_is_refused() -> None:
    async with waiting_door(queued_tokens=1000) as door:
        door.queue(1, 900)
        for name in "abcd":
            await door.come(name, 50)
        assert door.granted == ["a", "b"]
        assert (door.metric("waiting_requests"), door.metric("preparing_requests")) == (2, 2)
        assert door.admission.waiting_requests == 2
        await door.let_go("a")
        assert door.granted == ["a", "b", "c"]
        await door.run_queue()
        assert door.granted == ["a", "b", "c", "d"]
        await door.let_go("b", "c", "d")


async def test_rates_alone_refuse() -> None:
    async with waiting_door(queued_tokens=10_000) as door:
        door.queue(70, 100)
        with door.permit(100, timeout=2.0) as permit:
            await door.admission.until_granted(permit)
            door.admission.confirm(permit, 100)
            door.admission.review()
            permit.check()
        with pytest.raises(RequestTooLargeError), door.permit(100) as permit:  # noqa: PT012
            await door.admission.until_granted(permit)
            door.admission.confirm(permit, 5001)
    async with waiting_door(tenants={"a": Tenant(requests_per_minute=1)}) as door:
        door.ask(10, tenant="a")
        with pytest.raises(QueueFullError, match="used its 1 requests"):
            door.ask(10, tenant="a")


async def test_a_large_request_is_not_passed_and_comes_in_before_the_queue_is_empty() -> None:
    """It is larger than the whole queue and counts as half of it. The rest is filled beside it."""
    async with waiting_door(queued_tokens=1000) as door:
        for name, tokens in (("first", 300), ("huge", 5000), ("small", 20)):
            await door.come(name, tokens)
        door.queue(1, 150)
        assert door.granted == ["first"], "more than a quarter is there"
        await door.let_go("first")
        assert door.granted == ["first", "huge", "small"], "the device still has work"
        await door.come("medium", 80)
        await door.come("as huge", 5000)
        assert door.granted[3:] == ["medium"]
        huge, values = door.queue(1, 4000)
        door.admission.note_large(huge, values)
        await door.let_go("huge", "small", "medium")
        assert door.granted[4:] == [], "two of them have no room together"
        await door.come("tenant's", 20, tenant="a")
        assert door.granted[4:] == [], "the next one is not passed"
        values.cancel()
        await door.run_queue()
        assert door.granted[4:] == ["as huge", "tenant's"]
        await door.let_go("as huge", "tenant's")


async def test_a_quarter_is_kept_for_requests_of_one_step() -> None:
    async with waiting_door(queued_tokens=1000) as door:
        door.queue(1, 700)
        await door.come("two steps", 60, tenant="a")
        await door.come("one step", 50, tenant="b")
        assert door.granted == []
        await door.run_queue()
        await door.let_go("two steps", "one step")
        door.queue(1, 700)
        await door.come("small", 50)
        assert door.granted == ["two steps", "one step", "small"]
        await door.let_go("small")


async def test_a_tenant_with_many_waiting_holds_back_no_other() -> None:
    async with waiting_door(queued_tokens=100) as door:
        await door.come("holding", 100)
        crowd = [f"a{i}" for i in range(20)]
        for name in crowd:
            await door.come(name, 100, tenant="a")
        await door.let_go("holding")
        await door.come("b", 40, tenant="b")
        await door.come("b again", 40, tenant="b")
        for name in ["a0", "b", "b again", *crowd[1:]]:
            await door.let_go(name)
        assert door.granted[:5] == ["holding", "a0", "b", "b again", "a1"]


async def test_a_tenant_that_comes_again_and_again_does_not_starve_others() -> None:
    """Each time it leaves and comes back. What it was granted ahead of the others is remembered."""
    async with waiting_door(queued_tokens=40) as door:
        await door.come("holding", 40)
        for i in range(3):
            await door.come(f"a{i}", 40, tenant="a")
        await door.let_go("holding")
        now = "a0"
        for i in range(4):
            await door.come(f"b{i}", 40, tenant="b")
            await door.let_go(now)
            now = door.granted[-1]
        assert door.granted == ["holding", "a0", "b0", "a1", "b1", "a2"]
        for _ in range(6):
            await door.let_go(*door.granted)


async def test_weights_and_priorities_share_the_permits() -> None:
    async with waiting_door(queued_tokens=10, tenants={"heavy": Tenant(weight=3)}) as door:
        await door.come("holding", 10)
        for tenant, priority in (("heavy", 0), ("light", 0), ("light", "batch")):
            for i in range(12):
                await door.come(f"{tenant} {priority} {i}", 10, tenant=tenant, priority=priority)
        for _ in range(18):
            await door.let_go(door.granted[-1])
        kinds = [name.rsplit(" ", 1)[0] for name in door.granted[1:]]
        assert 10 <= kinds.count("heavy 0") <= 13
        assert kinds.count("light 0") > kinds.count("light batch") >= 1, "nobody starves"
        for _ in range(20):
            await door.let_go(*door.granted)


async def test_few_requests_are_prepared_at_once_and_others_keep_their_order() -> None:
    async with waiting_door(queued_tokens=1_000_000) as door:
        names = [f"a{i}" for i in range(100)]
        for name in names:
            await door.come(name, 1, tenant="a")
        assert door.metric("preparing_requests") == 32
        await door.come("b", 1, tenant="b")
        await door.let_go("a0", "a1")
        assert door.granted[-1] == "b" or door.granted[-2] == "b"
        await door.let_go("b", *names)
        assert sorted(door.granted) == sorted([*names, "b"])


async def test_a_tenants_own_small_requests_do_not_pass_its_next_one() -> None:
    async with waiting_door() as door:
        door.tenants.set({"a": Tenant(max_queued_tokens=100)})
        await door.come("first", 50, tenant="a", priority=4)
        await door.come("large", 90, tenant="a")
        await door.come("small", 10, tenant="a", priority=4)
        await door.come("other", 10, tenant="b")
        assert door.granted == ["first", "other"]
        door.queue(1, 30, tenant="a")
        await door.let_go("first")
        assert door.granted == ["first", "other"], "what waits for a step counts"
        await door.run_queue()
        assert door.granted == ["first", "other", "large"]
        await door.let_go("large", "other")
        assert door.granted == ["first", "other", "large", "small"]
        await door.let_go("small")


async def test_cancelled_requests_give_way_to_the_next() -> None:
    async with waiting_door(queued_tokens=50) as door:
        holding, cancelled = await door.come("holding", 50), await door.come("cancelled", 50)
        await door.come("next", 50)
        door._held["holding"].set()
        await holding
        assert door.metric("waiting_requests") == 1, "it is granted"
        assert door.granted == ["holding"], "and has not gone on"
        cancelled.cancel()
        await settle()
        assert (cancelled.cancelled(), door.granted) == (True, ["holding", "next"])
        await door.let_go("next")
    # Its task has not run yet when another request comes, at which permits are granted.
    async with waiting_door(queued_tokens=50) as door:
        with door.permit(50) as holding:
            await door.admission.until_granted(holding)
            cancelled = await door.come("cancelled", 50)
            await door.come("next", 50)
            cancelled.cancel()
        with door.permit(50) as newcomer:
            coming = asyncio.create_task(door.admission.until_granted(newcomer))
            door.admission._grant_permits()
            await settle()
            assert (cancelled.cancelled(), door.granted) == (True, ["next"])
            await door.let_go("next")
            await coming
    async with waiting_door(queued_tokens=100) as door:
        await door.come("holding", 50)
        huge = await door.come("huge", 500)
        await door.come("small", 50)
        huge.cancel()
        await settle()
        assert door.granted == ["holding", "small"]
        await door.let_go("holding", "small")


async def test_all_who_wait_are_told_when_the_engine_ends() -> None:
    async with waiting_door(queued_tokens=10) as door:
        holding = await door.come("holding", 10)
        waiting = [await door.come(f"{i}", 10, tenant=str(i % 3)) for i in range(9)]
        waiting[4].cancel()
        door.admission.end_waits("the engine has died")
        await settle()
        for call in [*waiting[:4], *waiting[5:], await door.come("late", 10)]:
            with pytest.raises(EngineDeadError, match="the engine has died"):
                await call
        assert waiting[4].cancelled()
        await door.let_go("holding")
        await holding
