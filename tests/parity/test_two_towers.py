"""CLIP and SigLIP embed texts and pictures as transformers and sentence-transformers do."""

import asyncio
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoProcessor

from maxsimd.engine import Content, Engine, EngineConfig, InvalidRequestError, ModelLoadError
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.media import PillowPicture
from tests.checkpoints import two_towers
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity import references
from tests.parity.test_visual import PAGES

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["a photo of two cats", "a", "revenue in 1998", " spaces  ", "two\nlines"]
BUILDS = (two_towers.clip, two_towers.clip_saved, two_towers.siglip)


@pytest.fixture(scope="module", params=BUILDS, ids=lambda build: build.__name__)
def checkpoint(request: pytest.FixtureRequest, checkpoints: SharedCheckpoints) -> str:
    return checkpoints(request.param)


@pytest_asyncio.fixture(loop_scope="module")
async def engine(checkpoint: str, engines: Engines) -> Engine:
    return await engines(EngineConfig(model=checkpoint, dtype="float32"))


class Plain:
    """transformers' own class and processor, used as the model cards do."""

    def __init__(self, path: str) -> None:
        self._processor = AutoProcessor.from_pretrained(path, backend="pil")
        self._model = AutoModel.from_pretrained(path).eval()
        self._padding: Any = "max_length" if self._model.config.model_type == "siglip" else False

    @torch.inference_mode()
    def __call__(self, item: Any) -> NDArray[Any]:
        if isinstance(item, str):
            inputs = self._processor(text=[item], return_tensors="pt", padding=self._padding, max_length=24)
            rows = self._model.get_text_features(**inputs)
        else:
            rows = self._model.get_image_features(**self._processor(images=[item], return_tensors="pt"))
        vector: NDArray[Any] = rows.pooler_output[0].numpy()
        return vector


def cosine(first: NDArray[Any], second: NDArray[Any]) -> float:
    return float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))


async def test_they_are_packed(engine: Engine) -> None:
    assert engine.device_model.prepared.execution == "packed"


async def test_embeddings_equal_transformers(engine: Engine, checkpoint: str) -> None:
    plain = Plain(checkpoint)
    expected = np.array([plain(item) for item in [*TEXTS, *PAGES]])
    if "saved" in checkpoint:
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    result = await engine.embed([*TEXTS, *PAGES])
    np.testing.assert_allclose(result.embeddings, expected, atol=1e-4, rtol=1e-4)


async def test_scores_equal_sentence_transformers(engine: Engine, checkpoint: str) -> None:
    """But for SigLIP's texts, which it fills up only as far as the longest of a batch."""
    encode = Plain(checkpoint)
    if "siglip" not in checkpoint:
        model = references.loaded(SentenceTransformer, checkpoint)
        encode = lambda item: np.asarray(model.encode([item])[0])  # noqa: E731
    documents = [*PAGES, *TEXTS]
    for query in (TEXTS[0], PAGES[1]):
        expected = [cosine(encode(query), encode(document)) for document in documents]
        result = await engine.score(query, documents, cache="bypass")
        np.testing.assert_allclose(result.scores, expected, atol=1e-4)


async def test_in_any_company_they_score_as_alone(engine: Engine) -> None:
    documents: list[Any] = [*PAGES, *TEXTS]
    alone = [(await engine.score("What?", each, cache="bypass")).scores[0] for each in documents]
    calls = [engine.score("What?", documents[i:], cache="bypass") for i in range(8)]
    for i, result in enumerate(await asyncio.gather(*calls)):
        np.testing.assert_allclose(result.scores, alone[i:], atol=1e-5)


async def test_a_cached_picture_is_not_encoded_again(engine: Engine) -> None:
    await engine.clear_cache()
    first = await engine.score("What is it?", PAGES)
    again = await engine.score("What is it?", PAGES)
    assert (first.usage.cached_documents, again.usage.cached_documents) == (0, len(PAGES))
    assert first.scores == again.scores


async def test_nothing_is_read_behind_the_end_of_a_text(
    checkpoints: SharedCheckpoints, engines: Engines
) -> None:
    """CLIP pools at the first token that ends a text, wherever a text has one."""
    checkpoint = checkpoints(two_towers.clip)
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    texts = ["a photo<|endoftext|>of two cats", "<|endoftext|>", "a<|endoftext|>"]
    plain = Plain(checkpoint)
    result = await engine.embed(texts)
    np.testing.assert_allclose(result.embeddings, [plain(text) for text in texts], atol=1e-4, rtol=1e-4)


async def test_pictures_beside_texts_in_one_document_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match=r"documents\[0\] has 1 picture and 1 text"):
        await engine.score("a", [Content.of([PillowPicture(PAGES[0]), "a"])])


@pytest.mark.parametrize("score_type", ["late-interaction", "cross-encoder"])
async def test_they_are_bi_encoders_alone(checkpoint: str, score_type: Any) -> None:
    with pytest.raises(ModelLoadError, match="which can be a bi-encoder alone"):
        load_model(EngineConfig(model=checkpoint, score_type=score_type), torch.device("cpu"))
