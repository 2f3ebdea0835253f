"""Tenants of an engine: weights and rates that are set while it runs, priorities by name."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from maxsimd.engine import (
    Engine,
    EngineConfig,
    InvalidRequestError,
    QueueFullError,
    RequestTooLargeError,
    SyncEngine,
    Tenant,
)
from tests.waiting import until

DOCUMENTS = [f"{i} " + "word " * 60 for i in range(400)]


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine(EngineConfig(dtype="float32", max_batch_tokens=256, cache_mb=0)) as engine:
        yield engine


def tokens_of(engine: Engine, tenant: str) -> float:
    return engine.metrics.registry.get_sample_value("maxsimd_tenant_tokens_total", {"tenant": tenant}) or 0.0


async def _shares(engine: Engine, least: int) -> float:
    """How many times the tokens of `a` are run of `b`, while both have work, until `a` has some more."""
    a, b = tokens_of(engine, "a"), tokens_of(engine, "b")
    await until(lambda: tokens_of(engine, "a") - a >= least)
    return (tokens_of(engine, "b") - b) / (tokens_of(engine, "a") - a)


@pytest.mark.exhaustive
async def test_weights_that_are_set_hold_for_requests_that_wait(engine: Engine) -> None:
    engine.set_tenants({"a": Tenant(), "b": Tenant()})
    calls = [asyncio.create_task(engine.score("q", DOCUMENTS, tenant=tenant)) for tenant in ("a", "b")]
    await until(lambda: engine.stats().open_requests == 2)
    assert 0.6 < await _shares(engine, 2000) < 1.7
    engine.set_tenants({"a": Tenant(), "b": Tenant(weight=10)})
    assert await _shares(engine, 1000) > 2.5, "and the oldest request gets its part"
    assert not calls[0].done()
    assert not calls[1].done(), "both had work all the time"
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_rate_is_refused_counted_and_goes_on_after_a_restart() -> None:
    engine = Engine(EngineConfig(dtype="float32"))
    engine.set_tenants({"a": Tenant(requests_per_minute=2)})
    async with engine:
        await engine.score("q", "d", tenant="a")
        await engine.embed("q", tenant="a")
        with pytest.raises(QueueFullError, match="used up the 2 requests") as refused:
            await engine.rerank("q", ["d"], tenant="a")
        assert 0 < refused.value.retry_after <= 30
        await engine.rerank("q", ["d"], tenant="b")
    async with engine:
        with pytest.raises(QueueFullError):
            await engine.score("q", "d", tenant="a")
        engine.set_tenants({})
        await engine.score("q", "d", tenant="a")


async def test_a_document_that_is_cached_costs_its_tenant_next_to_nothing() -> None:
    documents = DOCUMENTS[:40]
    async with Engine(EngineConfig(dtype="float32")) as engine:
        engine.set_tenants({"a": Tenant(tokens_per_minute=1000)})
        usage = (await engine.score("q", documents)).usage
        assert usage.prompt_tokens > 2000
        for _ in range(10):
            await engine.score("q", documents, tenant="a")
        await engine.score("q", documents, tenant="a", cache="bypass")
        with pytest.raises(QueueFullError, match="used up the 1000 tokens"):
            await engine.score("q", "d", tenant="a")


async def test_batch_is_a_priority_of_any_method(engine: Engine) -> None:
    assert len((await engine.score("q", ["d", "e"], priority="batch")).scores) == 2
    assert len((await engine.rerank("q", ["d", "e"], priority="interactive")).results) == 2
    assert len((await engine.embed(["d"], priority="batch")).embeddings) == 1
    with pytest.raises(InvalidRequestError, match="priority 'urgent' is not known") as refused:
        await engine.embed_tokens("d", priority="urgent")  # type: ignore[arg-type]
    assert refused.value.param == "priority"
    assert engine.stats().requests == 0


def test_the_engine_for_scripts_has_tenants_too() -> None:
    with SyncEngine(EngineConfig(dtype="float32")) as engine:
        engine.set_tenants({"a": Tenant(max_request_tokens=1, requests_per_minute=1)})
        engine.score("q", "d")
        with pytest.raises(RequestTooLargeError, match="have max_request_tokens of the tenant 'a' raised"):
            engine.score("q", "d", tenant="a")
