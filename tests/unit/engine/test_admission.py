"""Admission of requests: by what waits, by the time it takes, by what a request costs."""

import asyncio
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from maxsimd.engine import QueueFullError, RequestTooLargeError
from maxsimd.engine.actors.actor import Mailbox, OpenRequest, RunnerMessage, SchedulerMessage
from maxsimd.engine.actors.scheduler import SchedulerActor
from maxsimd.engine.admission import Admission, AdmissionLimits, Permit
from maxsimd.engine.metrics import EngineMetrics
from maxsimd.engine.requests import EmbedRequest, RunOptions, ScoreRequest, Truncation, Values
from maxsimd.engine.scoring.scorer import ScoringPrice
from maxsimd.engine.tenants import Tenant, TenantLimits
from maxsimd.pooling.vectors import Vectors
from maxsimd.scheduler import Scheduler, StepLimits, WaitingRequest
from tests.unit.scheduler.scheduled_requests import texts

LIMITS = AdmissionLimits(
    queued_tokens=10_000, request_tokens=5000, wait_seconds=2.0, sequence_tokens=50, step_tokens=50,
    scoring=ScoringPrice(200),
)  # fmt: skip
# Windows have no limit. A text counts as 64 characters more, and four are taken for a token at first.
TEXT = EmbedRequest(texts=("x" * 336,), task="embed", truncation=Truncation(windows=True))


def text_of(tokens: int) -> EmbedRequest:
    return replace(TEXT, texts=("x" * (4 * tokens - 64),))


class Door:
    """An admission before a scheduler that is known for 100 tokens a second, and runs nothing."""

    def __init__(self, rate: float | None = 100.0, tenants: Any = None, **limits: Any) -> None:
        self.limits = replace(LIMITS, **limits)
        loop = asyncio.get_running_loop()
        self.metrics = EngineMetrics()
        runner: Mailbox[RunnerMessage] = Mailbox(loop)
        mailbox: Mailbox[SchedulerMessage] = Mailbox(loop)
        scheduler = Scheduler(StepLimits(self.limits.step_tokens, 1000, chunked=False))
        self.actor = SchedulerActor(mailbox, scheduler, runner, 2, self.metrics)
        if rate is not None:
            self.actor.rate.observe(self.limits.step_tokens, self.limits.step_tokens / rate)
        self.now = 0.0
        self.tenants = TenantLimits(lambda: self.now)
        self.tenants.set(tenants or {})
        self.metrics.tenants.set_names(tenants or {})
        self.admission = Admission(self.limits, self.actor, self.metrics, self.tenants, lambda: self.now)
        self._numbers = iter(range(1000))

    def queue(self, count: int, tokens: int, **options: Any) -> tuple[WaitingRequest, asyncio.Future[Values]]:
        """Queues so many requests; returns the last one."""
        for _ in range(count):
            number = next(self._numbers)
            lengths = [50] * (tokens // 50) + [tokens % 50] * (tokens % 50 > 0)
            run = RunOptions(**options)
            request = WaitingRequest(number, run.share)
            request.add(texts(number, lengths, 1000 * number), [])
            values = asyncio.get_running_loop().create_future()
            self.actor.post(OpenRequest(request, len(lengths), run, values))
        return request, values

    def permit(self, tokens: int, **options: Any) -> AbstractContextManager[Permit]:
        """The permit of a request that is estimated at `tokens`."""
        return self.admission.permit(text_of(tokens), self.tenants.applied(RunOptions(**options)))

    def ask(self, tokens: int, counted: int | None = None, **options: Any) -> None:
        """Lets a request in as `Running` does, with an estimate of `tokens`."""
        with self.permit(tokens, **options) as permit:
            self.admission.confirm(permit, tokens if counted is None else counted)

    def estimate(self, request: EmbedRequest | ScoreRequest = TEXT) -> float:
        with self.admission.permit(request, RunOptions()) as permit:
            return permit.tokens

    def refusal(self, tokens: int, match: str | None = None, **options: Any) -> QueueFullError:
        with pytest.raises(QueueFullError, match=match) as raised:
            self.ask(tokens, **options)
        return raised.value

    def wait(self, tokens: int, seconds: float, **options: Any) -> None:
        """Lets a request in, whose values come that many seconds after it was queued."""
        values: asyncio.Future[Values] = asyncio.get_running_loop().create_future()
        with self.admission.permit(text_of(tokens), RunOptions(**options)) as permit:
            self.admission.confirm(permit, tokens)
            self.admission.compare(permit, values)
        self.now += seconds
        values.set_result(Values([], {}))

    def expected(self, tokens: int) -> float:
        """How many times as long as forecast such a request is expected to wait."""
        return self.admission._wait_errors.factor(tokens, self.now)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"maxsimd_{name}", labels)


