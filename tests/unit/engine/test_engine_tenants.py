"""Tenants of an engine: weights and rates that are set while it runs, priorities by name."""

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

DOCUMENTS = [f"{i} " + "word " * 60 for i in range(400)]


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine(EngineConfig(dtype="float32", max_batch_tokens=256, cache_mb=0)) as engine:
        yield engine


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


async def test_a_cached_document_costs_its_tenant_next_to_nothing() -> None:
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
