"""A causal model's sequences, cut between steps, give what one pass gives."""

import asyncio

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from maxsimd.bench.datasets import Pair
from maxsimd.engine import Engine, EngineConfig
from tests.parity.references import loaded
from tests.parity.selection import with_default
from tests.waiting import until

BUDGETS = [7, 16, 61, 200, 1000]


@pytest.fixture(scope="module")
def texts(pairs: list[Pair]) -> list[str]:
    """Mixed lengths, from a few tokens to several hundred."""
    documents = [pair.document[: 20 + 130 * i] for i, pair in enumerate(pairs[:7])]
    return [*documents, "one", "a few words"]


@pytest.mark.parametrize("budget", with_default(BUDGETS, [7]))
async def test_embeddings_do_not_depend_on_the_budget(
    qwen3_embedding: str, texts: list[str], budget: int
) -> None:
    """Those of the last token and those of all tokens."""
    model = loaded(SentenceTransformer, qwen3_embedding)
    config = EngineConfig(model=qwen3_embedding, dtype="float32", max_batch_tokens=budget)
    async with Engine(config) as engine:
        embeddings = (await engine.embed(texts, input_type="document")).embeddings
        np.testing.assert_allclose(embeddings, model.encode_document(texts), atol=1e-5)
        matrices = (await engine.embed_tokens(texts, input_type="document")).embeddings
    for text, ours in zip(texts, matrices, strict=True):
        alone = model.encode(text, output_value="token_embeddings").float().numpy()
        alone = alone / np.linalg.norm(alone, axis=-1, keepdims=True)
        np.testing.assert_allclose(ours, alone, atol=1e-5)


async def test_a_late_interaction_score_does_not_depend_on_the_budget(
    qwen3_embedding: str, texts: list[str]
) -> None:
    """Queries are cut too, and must still be complete before any document is scored."""
    scores = []
    for budget in (7, 4096):
        config = EngineConfig(
            model=qwen3_embedding, dtype="float32", score_type="late-interaction", max_batch_tokens=budget
        )
        async with Engine(config) as engine:
            scores.append((await engine.score("what does this do, and why " * 5, texts)).scores)
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5, atol=1e-4)


async def test_nothing_is_kept_after_the_sequences_are_done(qwen3_embedding: str, texts: list[str]) -> None:
    async with Engine(EngineConfig(model=qwen3_embedding, max_batch_tokens=16)) as engine:
        work = asyncio.create_task(engine.embed(texts))
        await until(lambda: engine.stats().device.prefill_kv > 0)
        await work
        # The last one's result is there just before its keys and values go.
        await until(lambda: engine.stats().device.prefill_kv == 0)
