"""Engines that cache: what is encoded and scored once, and that nothing wrong ever comes out."""

import asyncio
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from maxsimd.bench.datasets import Pair
from maxsimd.engine import (
    CUT_LONG,
    Engine,
    EngineConfig,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    Truncation,
)
from maxsimd.engine.metrics import EngineStats
from maxsimd.engine.processors import dual_encoder
from maxsimd.engine.scoring import scorer
from tests.checkpoints import language_models
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.native_bfloat16 import needs_native_bfloat16
from tests.nearly import nearly
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUERY = "how is a file read"


@pytest.fixture(scope="module")
def documents(pairs: list[Pair]) -> list[str]:
    texts = list(dict.fromkeys(" ".join(pair.document.split()[:20]) for pair in pairs))[:11]
    return [*texts, " ".join(texts * 4)]


async def bare(engines: Engines, config: EngineConfig) -> Engine:
    engine = await engines(config)
    await engine.clear_cache()
    return engine


@pytest_asyncio.fixture(loop_scope="module")
async def engine(engines: Engines, gte: str) -> Engine:
    return await bare(engines, EngineConfig(model=gte, score_type="late-interaction", dtype="float32"))


@pytest_asyncio.fixture(loop_scope="module")
async def cross_encoder(engines: Engines, bert_cross_encoder: str) -> Engine:
    return await bare(engines, EngineConfig(model=bert_cross_encoder, dtype="float32"))


def tokens_run(engine: Engine) -> float:
    run = engine.metrics.registry.get_sample_value("maxsimd_tokens_total")
    assert run is not None
    return run


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"score_type": "late-interaction"}, 1e-3),
        ({"score_type": "bi-encoder"}, 1e-3),
        ({"cache_precision": "int8"}, 3e-2),
        pytest.param({"dtype": "bfloat16"}, 1e-3, marks=[needs_native_bfloat16, pytest.mark.exhaustive]),
    ],
    ids=["late interaction", "bi-encoder", "int8", "bfloat16"],
)
async def test_a_cached_document_scores_as_one_that_is_encoded(
    options: dict[str, Any], tolerance: float, engines: Engines, gte: str, documents: list[str]
) -> None:
    engine = await bare(engines, EngineConfig(**{"model": gte, "dtype": "float32"} | options))
    new = (await engine.score(QUERY, documents, truncation=CUT_LONG, cache="bypass")).scores
    first = (await engine.score(QUERY, documents, truncation=CUT_LONG)).scores
    again = await engine.score(QUERY, documents, truncation=CUT_LONG)
    np.testing.assert_allclose(first, new, atol=tolerance)
    np.testing.assert_allclose(again.scores, new, atol=tolerance)
    assert again.usage.cached_documents == len(documents)
    assert again.usage.prompt_tokens - again.usage.cached_tokens < 20
    assert again.truncated > 0, "what was cut once is still told of"


async def test_equal_documents_in_requests_are_encoded_once(engine: Engine, documents: list[str]) -> None:
    before = tokens_run(engine)
    many = await engine.score("why", documents[:5] * 5, truncation=CUT_LONG)
    np.testing.assert_allclose(many.scores, many.scores[:5] * 5, atol=1e-6)
    once = tokens_run(engine) - before
    await engine.clear_cache()
    before = tokens_run(engine)
    queries = [f"why {i}" for i in range(3)]
    together = await asyncio.gather(*(engine.score(q, documents[:5], truncation=CUT_LONG) for q in queries))
    assert tokens_run(engine) - before <= once + 3 * 10
    for query, result in zip(queries, together, strict=True):
        alone = await engine.score(query, documents[:5], truncation=CUT_LONG, cache="bypass")
        np.testing.assert_allclose(result.scores, alone.scores, atol=1e-4)


