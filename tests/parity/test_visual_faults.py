"""What goes wrong with a picture harms no other, and leaves nothing on the device."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from maxsimd.engine import Engine, EngineConfig, RequestFailedError
from maxsimd.engine.checkpoint.visual.vision import ImageInputs
from maxsimd.engine.execution.packed_runner import PackedRunner
from maxsimd.engine.media import Picture
from tests.checkpoints import visual
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity.selection import with_default
from tests.parity.test_visual import PAGES
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(params=with_default([visual.colpali, visual.colqwen2], [visual.colqwen2]))
def checkpoint(request: pytest.FixtureRequest, checkpoints: SharedCheckpoints) -> str:
    return checkpoints(request.param)


def tower_of(engine: Engine) -> Any:
    runner = engine.device_model.prepared.runner
    assert isinstance(runner, PackedRunner)
    vision = engine.model.vision
    assert vision is not None
    return vision.tower


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
    checkpoint: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    expected = (await engine.score("what?", PAGES, cache="bypass")).scores
    broken = Picture(np.asarray(PAGES[2])).digest
    tower = tower_of(engine)
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


async def test_requests_that_are_cancelled_leave_no_features(checkpoint: str, engines: Engines) -> None:
    config = EngineConfig(model=checkpoint, dtype="float32", max_batch_tokens=64)
    engine = await engines(config)
    for delay in (0.0, 0.003, 0.03):
        calls = [asyncio.create_task(engine.score("what?", PAGES * 4, cache="bypass")) for _ in range(3)]
        await asyncio.sleep(delay)
        for call in calls[:2]:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert len(calls[2].result().scores) == 4 * len(PAGES)
    await until(lambda: engine.stats().device.features == 0)
    await until(lambda: engine.stats().device.cut_sequences == 0)


async def test_a_new_page_in_several_requests_is_scored_in_each(checkpoint: str, engines: Engines) -> None:
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    expected = (await engine.score("what?", PAGES, cache="bypass")).scores
    await engine.clear_cache()
    results = await asyncio.gather(*(engine.score("what?", PAGES * 2) for _ in range(4)))
    for result in results:
        assert result.scores == pytest.approx(expected * 2, abs=1e-5)
    await until(lambda: engine.stats().device.features == 0)


async def test_time_that_is_up_gives_what_there_is(checkpoint: str, engines: Engines) -> None:
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32", max_batch_tokens=64))
    result = await engine.score("what?", PAGES * 8, cache="bypass", timeout=0.02, on_timeout="partial")
    assert len(result.scores) == 8 * len(PAGES)
    assert all(np.isnan(result.scores[i]) for i in result.unscored)
    await until(lambda: engine.stats().device.features == 0)
    streamed: dict[int, float] = {}
    async with engine.stream("what?", PAGES, cache="bypass") as stream:
        async for new in stream:
            streamed |= {one.index: one.score for one in new}
    assert [streamed[i] for i in range(len(PAGES))] == pytest.approx(stream.result.scores, abs=1e-5)
