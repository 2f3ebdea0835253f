"""How far a call has come, and what a callback that fails may harm."""

import asyncio
from typing import Any

import pytest

from maxsimd.engine import CUT_LONG, EngineConfig, RequestFailedError
from tests.engines import Engines
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = [f"this is text {i}" for i in range(60)]


async def _counted(call: Any, *arguments: Any, **options: Any) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    await call(*arguments, **options, progress=lambda there, in_all: seen.append((there, in_all)))
    assert seen, "nothing was told"
    assert [there for there, _ in seen] == sorted({there for there, _ in seen}), "it only grows"
    return seen


async def test_every_call_tells_how_far_it_has_come(three_label_classifier: str, engines: Engines) -> None:
    engine = await engines(EngineConfig(max_batch_tokens=256))
    for call in (engine.embed, engine.embed_tokens):
        seen = await _counted(call, TEXTS)
        assert seen[-1] == (60, 60)
        assert len(seen) > 1, "as the values come"
    for call in (engine.score, engine.rerank):
        assert (await _counted(call, "a query", TEXTS))[-1] == (60, 60)
    from_cache = await _counted(engine.score, "a query", TEXTS)
    assert from_cache[-1] == (60, 60), "also where nothing but the query is run"
    engine = await engines(EngineConfig(model=three_label_classifier))
    assert (await _counted(engine.classify, TEXTS))[-1] == (60, 60)


@pytest.mark.parametrize(
    ("error", "at"), [(ValueError, 60), (StopIteration, 1), (asyncio.CancelledError, 60)]
)
async def test_a_callback_that_raises_fails_its_own_call_alone(
    error: type[BaseException], at: int, engines: Engines
) -> None:
    def fail(there: int, in_all: int) -> None:
        if there >= at:
            raise error

    engine = await engines(EngineConfig(max_batch_tokens=256))
    running: Any = engine._running
    bad, good = await asyncio.gather(
        engine.score("a", TEXTS, progress=fail), engine.score("b", TEXTS), return_exceptions=True
    )
    assert isinstance(bad, RequestFailedError)
    assert isinstance(bad.__cause__, error)
    assert not isinstance(good, BaseException)
    await until(lambda: running.scheduler.waiting_tokens == 0)
    assert engine.is_healthy
    assert (await engine.score("a", ["b"], truncation=CUT_LONG)).scores


async def test_a_cancelled_call_is_told_nothing_more(engines: Engines) -> None:
    seen: list[int] = []

    engine = await engines(EngineConfig(max_batch_tokens=256))

    def leave(there: int, in_all: int) -> None:
        seen.append(there)
        task.cancel()

    task = asyncio.create_task(engine.score("a", TEXTS, progress=leave))
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.score("b", TEXTS)
    assert len(seen) == 1
