"""Budgets and lengths that leave no room are refused at start."""

from dataclasses import replace
from typing import Any

import pytest

from maxsimd.engine import CUT_LONG, Engine, EngineConfig, ModelLoadError, Truncation
from tests.checkpoints import bi_encoders, language_models
from tests.checkpoints.shared import SharedCheckpoints


async def test_an_option_below_the_shortest_sequence_is_refused(
    stanford_colbert: str, checkpoints: SharedCheckpoints
) -> None:
    """A query is filled up to 32 tokens."""
    reranker = checkpoints(language_models.qwen3_reranker)
    listwise = checkpoints(language_models.jina_reranker_v3)
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        (stanford_colbert, {"max_batch_tokens": 16}, "a query of.*32 tokens.*than 16.*max_batch_tokens"),
        (stanford_colbert, {"max_model_len": 20}, "at least 32 tokens.*20 tokens.*max_model_len"),
        (reranker, {"max_batch_tokens": 7, "packing": "off"}, "no more than 7"),
        (listwise, {"max_model_len": 30}, "a query with one document"),
    )
    for model, options, told in cases:
        with pytest.raises(ModelLoadError, match=told):
            await Engine(EngineConfig(model=model, **options)).start()


@pytest.mark.parametrize("packing", ["auto", "off"])
async def test_the_least_budget_runs_every_kind_of_request(stanford_colbert: str, packing: str) -> None:
    usual = EngineConfig(model=stanford_colbert, dtype="float32", packing=packing)
    long = Truncation(max_tokens=32)
    async with Engine(replace(usual, max_batch_tokens=32)) as engine, Engine(usual) as roomy:
        exact = (await roomy.score("a", ["b", "word " * 100], truncation=long)).scores
        ours = (await engine.score("a", ["b", "word " * 100], truncation=CUT_LONG)).scores
        assert ours == pytest.approx(exact, abs=1e-4)
        # A query that the request cuts shorter is still filled up to the checkpoint's length.
        exact, ours = [
            (await each.score("word " * 9, ["b"], truncation=Truncation(max_tokens=6))).scores
            for each in (roomy, engine)
        ]
        assert ours == pytest.approx(exact, abs=1e-4)
        for input_type in (None, "query", "document"):
            for each in (engine, roomy):
                embedded = await each.embed_tokens("word " * 100, input_type=input_type, truncation=long)
                assert embedded.usage.prompt_tokens == 32


@pytest.mark.parametrize("packing", ["auto", pytest.param("off", marks=pytest.mark.exhaustive)])
async def test_a_budget_must_hold_a_token_of_each_text(
    bert_cross_encoder: str, packing: str, checkpoints: SharedCheckpoints
) -> None:
    """[CLS] a [SEP], and for a pair [CLS] a [SEP] a [SEP]; a causal model runs in chunks of any budget."""
    for options in (
        {"model": checkpoints(bi_encoders.gte), "max_batch_tokens": 3, "packing": packing},
        {"model": bert_cross_encoder, "max_batch_tokens": 5, "packing": packing},
        {"model": checkpoints(language_models.qwen3_reranker), "max_batch_tokens": 7},
    ):
        async with Engine(EngineConfig(dtype="float32", **options)) as engine:  # type: ignore[arg-type]
            assert len((await engine.score("a", ["b", "c"])).scores) == 2