async def test_a_request_that_would_wait_too_long_is_refused() -> None:
    door = Door()
    door.queue(6, 31)
    door.ask(20)
    door.queue(1, 31)
    message = r"for about 2\.2 seconds, more than the 2\.0 that it may"
    assert door.refusal(20, message).retry_after == 1.0
    assert door.metric("refused_requests_total", reason="wait") == 1
    door.queue(33, 31)
    assert door.refusal(20).retry_after == pytest.approx(12.4 - 2.0), "when the wait is short enough"
    Door(queued_tokens=0, wait_seconds=0).ask(4999)  # alone, it is never refused for what waits
    # Any request may wait for two steps.
    door = Door(wait_seconds=0)
    door.queue(1, 31)
    door.queue(5, 13)
    door.ask(20)
    door.queue(1, 5)
    door.refusal(20, match=r"more than the 1\.0")
    for tokens, priority, times, message in (
        (500, "interactive", 1, r"for about 5\.3 seconds, more than the 5\.0"),
        (510, "interactive", 8, r"for about 41\.1 seconds, more than the 40\.8"),
        (500, "batch", 8, r"for about 40\.3 seconds, more than the 40\.0"),
    ):
        door = Door()
        door.queue(times, tokens, priority=priority)
        door.ask(tokens, priority=priority)
        door.queue(1, 31, priority=priority)
        door.refusal(tokens, priority=priority, match=message)


async def test_a_request_is_not_refused_for_those_it_passes() -> None:
    door = Door(wait_seconds=100)
    door.queue(3, 1700)
    door.ask(20)
    door.refusal(1600, timeout=66.9)
    door.ask(1600, timeout=67.1)
    # Another tenant's requests run beside it.
    door = Door()
    door.queue(100, 31, tenant="other")
    door.ask(20)
    door.queue(3, 60)
    door.refusal(50)


async def test_a_request_that_cannot_be_done_in_its_time_is_refused() -> None:
    door = Door()
    door.queue(6, 31)
    door.ask(20, timeout=2.1)
    message = r"take about 2\.1 seconds.* than is left of its timeout \(2\.0\)"
    assert door.refusal(20, message, timeout=2.0).retry_after == 1.0
    assert door.refusal(30, counted=150, timeout=1.9).retry_after == pytest.approx(1.86 + 1.5 - 1.9, abs=0.1)
    assert door.metric("refused_requests_total", reason="timeout") == 2
    door = Door()
    door.ask(100, counted=110, timeout=1.0, on_timeout="partial")
    door.queue(6, 31)
    door.ask(20, timeout=1.9, on_timeout="partial")
    door.refusal(20, timeout=1.8, on_timeout="partial")


async def test_a_request_above_its_own_limits_is_too_large() -> None:
    door = Door(tenants={"a": Tenant(max_request_tokens=70), "b": Tenant(max_request_tokens=9000)})
    raised = r"71 tokens, more than the 70 .* or have max_request_tokens of the tenant 'a' raised$"
    for tokens, options, message in (
        (100, {"timeout": 1.0}, r"1\.1 seconds by itself, more than its timeout of 1;"),
        (5000, {}, r"5001 tokens, more than the 5000 that .* or raise max_request_tokens$"),
        (5000, {"tenant": "b"}, "5001 tokens, more than the 5000"),
        (70, {"tenant": "a"}, raised),
    ):
        door.ask(20, counted=tokens, **options)
        with pytest.raises(RequestTooLargeError, match=message):
            door.ask(20, counted=tokens + (10 if "timeout" in options else 1), **options)
    assert door.metric("refused_requests_total", reason="size") == 4
    assert door.metric("tenant_refused_requests_total", tenant="a", reason="size") == 1


async def test_no_time_is_estimated_until_a_full_step_was_measured() -> None:
    door = Door(rate=None)
    door.queue(70, 100)
    door.ask(100, timeout=0.1)
    door.queue(5, 100)
    assert door.refusal(101).retry_after == 1.0


