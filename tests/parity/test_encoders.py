"""Bi-encoders and late interaction read as much of texts as their checkpoints say, in however many steps, and
give what sentence-transformers gives."""

import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder, SentenceTransformer

from maxsimd.bench.datasets import Pair
from maxsimd.engine import WINDOW_LONG, Engine, EngineConfig, Truncation
from tests.engines import Engines
from tests.parity.references import loaded

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG_QUERY = "how is a file read " * 40
# How many tokens of a document each reads, and the longest query.
LENGTHS = {"stanford_colbert": (180, 32), "native_multi_vector": (128, 48)}


async def test_embeddings_cut_between_steps_equal_encode(
    qwen3_embedding: str, engines: Engines, pairs: list[Pair]
) -> None:
    """Those of the last token, their first dimensions, and those of all tokens."""
    texts = [*(pair.document[: 20 + 130 * i] for i, pair in enumerate(pairs[:7])), "one", "a few words"]
    engine = await engines(EngineConfig(model=qwen3_embedding, dtype="float32", max_batch_tokens=7))
    model = loaded(SentenceTransformer, qwen3_embedding)
    whole = await engine.embed(texts, input_type="document")
    np.testing.assert_allclose(whole.embeddings, model.encode_document(texts), atol=1e-5)
    short = await engine.embed(texts, input_type="query", dimensions=32)
    first = model.encode_query(texts, truncate_dim=32, normalize_embeddings=True)
    np.testing.assert_allclose(short.embeddings, first, atol=1e-5)
    matrices = (await engine.embed_tokens(texts, input_type="document")).embeddings
    for text, ours in zip(texts, matrices, strict=True):
        alone = model.encode(text, output_value="token_embeddings").float().numpy()
        np.testing.assert_allclose(ours, alone / np.linalg.norm(alone, axis=-1, keepdims=True), atol=1e-5)


async def test_a_late_interaction_score_does_not_depend_on_the_budget(
    qwen3_embedding: str, engines: Engines, pairs: list[Pair]
) -> None:
    """Queries are cut too, and must still be complete before any document is scored."""
    texts, scores = [pair.document for pair in pairs[:6]], []
    for budget in (7, 4096):
        config = EngineConfig(
            model=qwen3_embedding, dtype="float32", score_type="late-interaction", max_batch_tokens=budget
        )
        engine = await engines(config)
        scores.append((await engine.score("what does this do, and why " * 5, texts)).scores)
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5, atol=1e-4)


@pytest.fixture(params=LENGTHS)
def checkpoint(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def lengths(request: pytest.FixtureRequest) -> tuple[int, int]:
    return LENGTHS[request.node.callspec.params["checkpoint"]]


@pytest.fixture(scope="module")
def documents(pairs: list[Pair]) -> list[str]:
    """From a few words to more than the checkpoints read, and more than their models take."""
    return [" ".join(pair.document for pair in pairs[i : i + 1 + 4 * (i % 3)]) for i in range(9)]


async def test_long_texts_are_read_as_the_checkpoint_says(
    checkpoint: str, lengths: tuple[int, int], engines: Engines, documents: list[str]
) -> None:
    """Silently, because that is how it was trained."""
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    await engine.clear_cache()
    model = loaded(MultiVectorEncoder, checkpoint)
    assert max(map(len, engine.tokenizer.encode(documents, "documents"))) > engine.max_tokens
    encoded = model.encode_document(documents)
    expected = model.similarity(model.encode_query([LONG_QUERY]), encoded)[0].numpy()
    for cached in (0, len(documents)):
        result = await engine.score(LONG_QUERY, documents)
        np.testing.assert_allclose(result.scores, expected, atol=1e-4)
        assert (result.usage.cached_documents, result.truncated) == (cached, 0)
    found = (await engine.embed_tokens(documents, input_type="document")).embeddings
    for ours, theirs in zip(found, encoded, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)
    assert (await engine.embed_tokens([LONG_QUERY], input_type="query")).usage.prompt_tokens == lengths[1]
    assert (await engine.score(LONG_QUERY, "a", truncation=Truncation(max_tokens=12))).truncated == 1


async def test_windows_read_all_of_a_document(stanford_colbert: str, documents: list[str]) -> None:
    """Whatever was read and cached before, and the other way round."""
    long = [text for text in documents if len(text) > 2000]
    async with Engine(EngineConfig(model=stanford_colbert, dtype="float32", window_overlap=0)) as engine:
        cut, read, again, once_more = [
            await engine.score(LONG_QUERY, long, truncation=truncation)
            for truncation in (None, WINDOW_LONG, WINDOW_LONG, None)
        ]
    np.testing.assert_allclose(read.scores, again.scores, atol=1e-4)
    np.testing.assert_allclose(cut.scores, once_more.scores, atol=1e-4)
    more = np.array(read.scores) - cut.scores
    assert more.min() > -1e-4
    assert more.max() > 1e-2, "the best match of a query's token may be anywhere"
    assert read.usage.prompt_tokens > 1.5 * cut.usage.prompt_tokens
    assert [result.truncated for result in (cut, read, again, once_more)] == [0] * 4