async def test_numbers_that_are_not_finite_are_not_cached(engine: Engine, monkeypatch: Any) -> None:
    runner, cache = engine.device_model.runner, engine.device_model.cache
    forward = runner.forward
    assert cache is not None
    for is_written in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(runner, "forward", lambda step: (forward(step)[0] * math.nan, forward(step)[1]))
            with pytest.raises(RequestFailedError, match="not finite"):
                await engine.score(QUERY, ["a text"])
            assert not is_written or cache.flush(20)
            with pytest.raises(RequestFailedError, match="not finite"):
                await engine.embed(["a text"], input_type="document", encoding="muvera")
        assert cache.entries == 0
    found = await engine.embed(["a text"], input_type="document", encoding="muvera")
    assert np.isfinite(found.embeddings[0]).all()


# Pairs that were scored before: the same bits without a forward pass, however a request is made up.


async def test_tenants_may_cache_apart(
    engine: Engine, cross_encoder: Engine, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (engine, cross_encoder):
        monkeypatch.setattr(each, "config", replace(each.config, cache_by_tenant=True))
        counts = [
            (await each.score(QUERY, documents, tenant=tenant)).usage.cached_documents
            for tenant in ("one", "two", "one", "")
        ]
        assert counts == [0, 0, len(documents), 0]
    for tenant, cached in (("one", len(documents)), ("three", 0)):
        found = await engine.embed(documents, input_type="document", encoding="muvera", tenant=tenant)
        assert found.usage.cached_documents == cached


async def test_a_repeated_request_gives_the_same_bits(cross_encoder: Engine, documents: list[str]) -> None:
    first = await cross_encoder.score(QUERY, documents)
    run = tokens_run(cross_encoder)
    again = await cross_encoder.score(QUERY, documents)
    assert tokens_run(cross_encoder) == run
    assert again.scores == first.scores
    assert (again.truncated, again.usage.prompt_tokens) == (first.truncated, first.usage.prompt_tokens)
    assert again.usage.cached_documents == len(documents)
    assert again.usage.cached_tokens == again.usage.prompt_tokens
    raw = await cross_encoder.score(QUERY, documents, use_activation=False)
    new = await cross_encoder.score(QUERY, documents, use_activation=False, cache="bypass")
    assert raw.scores == new.scores, "what is cached is the logit"
    assert new.usage.cached_documents == 0
    labels = await cross_encoder.classify(QUERY, text_pairs=documents[:1])
    assert labels.usage.cached_tokens == 0, "labels are not taken from the cache"
    for number in (2, 2, 3):  # new, cached, and one of them new
        short = Truncation(max_query_tokens=2)
        found = await cross_encoder.score(QUERY, documents[:number], truncation=short)
        assert (found.truncated, found.truncated_queries) == (1, 1)


async def test_known_and_new_pairs_score_as_uncached(cross_encoder: Engine, documents: list[str]) -> None:
    draw = random.Random(0)
    texts = [*documents, *(" ".join(draw.choices(documents[:11], k=12)) for _ in range(2))]
    queries = [QUERY, "sort", " ".join(documents[:3])]
    num_cached = 0
    for _ in range(4):
        chosen = draw.choices(texts, k=draw.randint(1, 7))
        asked: Any = draw.choice(queries)
        if draw.random() < 0.5:
            asked = draw.choices(queries, k=len(chosen))
        options: Any = {"truncation": draw.choice(["cut", "window"])}
        cached = await cross_encoder.score(asked, chosen, **options)
        plain = await cross_encoder.score(asked, chosen, cache="bypass", **options)
        np.testing.assert_allclose(cached.scores, plain.scores, atol=1e-5)
        assert cached.truncated == plain.truncated
        assert cached.usage.prompt_tokens == plain.usage.prompt_tokens
        num_cached += cached.usage.cached_documents
    assert num_cached > 0


async def test_errors_name_a_document_by_its_index_in_the_request(cross_encoder: Engine) -> None:
    await cross_encoder.score(QUERY, ["a", "b"], truncation="error")
    with pytest.raises(InvalidRequestError, match=r"documents\[2\]"):
        await cross_encoder.score(QUERY, ["a", "b", "word " * 600], truncation="error")
    found = await cross_encoder.score(QUERY, ["a", "\ud800", "b", "c"], truncation="error", on_error="report")
    assert list(found.errors) == [1]
    alone = await cross_encoder.score(QUERY, ["a", "b", "c"], cache="bypass")
    assert [found.scores[i] for i in (0, 2, 3)] == nearly(alone.scores)
    again = await cross_encoder.score(QUERY, ["c", "a"], truncation="error")
    assert again.usage.cached_documents == 2
    assert again.scores == nearly([alone.scores[2], alone.scores[0]])


async def test_listwise_scores_whole_lists(checkpoints: SharedCheckpoints, documents: list[str]) -> None:
    listwise = checkpoints(language_models.jina_reranker_v3)
    async with Engine(EngineConfig(model=listwise, dtype="float32")) as engine:
        texts = [*documents[:4], documents[0]]  # equal ones have different scores
        first = await engine.score(QUERY, texts)
        again = await engine.score(QUERY, texts)
        assert again.scores == first.scores
        assert (again.usage.cached_documents, again.usage.prompt_tokens) == (5, first.usage.prompt_tokens)
        for others in (texts[:4], texts[::-1]):
            found = await engine.score(QUERY, others)
            assert found.usage.cached_documents == 0
            assert found.scores == nearly((await engine.score(QUERY, others, cache="bypass")).scores)


# Documents whose embeddings are cached are work like any other: priced, limited, scheduled, cancelled.


@pytest.fixture(scope="module")
def lines(pairs: list[Pair]) -> list[str]:
    return list(dict.fromkeys(" ".join(pair.document.split()[:10]) for pair in pairs))[:120]


@pytest_asyncio.fixture(loop_scope="module")
async def small_steps(
    engines: Engines, stanford_colbert: str, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> Engine:
    """An engine that takes few tokens into its queue and into a step, with all lines cached."""
    monkeypatch.setattr(dual_encoder, "ON_HOST", dual_encoder.BatchLimits(rows=64, documents=512))
    monkeypatch.setattr(scorer, "ROWS_PER_TOKEN", 2)
    few: dict[str, Any] = {"max_batch_tokens": 64, "max_queued_tokens": 4000, "max_wait_seconds": 30.0}
    engine = await engines(EngineConfig(model=stanford_colbert, dtype="float32", **few))
    for start in range(0, len(lines), 20):
        await engine.score("warm up", lines[start : start + 20], truncation=CUT_LONG)
    assert engine.device_model.cache is not None
    engine.device_model.cache.flush()
    return engine


async def test_cached_documents_in_batches_score_as_new_ones(small_steps: Engine, lines: list[str]) -> None:
    def steps() -> float:
        return small_steps.metrics.registry.get_sample_value("maxsimd_step_seconds_count") or 0

    cached = await small_steps.score(QUERY, lines, truncation=CUT_LONG)
    before = steps()
    again = await small_steps.score(QUERY, lines, truncation=CUT_LONG)
    assert steps() - before > 5, "they were scored in parts, one step each"
    new = await small_steps.score(QUERY, lines, truncation=CUT_LONG, cache="bypass")
    assert (cached.usage.cached_documents, new.usage.cached_documents) == (len(lines), 0)
    np.testing.assert_allclose(cached.scores, new.scores, atol=1e-4)
    assert again.scores == cached.scores
    crowd = [small_steps.score(f"query {i}", lines, truncation=CUT_LONG) for i in range(20)]
    answers = await asyncio.gather(*crowd, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, QueueFullError)]
    served = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert refused
    assert served
    assert len(refused) + len(served) == len(crowd)
    await until(lambda: small_steps.stats() == EngineStats())
