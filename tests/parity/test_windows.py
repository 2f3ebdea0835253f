"""Long documents read through windows: the best window counts, and for late interaction all of them."""

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder

from maxsimd.bench.datasets import Pair
from maxsimd.engine import Engine, EngineConfig, Truncation

QUERY = "How is a file opened for reading?"


@pytest.fixture(scope="module")
def long_documents(pairs: list[Pair]) -> list[str]:
    """From a few to several hundred words."""
    return [" ".join(pair.document for pair in pairs[i : i + 1 + i % 3]) for i in range(4)]


def _windows(ids: np.ndarray, room: int, overlap: int) -> list[np.ndarray]:
    windows, start = [], 0
    while True:
        windows.append(ids[start : start + room])
        if start + room >= len(ids):
            return windows
        start += room - overlap


def _without_ends(engine: Engine, text: str) -> np.ndarray:
    return engine.tokenizer.encode([text], "text")[0]


async def test_late_interaction_reads_the_tokens_of_all_windows(long_documents: list[str]) -> None:
    """Of each document for its own query."""
    truncation = Truncation(max_tokens=40, windows=True)
    queries = [f"{QUERY} {i}" for i in range(len(long_documents))]
    async with Engine(EngineConfig(dtype="float32", max_batch_tokens=512, window_overlap=7)) as engine:
        ours = (await engine.score(queries, long_documents, truncation=truncation)).scores
        for score, query, document in zip(ours, queries, long_documents, strict=True):
            rows = (await engine.embed_tokens([query], input_type="query")).embeddings[0]
            windows = _windows(_without_ends(engine, document), 38, 7)
            inputs = [[101, *window.tolist(), 102] for window in windows]
            parts = (await engine.embed_tokens(inputs, input_type="document")).embeddings
            assert score == pytest.approx((rows @ np.concatenate(parts).T).max(axis=1).sum(), abs=1e-4)


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
