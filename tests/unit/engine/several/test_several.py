"""Several models in one process: each scores as alone, and what befalls one is no other's business."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from maxsimd.bench.datasets import Pair
from maxsimd.engine import (
    Engine,
    EngineConfig,
    EngineDeadError,
    EngineNotReadyError,
    EngineRunningError,
    Engines,
    InvalidRequestError,
    ModelDroppedError,
    PictureFile,
    ScoreResult,
    Stage,
)
from maxsimd.engine.requests import Truncation
from tests.waiting import until

# Engines belong to one event loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_each_scores_as_alone(
    both: Engines, reranker: EngineConfig, embedder: EngineConfig, pairs: list[Pair]
) -> None:
    query, documents = pairs[0].query, [pair.document for pair in pairs[:6]]
    for name, each in (("embed", embedder), ("rerank", reranker)):
        async with Engine(each) as alone:
            expected = (await alone.score(query, documents)).scores
            assert alone._running is not None
            assert alone._running._device.turn is None, "an engine by itself waits for no turn"
        assert (await both[name].score(query, documents)).scores == expected


async def test_the_scores_of_the_last_stage_alone_are_changed(both: Engines, pairs: list[Pair]) -> None:
    """The first would have most documents at 0, and let those with the least indexes go on."""
    documents = [pair.document[:99] for pair in pairs[:20]][::-1]
    query = pairs[0].query
    plain = await both.rerank(query, documents, [Stage("embed", keep=3), Stage("rerank")])
    found = await both.rerank(
        query, documents, [Stage("embed", keep=3), Stage("rerank")], normalize=True, use_activation=True
    )
    assert {one.index for one in found.results} == {one.index for one in plain.results}
    raw = await both.rerank(query, documents, [Stage("embed", keep=3), Stage("rerank")], use_activation=False)
    assert [one.score for one in raw.results] != [one.score for one in plain.results]


async def test_a_dropped_model_finishes_within_its_grace(
    both: Engines, reranker: EngineConfig, pairs: list[Pair]
) -> None:
    documents = [pair.document for pair in pairs[:12]]
    for grace, ends in ((None, True), (0, False)):
        await both.load("going", reranker)
        going = both["going"]
        waiting = [asyncio.create_task(going.score(pair.query, documents)) for pair in pairs[:3]]
        other = asyncio.create_task(both["embed"].score("a", documents, cache="bypass"))
        await asyncio.sleep(0)
        await both.drop("going", grace=grace)
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(one, EngineDeadError) != ends for one in answers)
        assert len((await other).scores) == len(documents)
        with pytest.raises(ModelDroppedError):
            _ = both["going"]


async def test_a_model_that_loads_during_a_stop_is_dropped(
    reranker: EngineConfig, held_load: tuple[threading.Event, threading.Event]
) -> None:
    before = set(threading.enumerate())
    read, go_on = held_load
    engines = Engines({"slow": reranker})
    start = asyncio.create_task(engines.start())
    await asyncio.to_thread(read.wait)
    assert engines.state("slow") == "loading"
    with pytest.raises(EngineNotReadyError, match="is being loaded"):
        _ = engines["slow"]
    stop = asyncio.create_task(engines.stop(grace=0))
    await asyncio.sleep(0)
    go_on.set()
    await stop
    await start
    assert engines.state("slow") == "dropped"
    await until(lambda: "maxsimd-device" not in {each.name for each in set(threading.enumerate()) - before})


async def test_it_is_started_once_at_a_time(reranker: EngineConfig) -> None:
    engines = Engines({"a": reranker})
    try:
        with pytest.raises(EngineRunningError, match="or will be by start"):
            await engines.load("a", reranker)
        start = asyncio.create_task(engines.start())
        await asyncio.sleep(0)
        for again in (engines.start, engines.__aenter__):
            with pytest.raises(EngineRunningError, match="being loaded already"):
                await again()
        await start
        assert (await engines["a"].score("a", ["b"])).scores
        await engines.start()  # there is nothing left to start
    finally:
        await engines.stop()


@pytest.mark.parametrize(
    ("first", "grace"), [("drop", 0), ("stop", 600), pytest.param("drop", None, marks=pytest.mark.exhaustive)]
)
async def test_a_stop_waits_for_a_drop_within_its_own_grace(
    reranker: EngineConfig, first: str, grace: float | None, pairs: list[Pair], config: EngineConfig
) -> None:
    engines = Engines({"a": reranker, "b": config})
    await engines.start()
    documents = [pair.document for pair in pairs[:30]]
    own = asyncio.create_task(engines["a"].score("a", documents))
    await asyncio.sleep(0)
    leaving = asyncio.create_task(engines.drop("a", None) if first == "drop" else engines.stop())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (engines.state("a"), engines.state("b")) == ("dropped", "ok" if first == "drop" else "dropped")
    stop = asyncio.create_task(engines.stop(grace))
    await asyncio.sleep(0)
    with pytest.raises(EngineRunningError, match="are being stopped"):
        await engines.load("c", config)
    await stop
    (answer,) = await asyncio.gather(own, return_exceptions=True)
    assert isinstance(answer, EngineDeadError if grace == 0 else ScoreResult)
    await leaving
    assert not engines._devices._shared


async def test_another_loop_is_refused_until_a_stop(reranker: EngineConfig, config: EngineConfig) -> None:
    engines = Engines({"a": reranker})
    await engines.start()
    for act in (engines.start, engines.stop, lambda: engines.drop("a"), lambda: engines.load("b", config)):
        with pytest.raises(EngineNotReadyError, match=r"within one asyncio\.run"):
            await asyncio.to_thread(asyncio.run, act())
    assert (await engines["a"].score("a", ["b"])).scores
    await engines.stop()

    async def elsewhere() -> int:
        async with engines:
            return len((await engines["a"].score("a", ["b"])).scores)

    assert await asyncio.to_thread(asyncio.run, elsewhere()) == 1


async def test_a_cancelled_load_is_told_and_can_be_repeated(both: Engines, reranker: EngineConfig) -> None:
    load = asyncio.create_task(both.load("late", reranker))
    await asyncio.sleep(0.05)
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    assert both.state("late") == "failed: loading it was cancelled"
    await both.load("late", reranker)
    await both.drop("late")


TEXTS = ["a cat", "a dog", "rain"]
LONG = "word " * 300
VECTOR = np.ones((3, 128), dtype=np.float32)
PAGE = PictureFile(b"no picture, which nobody opens")
TO_EMBED, TO_RERANK = ("rerank", "embed"), ("embed", "rerank")


def _stages(names: tuple[str, str], keep: int | None = None, instruction: str | None = None) -> list[Stage]:
    return [Stage(names[0], keep=keep), Stage(names[1], instruction=instruction)]


@pytest.mark.parametrize(
    ("query", "documents", "stages", "options", "message"),
    [
        ("a", TEXTS, _stages(TO_RERANK, 1, "be kind"), {}, "this model takes no instruction"),
        (LONG, TEXTS, _stages(TO_EMBED, 1), {"truncation": "error"}, "queries[0] has "),
        ("a", [*TEXTS, LONG], _stages(TO_EMBED), {"truncation": "error"}, "documents[3] has 302 tokens"),
        ("a", ["a", LONG, LONG], _stages(TO_EMBED, 2), {"truncation": "error"}, "documents[1] has 302"),
        (
            "a",
            TEXTS,
            _stages(TO_EMBED, 1),
            {"truncation": Truncation(max_tokens=400)},
            "truncate_prompt_tokens is 400, more than the 256 tokens",
        ),
        (VECTOR, TEXTS, _stages(TO_RERANK, 1), {}, "queries[0] is an embedding, but this model"),
        ("a", ["a", VECTOR, VECTOR], _stages(TO_RERANK, 2), {}, "documents[1] is an embedding, but this"),
        (PAGE, TEXTS, _stages(TO_RERANK, 1), {}, "queries[0] is a picture; this model reads only text"),
    ],
)
async def test_certain_refusals_are_told_before_any_stage_runs(
    both: Engines,
    monkeypatch: pytest.MonkeyPatch,
    query: Any,
    documents: list[Any],
    stages: list[Stage],
    options: dict[str, Any],
    message: str,
) -> None:
    async def rerank(*texts: Any, **options: Any) -> None:
        pytest.fail("a stage ran")

    for name in both.names:
        monkeypatch.setattr(both[name], "rerank", rerank)
    with pytest.raises(InvalidRequestError) as refused:
        await both.rerank(query, documents, stages, **options)
    assert str(refused.value).startswith(message)
    assert str(refused.value).endswith(f"(the model {stages[1].model!r} of the cascade)")


@pytest.mark.parametrize(
    ("documents", "options"),
    [
        ([VECTOR * 0, *TEXTS], {}),
        ([LONG * 2, LONG * 3, LONG * 2], {}),
        ([LONG * 2, "", " "], {"truncation": "window"}),
    ],
)
async def test_possible_refusals_are_not_told_before(
    both: Engines, documents: list[Any], options: dict[str, Any]
) -> None:
    """One may be of another kind, and does not come to the last stage; others are cut, or read in windows."""
    keep = len(documents) - 1
    first = (await both["embed"].rerank("a cat", documents, top_n=keep, **options)).results
    found = await both.rerank("a cat", documents, _stages(TO_RERANK, keep), **options)
    assert {one.index for one in found.results} == {one.index for one in first}
