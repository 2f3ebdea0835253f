"""jina-reranker-m0 scores as a plain reading of its card does: texts and pictures, against each other."""

from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from maxsimd.engine import Content, Engine, EngineConfig, InvalidRequestError
from maxsimd.engine.media import PillowPicture
from tests.checkpoints import vision_language
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity.references import JinaM0
from tests.parity.test_visual import PAGES

pytestmark = pytest.mark.asyncio(loop_scope="module")

# The card's fewest pixels make these two small ones larger.
DOCUMENTS: list[Any] = [*PAGES, "some text", "a longer text, with numbers: 1998.", " spaces  \n"]
QUERIES: list[Any] = ["What is it?", "\n", PAGES[1], PAGES[2]]


@pytest.fixture(scope="module")
def checkpoint(checkpoints: SharedCheckpoints) -> str:
    return checkpoints(vision_language.jina_reranker_m0)


@pytest.fixture(scope="module")
def card(checkpoint: str) -> JinaM0:
    return JinaM0(checkpoint)


@pytest_asyncio.fixture(loop_scope="module")
async def engine(checkpoint: str, engines: Engines) -> Engine:
    return await engines(EngineConfig(model=checkpoint, dtype="float32"))


@pytest.mark.parametrize("query", QUERIES, ids=["text", "a new line", "picture", "another picture"])
async def test_scores_equal_the_cards(engine: Engine, card: JinaM0, query: Any) -> None:
    logits = np.array([card.logit(query, document) for document in DOCUMENTS])
    raw = await engine.score(query, DOCUMENTS, use_activation=False, cache="bypass")
    np.testing.assert_allclose(raw.scores, logits, atol=1e-4)
    assert np.ptp(logits) > 0.1
    result = await engine.score(query, DOCUMENTS, cache="bypass")
    np.testing.assert_allclose(result.scores, 1 / (1 + np.exp(2.65 - logits)), atol=1e-5)
    lengths = [card.ids(query, document)["input_ids"].numel() for document in DOCUMENTS]
    assert result.usage.prompt_tokens == sum(lengths)


async def test_a_template_of_the_operators_own_has_pictures_too(
    checkpoint: str, engines: Engines, engine: Engine
) -> None:
    same = "**Document**:\n{{ document }}\n**Query**:\n{{ query }}"
    other = await engines(EngineConfig(model=checkpoint, dtype="float32", score_template=same))
    ours, theirs = [await each.score("a", DOCUMENTS, cache="bypass") for each in (engine, other)]
    np.testing.assert_allclose(ours.scores, theirs.scores, atol=1e-6)


async def test_a_damaged_picture_is_refused_by_its_name(engine: Engine) -> None:
    damaged = Content.of([PillowPicture(PAGES[2].resize((4000, 1)))])
    with pytest.raises(InvalidRequestError, match=r"^documents\[1\], of 4000 x 1 pixels, cannot be read"):
        await engine.score("a", ["a text", damaged])
