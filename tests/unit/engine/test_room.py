"""Budgets and lengths that leave no room are refused at start and never stop a running engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxsimd.engine import CUT_LONG, Engine, EngineConfig, ModelLoadError, RequestFailedError, Truncation
from maxsimd.engine.preprocess import Prepared, RequestIds
from maxsimd.engine.requests import EmbedRequest, RunOptions
from maxsimd.scheduler import Sequence, Tokens
from tests.checkpoints import bi_encoders, language_models


async def _refusal(**settings: Any) -> str:
    with pytest.raises(ModelLoadError) as refused:
        await Engine(EngineConfig(**settings)).start()
    return str(refused.value)


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("max_batch_tokens", 16, ("a query of", "at least 32 tokens", "no more than 16")),
        ("max_model_len", 20, ("at least 32 tokens", "20 tokens")),
    ],
)
async def test_an_option_below_expanded_queries_is_refused(
    stanford_colbert: str, option: str, value: int, told: tuple[str, ...]
) -> None:
    message = await _refusal(model=stanford_colbert, **{option: value})
    for part in (*told, option):
        assert part in message


@pytest.mark.parametrize("packing", ["auto", "off"])
async def test_the_least_budget_runs_every_kind_of_request(stanford_colbert: str, packing: str) -> None:
    usual = EngineConfig(model=stanford_colbert, dtype="float32", packing=packing)
    async with Engine(replace(usual, max_batch_tokens=32)) as engine, Engine(usual) as roomy:
        documents, long = ["b", "word " * 100], Truncation(max_tokens=32)
        exact = (await roomy.score("a", documents, truncation=long)).scores
        ours = (await engine.score("a", documents, truncation=CUT_LONG)).scores
        assert ours == pytest.approx(exact, abs=1e-4)
        # A query that the request cuts shorter is still filled up to the checkpoint's length.
        short = Truncation(max_tokens=6)
        exact, ours = [
            (await each.score("word " * 9, ["b"], truncation=short)).scores for each in (roomy, engine)
        ]
        assert ours == pytest.approx(exact, abs=1e-4)
        for input_type in (None, "query", "document"):
            for each in (engine, roomy):
                embedded = await each.embed_tokens("word " * 100, input_type=input_type, truncation=long)
                assert embedded.usage.prompt_tokens == 32
        assert engine.is_healthy


@pytest.mark.parametrize("packing", ["auto", pytest.param("off", marks=pytest.mark.exhaustive)])
async def test_a_budget_must_hold_a_token_of_each_text_and_prompts(
    bert_cross_encoder: str, packing: str, tmp_path: Path
) -> None:
    """[CLS] a [SEP], and for a pair [CLS] a [SEP] a [SEP]; BGE's prompt for queries has nine words."""
    assert "a query of" in await _refusal(model=bi_encoders.bge(tmp_path), max_batch_tokens=8)
    assert "at least 3 tokens" in await _refusal(max_batch_tokens=2, packing=packing)
    async with Engine(EngineConfig(max_batch_tokens=3, packing=packing)) as engine:
        assert len((await engine.score("a", ["b", "c"])).scores) == 2
    pair = {"model": bert_cross_encoder, "packing": packing}
    assert "a pair of" in await _refusal(max_batch_tokens=4, **pair)
    async with Engine(EngineConfig(max_batch_tokens=5, **pair)) as engine:  # type: ignore[arg-type]
        assert len((await engine.score("a", ["b", "c"])).scores) == 2


async def test_a_causal_model_runs_in_chunks_of_any_budget(folder: Path) -> None:
    reranker = language_models.qwen3_reranker(folder / "room-qwen3-reranker")
    async with Engine(EngineConfig(model=reranker, max_batch_tokens=7)) as engine:
        assert (await engine.score("a", ["b"])).scores
    assert "no more than 7" in await _refusal(model=reranker, max_batch_tokens=7, packing="off")
    assert "max_model_len" in await _refusal(model=reranker, max_model_len=30)
    listwise = language_models.jina_reranker_v3(folder / "room-jina-v3")
    assert "a query with one document" in await _refusal(model=listwise, max_model_len=30)


async def test_a_sequence_that_fits_no_step_fails_its_request_alone() -> None:
    """No request makes one; if one did, the engine must go on."""

    def too_long(request: RequestIds) -> Prepared:
        ids = np.full(100, 5, dtype=np.int32)
        return Prepared(
            [Sequence.text(request.next_sequence_id(), request.slot(0), "embed", Tokens(ids))], 1, 0
        )

    async with Engine(EngineConfig(max_batch_tokens=64)) as engine:
        running: Any = engine._running
        with pytest.raises(RequestFailedError, match="100 tokens do not fit a step of 64"):
            await running.run(too_long, EmbedRequest(texts=("a",), task="embed"), RunOptions())
        assert engine.is_healthy
        assert (await engine.score("a", ["b"])).scores