async def test_a_quarter_of_the_queue_is_kept_for_requests_of_one_step() -> None:
    door = Door(wait_seconds=1000)
    door.queue(149, 50)
    door.ask(50)
    door.refusal(51, match=r"7450 tokens wait already.* about 51, .* the 7500 that")
    door.queue(50, 50)
    door.ask(50)
    door.queue(1, 1)
    assert door.refusal(50, match="the 10000 that").retry_after == 1.0
    door.queue(20, 50)
    assert door.refusal(50).retry_after == pytest.approx(9.52)
    assert door.metric("refused_requests_total", reason="queue") == 3


async def test_what_is_prepared_is_shown_and_counts_as_two_steps() -> None:
    door = Door()
    assert door.metric("wait_seconds") == 0
    with suppress(KeyError), door.admission.permit(TEXT, RunOptions()):
        assert (door.metric("preparing_requests"), door.metric("preparing_tokens")) == (1, 100)
        raise KeyError
    assert (door.metric("preparing_requests"), door.metric("preparing_tokens")) == (0, 0)
    door.queue(3, 60)
    assert door.metric("wait_seconds") == pytest.approx(1.8)
    door = Door(wait_seconds=1.2)
    door.queue(1, 31)
    large = text_of(1016)
    with door.admission.permit(large, RunOptions(timeout=1000)):
        door.refusal(20, match=r"for about 1\.3 seconds, more than the 1\.2 that it may")
        with door.admission.permit(large, RunOptions(timeout=1000)) as permit:
            door.admission.confirm(permit, 1000)
    door.ask(20)
    with door.admission.permit(text_of(40), RunOptions()):
        door.ask(20)


async def test_an_estimate_is_what_such_texts_had_before() -> None:
    door = Door()
    for _ in range(100):
        door.ask(100, counted=200)
    assert door.estimate() == pytest.approx(200, rel=0.01)
    door.ask(100, counted=0)
    assert door.estimate() == pytest.approx(180, rel=0.01)
    cut = replace(TEXT, texts=("x" * 10_000, "y" * 10_000), truncation=Truncation(max_tokens=-1))
    assert Door().estimate(cut) == 2 * LIMITS.sequence_tokens, "no more than fits"
    # It refuses nobody before tokens count: documents that are cached cost hardly anything.
    door = Door(queued_tokens=1000)
    door.queue(5, 100)
    door.ask(800, counted=10)
    door.ask(90, counted=10, timeout=6.0)


async def test_who_comes_before_the_queue_is_full_may_be_refused() -> None:
    door = Door()
    with (  # noqa: PT012 (the permit must see the error)
        door.admission.permit(text_of(20), RunOptions()) as small,
        door.admission.permit(TEXT, RunOptions(tenant="other")) as other,
        pytest.raises(QueueFullError, match=r"for about 9\.0 seconds, more than the 2\.0"),
        door.admission.permit(TEXT, RunOptions()) as large,
    ):
        large.check()
        door.queue(9, 100)
        door.admission.review()
        door.admission.review()
        small.check()
        other.check()
        large.check()
    assert door.metric("refused_requests_total", reason="wait") == 1, "once"


async def test_a_tenant_above_its_rate_is_told_when_to_come() -> None:
    door = Door(tenants={"a": Tenant(requests_per_minute=30)})
    for _ in range(30):
        door.admission.check_rate("a")  # before the request is read
        door.ask(20, tenant="a")
    message = (
        r"^the tenant 'a' has used its 30 requests per minute; try again in 2\.0 seconds, send "
        r"less, or have its requests_per_minute raised$"
    )
    assert door.refusal(20, message, tenant="a").retry_after == 2.0
    with pytest.raises(QueueFullError, match=message):
        door.admission.check_rate("a")
    door.ask(20)
    door.now = 1.9
    door.refusal(20, tenant="a")
    door.now = 2.0
    door.ask(20, tenant="a")
    assert door.metric("refused_requests_total", reason="rate") == 3
    assert door.metric("tenant_refused_requests_total", tenant="a", reason="rate") == 3
    assert door.metric("tenant_requests_total", tenant="a") == 34
    assert door.metric("tenant_requests_total", tenant="other") == 1


