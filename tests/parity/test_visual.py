"""Pages are scored as sentence-transformers and transformers score them, one by one and in any company."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling
from transformers import (
    AutoProcessor,
    ColModernVBertForRetrieval,
    ColPaliForRetrieval,
    ColQwen2ForRetrieval,
)

from maxsimd.bench.datasets import Pair
from maxsimd.engine import Content, EngineConfig, InvalidRequestError
from maxsimd.engine.media import PictureUrl, PillowPicture
from tests.checkpoints import visual
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity import references

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUERIES = ["What is this?", "a", "how many revenues were there in 1998", "Größe der Straße?"]


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


PAGES = [noise(70, 90), noise(56, 56, 1), noise(300, 20, 2), noise(1, 1, 3), noise(640, 480, 4)]


# By the functions that build them: as transformers has them.
CLASSES = {
    visual.colpali: ColPaliForRetrieval,
    visual.colqwen2: ColQwen2ForRetrieval,
    visual.colmodernvbert: ColModernVBertForRetrieval,
}


@pytest.fixture(scope="module", params=CLASSES, ids=lambda build: build.__name__)
def build(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(build: Any, checkpoints: SharedCheckpoints) -> str:
    return checkpoints(build)


def maxsim(query: NDArray[Any], page: NDArray[Any]) -> float:
    return float((query @ page.T).max(axis=1).sum())


def encoded(model: Any, items: Sequence[Any], role: str) -> list[NDArray[Any]]:
    """One by one: padding in a batch would be scored as well."""
    if isinstance(model, OfTransformers):
        return model.encoded(items)
    encode = model.encode_query if role == "query" else model.encode_document
    return [np.asarray(encode([item])[0]) for item in items]


class OfTransformers:
    """transformers' class and its processor, for a model that sentence-transformers cannot run: it hands
    ColModernVBERT texts and pictures without what belongs to them."""

    def __init__(self, kind: Any, checkpoint: str) -> None:
        self._model = kind.from_pretrained(checkpoint).eval()
        self._processor = AutoProcessor.from_pretrained(checkpoint, backend="pil")

    @torch.inference_mode()
    def encoded(self, items: Sequence[Any]) -> list[NDArray[Any]]:
        rows = []
        for item in items:
            is_text = isinstance(item, str)
            process = self._processor.process_queries if is_text else self._processor.process_images
            rows.append(self._model(**process([item])).embeddings[0].numpy())
        return rows


def reference(checkpoint: str) -> Any:
    if "colmodernvbert" in checkpoint:
        return OfTransformers(ColModernVBertForRetrieval, checkpoint)
    return references.loaded(MultiVectorEncoder, checkpoint)


async def test_scores_of_pages_equal_sentence_transformers(checkpoint: str, engines: Engines) -> None:
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    model = reference(checkpoint)
    queries, pages = encoded(model, QUERIES, "query"), encoded(model, PAGES, "document")
    for text, query in zip(QUERIES, queries, strict=True):
        result = await engine.score(text, PAGES, cache="bypass")
        np.testing.assert_allclose(result.scores, [maxsim(query, page) for page in pages], atol=1e-4)


async def test_scores_of_pages_equal_transformers(build: Any, checkpoint: str, engines: Engines) -> None:
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    model = CLASSES[build].from_pretrained(checkpoint).eval()
    processor = AutoProcessor.from_pretrained(checkpoint, backend="pil")
    with torch.inference_mode():
        queries = [model(**processor.process_queries(text=[text])).embeddings[0] for text in QUERIES]
        pages = [model(**processor.process_images(images=[page])).embeddings[0] for page in PAGES]
    expected = [processor.score_retrieval([query], pages[:1]).item() for query in queries]
    result = await engine.score(QUERIES, [PAGES[0]] * len(QUERIES), cache="bypass")
    np.testing.assert_allclose(result.scores, expected, atol=1e-4)
    ids = [len(processor.process_queries(text=[text])["input_ids"][0]) for text in QUERIES]
    page_ids = len(processor.process_images(images=[PAGES[0]])["input_ids"][0])
    assert result.usage.prompt_tokens == sum(ids) + page_ids * len(QUERIES)


async def test_token_embeddings_of_texts_and_pages_equal_encode(checkpoint: str, engines: Engines) -> None:
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    model = reference(checkpoint)
    result = await engine.embed_tokens([*QUERIES, *PAGES])
    expected = [*encoded(model, QUERIES, "query"), *encoded(model, PAGES, "document")]
    for ours, theirs in zip(result.embeddings, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


async def test_a_page_may_be_the_query_and_a_text_the_document(checkpoint: str, engines: Engines) -> None:
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    model = reference(checkpoint)
    (query,) = encoded(model, PAGES[:1], "document")
    others = [*encoded(model, QUERIES, "query"), *encoded(model, PAGES[1:], "document")]
    result = await engine.score(PAGES[0], [*QUERIES, *PAGES[1:]], cache="bypass")
    np.testing.assert_allclose(result.scores, [maxsim(query, other) for other in others], atol=1e-4)


async def test_pages_and_texts_of_many_requests_score_as_alone(
    checkpoint: str, engines: Engines, pairs: list[Pair]
) -> None:
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    documents: list[Any] = [*PAGES, *(pair.document[:300] for pair in pairs[:4])]
    alone = [
        (await engine.score("What is it?", document, cache="bypass")).scores[0] for document in documents
    ]
    together = await engine.score("What is it?", documents, cache="bypass")
    np.testing.assert_allclose(together.scores, alone, atol=1e-5)
    calls = [engine.score("What is it?", documents[i:], cache="bypass") for i in range(3)]
    for i, result in enumerate(await asyncio.gather(*calls)):
        np.testing.assert_allclose(result.scores, alone[i:], atol=1e-5)


async def test_a_cached_page_is_not_run_again(checkpoint: str, engines: Engines) -> None:
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    await engine.clear_cache()
    first = await engine.score("What is it?", PAGES)
    again = await engine.score("What is it?", PAGES)
    assert first.usage.cached_documents == 0
    assert again.usage.cached_documents == len(PAGES)
    assert first.usage.prompt_tokens == again.usage.prompt_tokens
    assert first.scores == again.scores


async def test_pages_that_are_cut_between_steps_score_as_whole(checkpoint: str, engines: Engines) -> None:
    whole = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    if not whole.device_model.prepared.runner.chunked:
        pytest.skip("a bidirectional model reads a page in one step")
    expected = (await whole.score("What is it?", PAGES, cache="bypass")).scores
    for budget in (7,):
        config = EngineConfig(model=checkpoint, dtype="float32", max_batch_tokens=budget)
        cut = await engines(config)
        result = await cut.score("What is it?", PAGES, cache="bypass")
        np.testing.assert_allclose(result.scores, expected, atol=1e-4)


@pytest.mark.parametrize("cached", [pytest.param(False, marks=pytest.mark.exhaustive), True])
async def test_an_explanation_names_the_patch_that_maxsim_took(
    checkpoint: str, engines: Engines, cached: bool
) -> None:
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    await engine.clear_cache()
    if cached:
        await engine.score(QUERIES[0], PAGES)
    result = await engine.score(QUERIES[0], PAGES, explain=True)
    model = reference(checkpoint)
    (query,) = encoded(model, QUERIES[:1], "query")
    grids = set()
    for index, page in enumerate(PAGES):
        explanation = result.explanations[index]
        assert explanation.cached is cached
        similarities = query @ encoded(model, [page], "document")[0].T  # [query tokens, page tokens]
        assert len(explanation.matches) == len(query)
        for match, row in zip(explanation.matches, similarities, strict=True):
            assert row[match.document_row] == pytest.approx(row.max(), abs=1e-5)
            assert match.document_token is None
            if match.patch is not None:
                left, top, right, bottom = match.patch.box
                assert 0 <= left < right <= page.width
                assert 0 <= top < bottom <= page.height
                grids.add((match.patch.row, match.patch.column))
        assert sum(match.similarity for match in explanation.matches) == pytest.approx(result.scores[index])
    assert len(grids) > 1


async def test_a_page_that_fits_no_step_is_refused_with_both_numbers(
    checkpoints: SharedCheckpoints, engines: Engines
) -> None:
    config = EngineConfig(model=checkpoints(visual.colpali), dtype="float32", max_batch_tokens=30)
    engine = await engines(config)
    with pytest.raises(InvalidRequestError, match="has 31 tokens as a picture, and at most 30 can be run"):
        await engine.score("a", ["a text", PAGES[0]])
    assert len((await engine.score("a", ["a text"])).scores) == 1


async def test_content_that_the_model_does_not_read_is_refused(checkpoint: str, engines: Engines) -> None:
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    with pytest.raises(InvalidRequestError, match=r"documents\[1\] has 1 picture and 1 text"):
        await engine.score("a", [PAGES[0], Content.of([PillowPicture(PAGES[0]), "a"])])
    with pytest.raises(InvalidRequestError, match=r"queries\[0\] has 2 pictures and no texts"):
        await engine.score(Content.of([PillowPicture(PAGES[0])] * 2), ["a"])
    with pytest.raises(InvalidRequestError, match=r"documents\[0\] is at a URL"):
        await engine.score("a", [Content.of([PictureUrl("https://example.com/a.png")])])
    assert (await engine.score("a", [Content.of(["a", "b"])])).scores == (
        await engine.score("a", ["a\nb"])
    ).scores


async def test_vectors_of_pages_are_merged_as_the_reference_does(checkpoint: str, engines: Engines) -> None:
    config = EngineConfig(model=checkpoint, dtype="float32", doc_token_pooling=3)
    engine = await engines(config)
    pooling = HierarchicalTokenPooling(3, num_protected_tokens=0)
    model = reference(checkpoint)
    (query,) = encoded(model, QUERIES[:1], "query")
    pages = [pooling.pool_one(torch.from_numpy(page)).numpy() for page in encoded(model, PAGES, "document")]
    await engine.clear_cache()
    for _ in range(2):  # the second time they are cached
        result = await engine.score(QUERIES[0], PAGES)
        np.testing.assert_allclose(result.scores, [maxsim(query, page) for page in pages], atol=1e-4)
    assert result.usage.cached_documents == len(PAGES)
    with pytest.raises(InvalidRequestError, match="explain is not possible"):
        await engine.score(QUERIES[0], PAGES, explain=True)
