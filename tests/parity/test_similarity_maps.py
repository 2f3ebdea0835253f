"""Similarity maps of pages are sentence-transformers', and their best cells are the rows that MaxSim took."""

from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray
from sentence_transformers.multi_vector_encoder.interpretability import get_n_patches, maxsim_similarity_map

from maxsimd.engine import Content, Engine, EngineConfig, InvalidRequestError, RequestTooLargeError
from maxsimd.engine.media import PillowPicture
from tests.checkpoints import vision_language, visual
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity.pictures import MODELS, PAGES, Encoder, PictureModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUERY = "how many revenues were there in 1998"
# Those of a grid that is read row by row, which are all that sentence-transformers maps, and those of tiles.
_TILED = (visual.colmodernvbert, vision_language.colsmol)
TILED = [model for model in MODELS if model.build in _TILED]
PLAIN = [
    model for model in MODELS if model.is_late and model.build not in (*_TILED, vision_language.colqwen2_5)
]
DEFAULT = (visual.colpali, vision_language.colqwen3, vision_language.colsmol)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            each, id=each.build.__name__, marks=() if each.build in DEFAULT else pytest.mark.exhaustive
        )
        for each in (*PLAIN, *TILED)
    ],
)
def model(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(model: PictureModel, checkpoints: SharedCheckpoints) -> str:
    return checkpoints(model.build)


@pytest_asyncio.fixture(loop_scope="module")
async def engine(checkpoint: str, engines: Engines) -> Engine:
    return await engines(EngineConfig(model=checkpoint, dtype="float32"))


def theirs(encoder: Encoder, page: Any) -> NDArray[Any]:
    """The map [query tokens, rows, columns] as sentence-transformers' interpretability makes it."""
    query = torch.as_tensor(encoder.vectors(QUERY, "query"))
    document = torch.as_tensor(encoder.vectors(page, "document"))
    patches = get_n_patches(encoder.model, page.size)
    first = encoder.model[0]
    mask = first.preprocess([page], task="document")["input_ids"][0] == first.processor.image_token_id
    if len(document) == int(mask.sum()):  # the model scores pictures alone
        mask = torch.ones(len(document), dtype=torch.bool)
    made: NDArray[Any] = maxsim_similarity_map(query, document, patches, image_mask=mask).numpy()
    return made


async def test_maps_equal_sentence_transformers(model: PictureModel, engine: Engine, checkpoint: str) -> None:
    if model in TILED:
        pytest.skip("sentence-transformers maps no tiles")
    await engine.clear_cache()
    encoder = model.reference(checkpoint)
    expected = [theirs(encoder, page) for page in PAGES]
    for cached in (False, True):
        result = await engine.score(QUERY, PAGES, explain="maps")
        for index, each in enumerate(expected):
            assert result.explanations[index].cached is cached
            (found,) = result.explanations[index].maps
            np.testing.assert_allclose(found, each, atol=1e-5)


async def test_the_best_cell_is_the_patch_that_maxsim_took(engine: Engine) -> None:
    """And boxes lie inside, and cover the picture without a gap."""
    result = await engine.score(QUERY, PAGES, explain="maps", cache="bypass")
    patches = 0
    for index, page in enumerate(PAGES):
        explanation = result.explanations[index]
        (found,) = explanation.maps
        assert np.isfinite(found).all()
        for match, similarities in zip(explanation.matches, found, strict=True):
            if match.patch is None:
                # A token beside the picture, or of a small copy of it, that is at least as good as any patch.
                assert match.similarity >= similarities.max() - 1e-5
                continue
            patches += 1
            assert similarities[match.patch.row, match.patch.column] == pytest.approx(
                match.similarity, abs=1e-5
            )
            assert similarities.max() == pytest.approx(match.similarity, abs=1e-5)
            left, top, right, bottom = match.patch.box
            assert 0 <= left < right <= page.width
            assert 0 <= top < bottom <= page.height
    assert patches


async def test_each_picture_of_a_document_has_a_map(engines: Engines, checkpoints: SharedCheckpoints) -> None:
    checkpoint = checkpoints(vision_language.colqwen3)
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    parts = [PillowPicture(PAGES[0]), "and", PillowPicture(PAGES[4])]
    result = await engine.score(QUERY, [Content.of(parts), "a text"], explain="maps", cache="bypass")
    first, second = result.explanations[0].maps
    assert (first.shape[1:], second.shape[1:]) == ((3, 2), (4, 5))
    assert result.explanations[1].maps == ()
    shown = {match.patch.picture for match in result.explanations[0].matches if match.patch is not None}
    assert shown <= {0, 1}
    for match in result.explanations[0].matches:
        if match.patch is not None:
            found = (first, second)[match.patch.picture]
            query = result.explanations[0].matches.index(match)
            cell = found[query, match.patch.row, match.patch.column]
            assert cell == pytest.approx(match.similarity, abs=1e-5)


async def test_maps_are_there_only_if_they_are_asked_for(engine: Engine) -> None:
    result = await engine.score(QUERY, PAGES[:1], explain=True, cache="bypass")
    assert result.explanations[0].maps == ()
    with pytest.raises(InvalidRequestError, match="explain 'map' is not known; use true, false or maps"):
        await engine.score(QUERY, PAGES[:1], explain="map")  # type: ignore[arg-type]


async def test_too_many_maps_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxsimd.engine.preprocess.explain_limits.MOST_MAPPED", 100)
    with pytest.raises(RequestTooLargeError, match=r"explain would map \d+ similarities .* at most 100 are"):
        await engine.score(QUERY, PAGES, explain="maps", cache="bypass")