async def test_tokens_count_once_they_are_counted_and_requests_let_in() -> None:
    door = Door(tenants={"a": Tenant(tokens_per_minute=600)})
    door.ask(4000, counted=10, tenant="a")
    door.ask(20, counted=590, tenant="a")
    door.refusal(1, tenant="a", match=r"used its 600 tokens .* have its tokens_per_minute raised")
    door.now = 1.0
    door.ask(20, counted=1210, tenant="a")
    refusal = door.refusal(1, tenant="a")
    assert refusal.retry_after == pytest.approx(120.1)
    door.now += refusal.retry_after
    door.ask(1, tenant="a")
    door = Door(tenants={"a": Tenant(requests_per_minute=2, tokens_per_minute=1000)})
    door.queue(7, 31)
    for _ in range(5):
        door.refusal(20, tenant="", match="would wait for about")
        door.refusal(150, tenant="a", timeout=2.5, match="than is left of its timeout")
    with pytest.raises(RequestTooLargeError):
        door.ask(200, counted=5001, tenant="a")
    door.ask(20, tenant="a")
    door.refusal(20, tenant="a", match="used its 2 requests")


async def test_a_tenant_may_have_no_more_waiting_than_is_said_of_it() -> None:
    door = Door(tenants={"a": Tenant(max_queued_tokens=100)}, wait_seconds=1000)
    door.queue(10, 50)
    door.ask(4999, tenant="a")
    door.queue(1, 50, tenant="a")
    door.ask(50, tenant="a")
    message = (
        r"^50 tokens of the tenant 'a' wait already and this request has about 70, together more than the "
        r"100 that it may have; try again later, or have max_queued_tokens of the tenant raised$"
    )
    refusal = door.refusal(70, message, tenant="a")
    assert (refusal.reason, refusal.retry_after) == ("queue", pytest.approx(20 * 550 / 50 / 100))
    door.ask(70)
    assert door.metric("tenant_refused_requests_total", tenant="a", reason="queue") == 1


async def test_nothing_is_learnt_of_shorter_or_unfinished_waits() -> None:
    door = Door(wait_seconds=100)
    door.wait(20, 5.0)  # next to nothing waits
    door.queue(2, 20)
    door.wait(20, 5.0)
    door.queue(3, 20)
    door.wait(20, 5.0, on_timeout="partial", timeout=50)  # not all is to be done
    await asyncio.sleep(0)
    for _ in range(10):
        door.wait(20, 0.2)
        await asyncio.sleep(0)
    assert door.expected(20) == 1.0, "never shorter than forecast"
    with door.admission.permit(TEXT, RunOptions()) as permit:
        door.admission.confirm(permit, 100)
        for end in (asyncio.Future.cancel, lambda values: values.set_exception(RuntimeError())):
            values: asyncio.Future[Values] = asyncio.get_running_loop().create_future()
            door.admission.compare(permit, values)
            door.now += 30
            end(values)
            await asyncio.sleep(0)
    assert door.expected(100) == 1.0
    # Requests of 60 tokens are known to wait long, and nothing is known of those of more than 63: what is
    # estimated at 60 may be of that class, and what is estimated at 70 of this.
    door = Door(wait_seconds=4)
    door.queue(5, 60)
    door.wait(60, 9.0)
    await asyncio.sleep(0)
    assert (door.expected(60), door.expected(70)) == (pytest.approx(2.08), 1.0)
    for estimate in (60, 70):
        with pytest.raises(QueueFullError, match="would wait for about"):
            door.estimate(text_of(estimate))


async def test_given_vectors_are_priced_before_they_are_prepared() -> None:
    door = Door()
    query, documents = Vectors(np.zeros((400, 2))), (Vectors(np.zeros((640, 2))),) * 8
    request = ScoreRequest(queries=("q",), documents=documents)
    characters = (64 * 9 + 1) // 4
    assert door.estimate(request) == characters + 640 * 8 / 128 + 2
    assert door.estimate(replace(request, explain=1)) == characters + 640 * 8 / 128 + 2, "a usual query"
    request = replace(request, queries=(query,))
    assert door.estimate(request) == 64 * 9 / 4 + 2 * 640 * 8 / 128 + 2
    assert door.estimate(replace(request, explain=1)) == 64 * 9 / 4 + 8 * 640 * 8 / 128 + 2
    door.queue(1, 9900)
    with pytest.raises(QueueFullError, match="wait already"), door.admission.permit(request, RunOptions()):
        pass
    # The cost of a text is learnt from texts alone.
    door = Door()
    with door.admission.permit(request, RunOptions()) as permit:
        door.admission.confirm(permit, 144 + 80 + 2)
    assert door.estimate() == pytest.approx(100, abs=1)
