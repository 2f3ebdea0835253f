"""Tests that ask for the same configuration get the same engine, and few run at a time."""

import pytest

from maxsimd.bench.datasets import Pair
from maxsimd.engine import EngineConfig
from tests.engines import Engines


async def test_one_engine_serves_all_who_ask_for_its_configuration(bert_cross_encoder: str) -> None:
    configs = [EngineConfig(model=bert_cross_encoder, max_batch_tokens=tokens) for tokens in (64, 128, 256)]
    async with Engines(most=2) as engines:
        first, second = await engines(configs[0]), await engines(configs[1])
        assert await engines(configs[0]) is first
        third = await engines(configs[2])
        assert [engine.is_healthy for engine in (first, second, third)] == [True, False, True]
        assert await engines(configs[1]) is not second
    assert not any(engine.is_healthy for engine in (first, third))


async def test_scores_of_the_same_pairs_are_computed_once(bert_cross_encoder: str, pairs: list[Pair]) -> None:
    config = EngineConfig(model=bert_cross_encoder)
    async with Engines() as engines:
        scores = await engines.scores(config, pairs[:3])
        assert await engines.scores(config, pairs[:3]) is scores
        fewer = await engines.scores(config, pairs[:2])
        engine = await engines(config)
        queries, documents = [pair.query for pair in pairs[:3]], [pair.document for pair in pairs[:3]]
        assert scores == pytest.approx((await engine.score(queries, documents)).scores, abs=1e-3)
    assert fewer == pytest.approx(scores[:2], abs=1e-2)
