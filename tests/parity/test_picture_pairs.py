"""Rerankers that read pictures score pairs of texts, pictures and both as sentence-transformers does, and run
what pairs begin with once."""

import asyncio
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray
from sentence_transformers import CrossEncoder

from maxsimd.bench.datasets import Pair
from maxsimd.engine import Content, Engine, EngineConfig, InvalidRequestError
from maxsimd.engine.media import PillowPicture
from tests.checkpoints import vision_language
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity import references
from tests.parity.test_visual import PAGES, QUERIES, noise

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["some text", "a longer text, with numbers: 1998.", "\nspaces  "]


@pytest.fixture(scope="module")
def checkpoint(checkpoints: SharedCheckpoints) -> str:
    return checkpoints(vision_language.qwen3_vl_reranker)


@pytest_asyncio.fixture(loop_scope="module")
async def engine(checkpoint: str, engines: Engines) -> Engine:
    return await engines(EngineConfig(model=checkpoint, dtype="float32"))


def logits(checkpoint: str, pairs: list[tuple[Any, Any]], prompt: str | None = None) -> NDArray[Any]:
    """Before the sigmoid, by which random weights would look alike; one by one, without padding."""
    model = references.loaded(CrossEncoder, checkpoint)
    return np.array(
        [model.predict([pair], prompt=prompt, activation_fn=_as_they_are)[0] for pair in pairs],
        dtype=np.float32,
    )


def _as_they_are(scores: Any) -> Any:
    return scores


async def scored(engine: Engine, query: Any, documents: Any, **options: Any) -> Any:
    return await engine.score(query, documents, use_activation=False, cache="bypass", **options)


@pytest.mark.parametrize("query", [QUERIES[2], PAGES[1]], ids=["text", "picture"])
async def test_scores_equal_sentence_transformers(engine: Engine, checkpoint: str, query: Any) -> None:
    documents = [*PAGES, *TEXTS]
    result = await scored(engine, query, documents)
    expected = logits(checkpoint, [(query, document) for document in documents])
    np.testing.assert_allclose(result.scores, expected, atol=1e-4)
    assert np.ptp(expected) > 0.1


async def test_contents_of_texts_and_pictures_equal_the_reference(engine: Engine, checkpoint: str) -> None:
    page, other = PAGES[0], noise(64, 50, 9)
    both = Content.of([PillowPicture(page), "a page"])
    given = {"image": page, "text": "a page"}
    documents = [both, other, "a text", Content.of(["a page", PillowPicture(page)])]
    theirs = [given, other, "a text", {"text": "a page", "image": page}]
    found = (await scored(engine, both, documents)).scores
    np.testing.assert_allclose(found, logits(checkpoint, [(given, each) for each in theirs]), atol=1e-4)
    found = (await scored(engine, "What is it?", documents)).scores
    np.testing.assert_allclose(
        found, logits(checkpoint, [("What is it?", each) for each in theirs]), atol=1e-4
    )


async def test_an_instruction_stands_where_the_template_has_it(engine: Engine, checkpoint: str) -> None:
    instruction = "Find charts."
    expected = logits(checkpoint, [("a", page) for page in PAGES], prompt=instruction)
    result = await scored(engine, "a", PAGES, instruction=instruction)
    np.testing.assert_allclose(result.scores, expected, atol=1e-4)


async def test_a_picture_as_the_query_is_run_once(engine: Engine, checkpoint: str) -> None:
    """All pairs begin with it: what is run again is a small part."""
    transformer = references.loaded(CrossEncoder, checkpoint)[0]
    documents = [*PAGES[:3], *TEXTS]
    lengths = [transformer.preprocess([(PAGES[4], each)])["input_ids"].numel() for each in documents]
    usage = (await scored(engine, PAGES[4], documents)).usage
    assert usage.prompt_tokens == sum(lengths)
    assert usage.cached_tokens > 0.6 * sum(lengths)


async def test_pairs_of_many_requests_score_as_alone(engine: Engine, pairs: list[Pair]) -> None:
    documents: list[Any] = [*PAGES, *(pair.document[:200] for pair in pairs[:8])]
    queries: list[Any] = [PAGES[3], "What is it?"]
    alone = [[(await scored(engine, query, each)).scores[0] for each in documents] for query in queries]
    calls = [scored(engine, queries[i % 2], documents[i:]) for i in range(8)]
    for i, result in enumerate(await asyncio.gather(*calls)):
        np.testing.assert_allclose(result.scores, alone[i % 2][i:], atol=1e-4)


async def test_each_query_with_its_own_document(engine: Engine, checkpoint: str) -> None:
    queries = [PAGES[0], "a", PAGES[0], PAGES[1], "a"]
    documents = [PAGES[1], PAGES[2], "b", "b", "c"]
    found = (await scored(engine, queries, documents)).scores
    expected = logits(checkpoint, list(zip(queries, documents, strict=True)))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.exhaustive
async def test_cut_after_any_token_they_score_as_whole(
    engine: Engine, checkpoint: str, engines: Engines
) -> None:
    documents = [PAGES[0], "a text"]
    whole = [(await scored(engine, query, documents)).scores for query in (PAGES[1], "a")]
    for budget in (1, 7, 16):
        cut = await engines(EngineConfig(model=checkpoint, dtype="float32", max_batch_tokens=budget))
        for query, expected in zip((PAGES[1], "a"), whole, strict=True):
            np.testing.assert_allclose((await scored(cut, query, documents)).scores, expected, atol=1e-4)


async def test_scores_of_texts_are_cached_those_of_pictures_are_not(engine: Engine) -> None:
    await engine.clear_cache()
    documents = [PAGES[0], "a text", PAGES[1]]
    first = await engine.score("What?", documents)
    again = await engine.score("What?", documents)
    assert (first.usage.cached_documents, again.usage.cached_documents) == (0, 1)
    np.testing.assert_allclose(again.scores, first.scores, atol=1e-6)


async def test_a_damaged_picture_is_named_by_its_index(engine: Engine) -> None:
    damaged = Content.of([PillowPicture(noise(1, 3000))])
    with pytest.raises(InvalidRequestError, match=r"^documents\[2\], of 1 x 3000 pixels, cannot be read"):
        await engine.score("a", ["a text", PAGES[0], damaged])
    result = await engine.score("a", ["a text", PAGES[0], damaged], on_error="report")
    assert list(result.errors) == [2]
    assert "documents[2], of 1 x 3000 pixels" in result.errors[2]
    with pytest.raises(InvalidRequestError, match=r"^queries\[0\], of 1 x 3000 pixels, cannot be read"):
        await engine.score(damaged, ["a text", PAGES[0]])


async def test_what_has_pictures_is_not_cut_but_refused(engine: Engine) -> None:
    content = Content.of(["word " * 5000, PillowPicture(PAGES[0])])
    for truncation in ("cut", "window", "error"):
        with pytest.raises(InvalidRequestError, match=r"documents\[0\] has more than \d+ tokens beside its"):
            await engine.score("a", [content], truncation=truncation)
