"""Pairs that were scored before: the same bits without a forward pass, however a request is made up."""

import random
from typing import Any

import numpy as np
import pytest

from maxsimd.bench.datasets import Pair
from maxsimd.engine import Engine, EngineConfig, InvalidRequestError
from maxsimd.engine.cache.scores import CachedScore, ScoreCache
from tests.checkpoints import language_models
from tests.conftest import SharedCheckpoints
from tests.nearly import nearly

QUERY = "how is a file opened"


@pytest.fixture(scope="module")
def listwise(checkpoints: SharedCheckpoints) -> str:
    return checkpoints(language_models.jina_reranker_v3)


@pytest.fixture(scope="module")
def documents(pairs: list[Pair]) -> list[str]:
    return list(dict.fromkeys(pair.document for pair in pairs))[:60]


def _tokens_run(engine: Engine) -> float:
    run = engine.metrics.registry.get_sample_value("maxsimd_tokens_total")
    assert run is not None
    return run


async def test_a_repeated_request_runs_nothing_and_has_the_same_bits(
    bert_cross_encoder: str, documents: list[str]
) -> None:
    async with Engine(EngineConfig(model=bert_cross_encoder, dtype="float32")) as engine:
        first = await engine.score(QUERY, documents)
        run = _tokens_run(engine)
        again = await engine.score(QUERY, documents)
        assert _tokens_run(engine) == run
        assert again.scores == first.scores
        assert (again.truncated, again.usage.prompt_tokens) == (first.truncated, first.usage.prompt_tokens)
        assert again.usage.cached_documents == len(documents)
        assert again.usage.cached_tokens == again.usage.prompt_tokens
        raw = await engine.score(QUERY, documents, use_activation=False)
        new = await engine.score(QUERY, documents, use_activation=False, cache="bypass")
        assert raw.scores == new.scores, "what is cached is the logit"
        assert new.usage.cached_documents == 0


@pytest.mark.parametrize("seed", range(3))
async def test_any_mixture_of_known_and_new_pairs_scores_as_without_a_cache(
    bert_cross_encoder: str, documents: list[str], seed: int
) -> None:
    draw = random.Random(seed)
    long = [" ".join(draw.choices(documents, k=12)) for _ in range(4)]
    texts = [*documents[:20], *long]
    queries = [QUERY, "sort", " ".join(documents[:3])]
    async with Engine(EngineConfig(model=bert_cross_encoder, dtype="float32")) as engine:
        num_cached = 0
        for _ in range(8):
            chosen = draw.choices(texts, k=draw.randint(1, 15))
            asked: Any = draw.choice(queries)
            if draw.random() < 0.5:
                asked = draw.choices(queries, k=len(chosen))
            options: Any = {"truncation": draw.choice(["cut", "window"])}
            cached = await engine.score(asked, chosen, **options)
            plain = await engine.score(asked, chosen, cache="bypass", **options)
            np.testing.assert_allclose(cached.scores, plain.scores, atol=1e-5)
            assert cached.truncated == plain.truncated
            assert cached.usage.prompt_tokens == plain.usage.prompt_tokens
            num_cached += cached.usage.cached_documents
        assert num_cached > 0


async def test_refreshed_pairs_are_run_again_and_cleared_ones_forgotten(bert_cross_encoder: str) -> None:
    async with Engine(EngineConfig(model=bert_cross_encoder, dtype="float32")) as engine:
        await engine.score(QUERY, "a")
        assert (await engine.score(QUERY, "a", cache="refresh")).usage.cached_documents == 0
        assert (await engine.score(QUERY, "a")).usage.cached_documents == 1
        await engine.clear_cache()
        assert (await engine.score(QUERY, "a")).usage.cached_documents == 0
        for change in ({"truncation": "window"}, {"truncation": "error"}):
            assert (await engine.score(QUERY, "a", **change)).usage.cached_documents == 0  # type: ignore[arg-type]


async def test_without_memory_there_is_no_cache(bert_cross_encoder: str) -> None:
    async with Engine(EngineConfig(model=bert_cross_encoder, dtype="float32", cache_mb=0)) as engine:
        for _ in range(2):
            assert (await engine.score(QUERY, "a")).usage.cached_documents == 0
        await engine.clear_cache()


async def test_errors_name_a_document_by_its_index_in_the_request(bert_cross_encoder: str) -> None:
    async with Engine(EngineConfig(model=bert_cross_encoder, dtype="float32")) as engine:
        await engine.score(QUERY, ["a", "b"], truncation="error")
        with pytest.raises(InvalidRequestError, match=r"documents\[2\]"):
            await engine.score(QUERY, ["a", "b", "word " * 600], truncation="error")
        found = await engine.score(QUERY, ["a", "\ud800", "b", "c"], truncation="error", on_error="report")
        assert list(found.errors) == [1]
        alone = await engine.score(QUERY, ["a", "b", "c"], cache="bypass")
        assert [found.scores[i] for i in (0, 2, 3)] == nearly(alone.scores)
        again = await engine.score(QUERY, ["c", "a"], truncation="error")
        assert again.usage.cached_documents == 2
        assert again.scores == nearly([alone.scores[2], alone.scores[0]])


async def test_listwise_scores_are_those_of_the_whole_list(listwise: str, documents: list[str]) -> None:
    async with Engine(EngineConfig(model=listwise, dtype="float32")) as engine:
        texts = documents[:9]
        first = await engine.score(QUERY, texts)
        again = await engine.score(QUERY, texts)
        assert again.scores == first.scores
        assert (again.usage.cached_documents, again.usage.prompt_tokens) == (9, first.usage.prompt_tokens)
        for others in (texts[:8], texts[::-1]):
            found = await engine.score(QUERY, others)
            assert found.usage.cached_documents == 0
            plain = await engine.score(QUERY, others, cache="bypass")
            assert found.scores == nearly(plain.scores)


async def test_labels_of_pairs_are_not_taken_from_the_cache(bert_cross_encoder: str) -> None:
    async with Engine(EngineConfig(model=bert_cross_encoder, dtype="float32")) as engine:
        await engine.score(QUERY, "a")
        labels = await engine.classify(QUERY, text_pairs=["a"])
        assert labels.usage.cached_tokens == 0


def test_a_key_depends_on_each_text_by_itself() -> None:
    keys = {
        ScoreCache.key(*texts)
        for texts in (("a", "bc", ""), ("ab", "c", ""), ("", "abc", ""), ("a", "b", "c"))
    }
    assert len(keys) == 4


def test_the_store_holds_no_more_than_its_limit() -> None:
    cache = ScoreCache(10 * 512)
    cache.put((bytes([i]) * 32, CachedScore(float(i), 1, 0, False, 1)) for i in range(30))
    assert (cache.entries, cache.memory_bytes, cache.evictions) == (10, 5120, 20)
    assert sum(entry is not None for entry in cache.find([bytes([i]) * 32 for i in range(30)])) == 10
    assert (cache.hits, cache.misses) == (10, 20)
