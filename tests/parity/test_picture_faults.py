"""What goes wrong with a picture harms no other and leaves nothing on the device. Contents that a model does
not read are refused by their names."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from maxsimd.engine import Content, Engine, EngineConfig, InvalidRequestError, RequestFailedError
from maxsimd.engine.checkpoint.visual.vision import ImageInputs
from maxsimd.engine.media import Picture, PictureUrl, PillowPicture
from tests.checkpoints import two_towers, vision_language, visual
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity.pictures import PAGES, noise
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def engine(checkpoints: SharedCheckpoints, engines: Engines) -> Engine:
    return await engines(EngineConfig(model=checkpoints(visual.colqwen2), dtype="float32"))


def failing_on(tower: Any, digest: bytes) -> Any:
    """The tower, which fails whenever one picture is among those that it is to encode."""
    encode = type(tower).__call__

    def called(self: Any, images: Sequence[ImageInputs], device: torch.device) -> list[torch.Tensor]:
        if any(image.digest == digest for image in images):
            raise RuntimeError("this picture breaks it")
        made: list[torch.Tensor] = encode(self, images, device)
        return made

    return called


async def test_a_picture_that_breaks_the_tower_fails_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = (await engine.score("what?", PAGES, cache="bypass")).scores
    assert engine.model.vision is not None
    tower = engine.model.vision.tower
    broken = Picture(np.asarray(PAGES[2])).digest
    monkeypatch.setattr(type(tower), "__call__", failing_on(tower, broken))
    result = await engine.score("what?", PAGES, cache="bypass", on_error="report")
    assert set(result.errors) == {2}
    others = [0, 1, 3, 4]
    np.testing.assert_allclose([result.scores[i] for i in others], [expected[i] for i in others], atol=1e-5)
    with pytest.raises(RequestFailedError):
        await engine.score("what?", PAGES, cache="bypass")
    monkeypatch.undo()
    assert (await engine.score("what?", PAGES, cache="bypass")).scores == pytest.approx(expected, abs=1e-5)
    await until(lambda: engine.stats().device.features == 0)


async def test_requests_that_are_cancelled_leave_no_features(
    checkpoints: SharedCheckpoints, engines: Engines
) -> None:
    path = checkpoints(visual.colqwen2)
    engine = await engines(EngineConfig(model=path, dtype="float32", max_batch_tokens=64))
    for delay in (0.0, 0.003, 0.03):
        calls = [asyncio.create_task(engine.score("what?", PAGES * 2, cache="bypass")) for _ in range(3)]
        await asyncio.sleep(delay)
        for call in calls[:2]:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert len(calls[2].result().scores) == 2 * len(PAGES)
    await until(lambda: engine.stats().device.features == 0)
    await until(lambda: engine.stats().device.cut_sequences == 0)


async def test_a_page_that_fits_no_step_is_refused_with_both_numbers(
    checkpoints: SharedCheckpoints, engines: Engines
) -> None:
    config = EngineConfig(model=checkpoints(visual.colpali), dtype="float32", max_batch_tokens=30)
    engine = await engines(config)
    with pytest.raises(InvalidRequestError, match="has 31 tokens as a picture, and at most 30 can be run"):
        await engine.score("a", ["a text", PAGES[0]])
    assert len((await engine.score("a", ["a text"])).scores) == 1


async def test_content_that_the_model_does_not_read_is_refused(
    engine: Engine, checkpoints: SharedCheckpoints, engines: Engines
) -> None:
    picture = PillowPicture(PAGES[0])
    clip = await engines(EngineConfig(model=checkpoints(two_towers.clip), dtype="float32"))
    for each in (engine, clip):
        with pytest.raises(InvalidRequestError, match=r"documents\[1\] has 1 picture and 1 text"):
            await each.score("a", [PAGES[0], Content.of([picture, "a"])])
        # Else its processor would make gigabytes of it.
        line = Picture(np.zeros((1, 8_000, 3), dtype=np.uint8))
        with pytest.raises(InvalidRequestError, match=r"documents\[0\], of 8000 x 1 pixels, cannot be"):
            await each.score("a", [Content.of([line])])
    with pytest.raises(InvalidRequestError, match=r"queries\[0\] has 2 pictures and no texts"):
        await engine.score(Content.of([picture] * 2), ["a"])
    with pytest.raises(InvalidRequestError, match=r"documents\[0\] is at a URL"):
        await engine.score("a", [Content.of([PictureUrl("https://example.com/a.png")])])
    of_texts, joined = [(await engine.score("a", [each])).scores for each in (Content.of(["a", "b"]), "a\nb")]
    assert of_texts == joined


@pytest.mark.parametrize(
    ("build", "token"),
    [
        (vision_language.colqwen2_merged, "<|image_pad|>"),
        (vision_language.colsmol, "<image>"),
        (vision_language.qwen3_vl_reranker, "<|image_pad|>"),
    ],
)
async def test_contents_of_pictures_and_texts_are_refused_where_wrong(
    build: Any, token: str, checkpoints: SharedCheckpoints, engines: Engines
) -> None:
    """By the name of a text with the token of pictures or without end, and of a picture that is too thin."""
    engine = await engines(EngineConfig(model=checkpoints(build), dtype="float32"))
    picture = PillowPicture(PAGES[0])
    with pytest.raises(InvalidRequestError, match=r"a text of documents\[0\] holds"):
        await engine.score("a", [Content.of([picture, f"{token} is a token"])])
    long = Content.of(["word " * 5000, picture])
    for truncation in ("cut", "window", "error"):
        with pytest.raises(InvalidRequestError, match=r"documents\[0\] has more than \d+ tokens beside its"):
            await engine.score("a", [long], truncation=truncation)
    if build is vision_language.colsmol:  # whose pages are cut to tiles of any shape
        return
    thin = Content.of([PillowPicture(noise(1, 3000))])
    with pytest.raises(InvalidRequestError, match=r"^documents\[2\] has 1 x 3,000 pixels, but may be"):
        await engine.score("a", ["a text", PAGES[0], thin])
    result = await engine.score("a", ["a text", PAGES[0], thin], on_error="report")
    assert list(result.errors) == [2]
    assert "documents[2] has 1 x 3,000 pixels" in result.errors[2]
    with pytest.raises(InvalidRequestError, match=r"^queries\[0\] has 1 x 3,000 pixels"):
        await engine.score(thin, ["a text", PAGES[0]])
