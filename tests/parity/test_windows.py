"""Long documents read through windows: the best window counts, and for late interaction all of them."""

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, WINDOW_LONG, Engine, EngineConfig, InvalidRequestError, Truncation

QUERY = "How is a file opened for reading?"


@pytest.fixture(scope="module")
def long_documents(pairs: list[Pair]) -> list[str]:
    """From a few to several hundred words."""
    return [" ".join(pair.document for pair in pairs[i : i + 1 + i % 3]) for i in range(6)]


def _windows(ids: np.ndarray, room: int, overlap: int) -> list[np.ndarray]:
    windows, start = [], 0
    while True:
        windows.append(ids[start : start + room])
        if start + room >= len(ids):
            return windows
        start += room - overlap


def _without_ends(engine: Engine, text: str) -> np.ndarray:
    return engine.tokenizer.encode([text], "text")[0]


@pytest.mark.parametrize("overlap", [pytest.param(0, marks=pytest.mark.exhaustive), 7])
async def test_late_interaction_reads_the_tokens_of_all_windows(
    long_documents: list[str], overlap: int
) -> None:
    truncation = Truncation(max_tokens=40, windows=True, window_overlap=overlap)
    async with Engine(EngineConfig(dtype="float32")) as engine:
        ours = (await engine.score(QUERY, long_documents, truncation=truncation)).scores
        query = (await engine.embed_tokens([QUERY], input_type="query")).embeddings[0]
        for score, document in zip(ours, long_documents, strict=True):
            windows = _windows(_without_ends(engine, document), 38, overlap)
            inputs = [[101, *window.tolist(), 102] for window in windows]
            parts = (await engine.embed_tokens(inputs, input_type="document")).embeddings
            assert score == pytest.approx((query @ np.concatenate(parts).T).max(axis=1).sum(), abs=1e-4)


async def test_a_bi_encoder_scores_by_the_best_window(long_documents: list[str]) -> None:
    truncation = Truncation(max_tokens=40, windows=True, window_overlap=5)
    async with Engine(EngineConfig(score_type="bi-encoder", dtype="float32")) as engine:
        ours = (await engine.score(QUERY, long_documents, truncation=truncation)).scores
        query = (await engine.embed([QUERY], input_type="query")).embeddings[0]
        for score, document in zip(ours, long_documents, strict=True):
            windows = _windows(_without_ends(engine, document), 38, 5)
            embedded = await engine.embed([[101, *window.tolist(), 102] for window in windows])
            assert score == pytest.approx((embedded.embeddings @ query).max(), abs=1e-5)


async def test_a_cross_encoder_scores_by_the_best_window(
    bert_cross_encoder: str, long_documents: list[str]
) -> None:
    truncation = Truncation(max_tokens=60, windows=True, window_overlap=10)
    model = CrossEncoder(bert_cross_encoder, device="cpu").model
    async with Engine(EngineConfig(model=bert_cross_encoder, dtype="float32")) as engine:
        ours = await engine.score(QUERY, long_documents, truncation=truncation, use_activation=False)
        query = _without_ends(engine, QUERY)
        tokens = 0
        for score, document in zip(ours.scores, long_documents, strict=True):
            best = -np.inf
            for window in _windows(_without_ends(engine, document), 60 - 3 - len(query), 10):
                ids = [101, *query.tolist(), 102, *window.tolist(), 102]
                types = [0] * (len(query) + 2) + [1] * (len(window) + 1)
                with torch.inference_mode():
                    logits = model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits
                best, tokens = max(best, float(logits)), tokens + len(ids)
            assert score == pytest.approx(best, abs=1e-5)
    assert ours.usage.prompt_tokens == tokens, "usage counts every window"
    assert ours.truncated == 0


async def test_windows_of_several_documents_and_queries_do_not_mix(long_documents: list[str]) -> None:
    queries = [f"{QUERY} {i}" for i in range(len(long_documents))]
    truncation = Truncation(max_tokens=50, windows=True)
    async with Engine(EngineConfig(dtype="float32", max_batch_tokens=512, window_overlap=4)) as engine:
        together = (await engine.score(queries, long_documents, truncation=truncation)).scores
        for i in (0, 4):
            alone = await engine.score(queries[i], long_documents[i], truncation=truncation)
            assert together[i] == pytest.approx(alone.scores[0], abs=1e-4)


@pytest.mark.parametrize(
    "score_type", ["late-interaction", pytest.param("bi-encoder", marks=pytest.mark.exhaustive)]
)
async def test_a_sentence_at_the_end_of_a_long_document_is_found(pairs: list[Pair], score_type: str) -> None:
    """Where cutting the documents misses it."""
    words = " ".join(pair.document for pair in pairs).split()
    documents = [" ".join((words[i * 350 :] + words[: i * 350])[:600]) for i in range(4)]
    documents[3] += " The capital of Mongolia is Ulaanbaatar, a city on the river Tuul."
    query = "What is the capital of Mongolia?"
    async with Engine(EngineConfig(score_type=score_type)) as engine:
        found = await engine.rerank(query, documents, truncation=WINDOW_LONG)
        missed = await engine.rerank(query, documents, truncation=CUT_LONG)
    assert found.results[0].index == 3
    assert missed.results[0].index != 3
    assert found.usage.prompt_tokens > 4 * 600


async def test_windows_that_repeat_more_than_they_read_are_an_error(bert_cross_encoder: str) -> None:
    async with Engine(EngineConfig(model=bert_cross_encoder)) as engine:
        truncation = Truncation(max_tokens=30, windows=True, window_overlap=29)
        with pytest.raises(InvalidRequestError, match="may share at most 13; ask for no more"):
            await engine.score("q", ["word " * 100], truncation=truncation)
        truncation = Truncation(max_tokens=30, windows=True, window_overlap=2)
        with pytest.raises(InvalidRequestError, match="shorten the query"):
            await engine.score("word " * 40, ["word " * 100], truncation=truncation)
