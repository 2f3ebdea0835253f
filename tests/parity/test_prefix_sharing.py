"""What all pairs of a query begin with is run once, and the scores are the same."""

import asyncio

import numpy as np
import pytest

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, WINDOW_LONG, Engine, EngineConfig
from tests.checkpoints import cross_encoders, language_models
from tests.parity import references
from tests.waiting import until

QUERY = "How is a file opened for reading, and what is returned when there is none of that name?"


@pytest.fixture(scope="module", params=["qwen3-reranker", "mxbai", "gemma", "llama", "qwen2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    builders = {
        "qwen3-reranker": language_models.qwen3_reranker,
        "mxbai": language_models.mxbai_rerank_v2,
        "gemma": language_models.bge_reranker_v2_gemma,
        "llama": cross_encoders.llama,
        "qwen2": cross_encoders.qwen2,
    }
    return builders[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def documents(pairs: list[Pair]) -> list[str]:
    return [pair.document for pair in pairs[:50]]


async def _run(
    checkpoint: str, documents: list[str], sharing: str, budget: int = 2048
) -> tuple[np.ndarray, int]:
    config = EngineConfig(model=checkpoint, dtype="float32", prefix_sharing=sharing, max_batch_tokens=budget)
    async with Engine(config) as engine:
        result = await engine.score(QUERY, documents, truncation=CUT_LONG, use_activation=False)
        # The last pair's results are there just before its prefix goes.
        await until(lambda: engine.on_device.prepared.runner.held == 0)
        return np.array(result.scores), result.usage.cached_tokens


@pytest.mark.parametrize("budget", [37, 300, 2048])
async def test_scores_with_and_without_sharing_are_equal(
    checkpoint: str, documents: list[str], budget: int
) -> None:
    """Also where the prefix or a pair is cut between steps."""
    shared, saved = await _run(checkpoint, documents, "auto", budget)
    apart, none = await _run(checkpoint, documents, "off")
    # Logits: float32 knows them to so many parts of their own size.
    np.testing.assert_allclose(shared, apart, atol=1e-5 * max(1.0, np.abs(apart).max()), rtol=0)
    assert saved > 8 * (len(documents) - 1)
    assert none == 0


async def test_scores_equal_the_model_cards(
    documents: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint = language_models.qwen3_reranker(tmp_path_factory.mktemp("card"))
    async with Engine(EngineConfig(model=checkpoint, dtype="float32")) as engine:
        result = await engine.score(QUERY, documents, truncation=CUT_LONG)
    reference = references.qwen3_reranker(checkpoint, [QUERY] * len(documents), documents)
    np.testing.assert_allclose(result.scores, reference, atol=1e-5)


async def test_many_requests_at_a_time_do_not_mix_their_prefixes(
    checkpoint: str, documents: list[str]
) -> None:
    queries = [f"{word} {QUERY}" for word in ("why", "when", "where", "who")]
    async with Engine(EngineConfig(model=checkpoint, dtype="float32", max_batch_tokens=300)) as engine:
        together = await asyncio.gather(
            *(engine.score(query, documents[:10], truncation=CUT_LONG) for query in queries)
        )
        for query, result in zip(queries, together, strict=True):
            alone = await engine.score(query, documents[:10], truncation=CUT_LONG)
            np.testing.assert_allclose(result.scores, alone.scores, atol=1e-5, rtol=1e-5)


async def test_a_request_that_is_cancelled_leaves_no_prefix_behind(
    checkpoint: str, documents: list[str]
) -> None:
    async with Engine(EngineConfig(model=checkpoint, dtype="float32", max_batch_tokens=200)) as engine:
        for delay in (0.005, 0.02, 0.05):
            task = asyncio.create_task(engine.score(QUERY, documents, truncation=CUT_LONG))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await engine.score("a", ["b", "c"])
        # The last pair's results are there just before its prefix goes.
        await until(lambda: engine.on_device.prepared.runner.held == 0)


async def test_windows_share_their_prefix_too(checkpoint: str, documents: list[str]) -> None:
    long = [" ".join(documents[i : i + 8]) for i in range(0, 40, 8)]
    scores = []
    for sharing in ("auto", "off"):
        config = EngineConfig(
            model=checkpoint, dtype="float32", prefix_sharing=sharing, max_model_len=400, window_overlap=10
        )
        async with Engine(config) as engine:
            scores.append((await engine.score(QUERY, long, truncation=WINDOW_LONG)).scores)
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-5, rtol=1e-5)
