"""As much of queries and documents is read as their checkpoint says, silently, as the reference does it."""

from typing import Any

import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder

from maxsimd.bench.datasets import Pair
from maxsimd.engine import WINDOW_LONG, Engine, EngineConfig, InvalidRequestError, ScoreResult, Truncation
from tests.parity.references import loaded

# How many tokens of a document each reads, and the longest query.
CHECKPOINTS = {"stanford_colbert": (180, 32), "native_multi_vector": (128, 48)}


@pytest.fixture(params=list(CHECKPOINTS))
def checkpoint(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def lengths(request: pytest.FixtureRequest) -> tuple[int, int]:
    return CHECKPOINTS[request.node.callspec.params["checkpoint"]]


@pytest.fixture(scope="module")
def documents(pairs: list[Pair]) -> list[str]:
    """From a few words to more than the checkpoints read, and more than their models take."""
    return [" ".join(pair.document for pair in pairs[i : i + 1 + 4 * (i % 3)]) for i in range(12)]


def _reference(checkpoint: str, query: str, documents: list[str]) -> np.ndarray:
    model = loaded(MultiVectorEncoder, checkpoint)
    return model.similarity(model.encode_query([query]), model.encode_document(documents))[0].numpy()


QUERY = "how is a file read " * 40


async def test_scores_of_long_texts_equal_the_reference(
    checkpoint: str, lengths: tuple[int, int], documents: list[str]
) -> None:
    async with Engine(EngineConfig(model=checkpoint, dtype="float32")) as engine:
        assert max(map(len, engine.tokenizer.encode(documents, "documents"))) > engine.max_tokens
        first = await engine.score(QUERY, documents)
        again = await engine.score(QUERY, documents)
        ranked = await engine.rerank(QUERY, documents)
        matrices = (await engine.embed_tokens(documents, input_type="document")).embeddings
    assert again.usage.cached_documents == len(documents), "cut as usual, and so cached as usual"
    assert first.truncated == again.truncated == ranked.truncated == 0
    for result in (first, again):
        np.testing.assert_allclose(result.scores, _reference(checkpoint, QUERY, documents), atol=1e-4)
    encoded = loaded(MultiVectorEncoder, checkpoint).encode_document(documents)
    for ours, theirs in zip(matrices, encoded, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)


async def test_windows_read_all_of_a_document(
    checkpoint: str, lengths: tuple[int, int], documents: list[str]
) -> None:
    """Whatever was read and cached before, and the other way round."""
    long = [text for text in documents if len(text) > 2000]
    async with Engine(EngineConfig(model=checkpoint, dtype="float32", window_overlap=0)) as engine:
        cut = await engine.score(QUERY, long)
        read = [
            await engine.score(QUERY, long, truncation=WINDOW_LONG, cache=mode) for mode in ("bypass", "use")
        ]
        once_more = await engine.score(QUERY, long)
    np.testing.assert_allclose(read[0].scores, read[1].scores, atol=1e-4)
    np.testing.assert_allclose(cut.scores, once_more.scores, atol=1e-4)
    more = np.array(read[0].scores) - cut.scores
    assert more.min() > -1e-4
    assert more.max() > 1e-2, "the best match of a query's token may be anywhere"
    assert read[0].usage.prompt_tokens > 1.5 * cut.usage.prompt_tokens
    assert [result.truncated for result in (cut, *read, once_more)] == [0] * 4


async def test_a_lower_limit_of_the_request_is_counted(checkpoint: str, lengths: tuple[int, int]) -> None:
    documents = ["word " * 150, "word " * 600, "short"]
    most, _ = lengths

    async def score(engine: Engine, **truncation: Any) -> ScoreResult:
        return await engine.score("why", documents, truncation=Truncation(**truncation))

    async with Engine(EngineConfig(model=checkpoint)) as engine:
        assert (await score(engine, max_tokens=60)).truncated == 2
        assert (await score(engine, max_document_tokens=60)).truncated == 2
        for limit in (-1, most, most + 1, 400):
            assert (await score(engine, max_tokens=limit)).truncated == 0, limit
        assert (await score(engine, max_document_tokens=most)).truncated == 0
        cut_left = await score(engine, max_tokens=-1, side="left")
        assert cut_left.truncated == 0
        assert cut_left.usage.cached_documents == (2 if most == 180 else 1), (
            "the end of a text is not its start"
        )


async def test_a_query_is_read_to_the_checkpoints_length(checkpoint: str, lengths: tuple[int, int]) -> None:
    _, longest = lengths
    async with Engine(EngineConfig(model=checkpoint)) as engine:
        whole = await engine.score("why " * 200, "because")
        assert whole.truncated == 0
        tokens = (await engine.embed_tokens("why " * 200, input_type="query")).usage.prompt_tokens
        assert tokens == longest
        cut = await engine.score("why " * 200, "because", truncation=Truncation(max_tokens=12))
        assert cut.truncated == 1


async def test_an_error_names_the_maximum_of_a_model_that_takes_less(
    checkpoint: str, lengths: tuple[int, int]
) -> None:
    config = EngineConfig(model=checkpoint, max_model_len=100)
    async with Engine(config) as engine:
        special = engine.tokenizer.single.special_tokens
        prompt = len(engine.tokenizer.encode([engine.model.document.prompt], "x")[0])
        with pytest.raises(
            InvalidRequestError,
            match=rf"documents\[1\] has {300 + special + prompt} tokens, but at most 100 can",
        ):
            await engine.score("why", ["short", "word " * 300], truncation="error")
        assert (await engine.rerank("why", ["short", "word " * 300])).truncated == 1
