"""Several models in one process: each scores as alone, and they share a device by weight."""

import asyncio
import gc
import random
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import numpy as np
import pytest
import pytest_asyncio

from maxsimd.api.process import resident_bytes
from maxsimd.bench.datasets import Pair
from maxsimd.engine import Engine, EngineConfig, Engines, PictureFile, ScoreResult, Stage, Truncation, errors
from maxsimd.engine.actors.turns import Turn, Turns
from maxsimd.engine.device import load
from maxsimd.engine.device.thread import num_left_behind
from maxsimd.engine.several import cascade
from maxsimd.engine.workers import give_back_memory
from tests.exhaustive import exhaustive
from tests.waiting import Clock, Pause, until, wait_for

# Engines belong to one event loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def config(gte: str) -> EngineConfig:
    return EngineConfig(model=gte, dtype="float32", threads=1)


@pytest.fixture(scope="module")
def reranker(config: EngineConfig, bert_cross_encoder: str) -> EngineConfig:
    return replace(config, model=bert_cross_encoder)


@pytest.fixture(scope="module")
def embedder(config: EngineConfig, bge: str) -> EngineConfig:
    return replace(config, model=bge, score_type="late-interaction", max_model_len=256)


@pytest.fixture
def held_load(monkeypatch: pytest.MonkeyPatch) -> Pause:
    """Reading a checkpoint waits there."""
    pause = Pause()
    monkeypatch.setattr(load, "load_model", pause.before(load.load_model))
    return pause


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(embedder: EngineConfig, reranker: EngineConfig) -> AsyncIterator[Engines]:
    async with Engines({"embed": embedder, "rerank": reranker}) as engines:
        yield engines


async def test_each_scores_as_alone(both: Any, reranker: Any, embedder: Any, pairs: list[Pair]) -> None:
    query, documents = pairs[0].query, [pair.document for pair in pairs[:6]]
    for name, each in (("embed", embedder), ("rerank", reranker)):
        async with Engine(each) as alone:
            expected = (await alone.score(query, documents)).scores
            assert alone._running is not None
            assert alone._running._device.turn is None, "an engine by itself waits for no turn"
        assert (await both[name].score(query, documents)).scores == expected
    documents = [pair.document[:99] for pair in pairs[:20]][::-1]
    stages = [Stage("embed", keep=3), Stage("rerank")]
    plain = await both.rerank(query, documents, stages)
    found = await both.rerank(query, documents, stages, normalize=True, use_activation=True)
    assert {one.index for one in found.results} == {one.index for one in plain.results}
    raw = await both.rerank(query, documents, stages, use_activation=False)
    assert [one.score for one in raw.results] != [one.score for one in plain.results]
    failed = errors.RequestFailedError("documents[1]: the model failed on it")
    index = plain.stages[0].ranking.results[1].index
    named = pytest.raises(errors.RequestFailedError, match=rf"s\[{index}\]: .* it \(the model 'rerank' of ")
    with patch.object(both["rerank"], "rerank", side_effect=failed), named:
        await both.rerank(query, documents, stages)


async def test_drops_finish_within_grace(both: Engines, reranker: EngineConfig, pairs: list[Pair]) -> None:
    documents = [pair.document for pair in pairs[:12]]
    for grace, ends in ((None, True), (0, False)):
        await both.load("going", reranker)
        going = both["going"]
        waiting = [asyncio.create_task(going.score(pair.query, documents)) for pair in pairs[:3]]
        other = asyncio.create_task(both["embed"].score("a", documents, cache="bypass"))
        await asyncio.sleep(0)
        await both.drop("going", grace=grace)
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(one, errors.EngineDeadError) != ends for one in answers)
        assert len((await other).scores) == len(documents)
        with pytest.raises(errors.ModelDroppedError):
            _ = both["going"]


async def test_models_that_load_in_a_stop_are_dropped(reranker: EngineConfig, held_load: Pause) -> None:
    before, engines = set(threading.enumerate()), Engines({"slow": reranker})
    start = asyncio.create_task(engines.start())
    await asyncio.to_thread(held_load.is_there.wait)
    assert engines.state("slow") == "loading"
    with pytest.raises(errors.EngineNotReadyError, match="is being loaded"):
        _ = engines["slow"]
    stop = asyncio.create_task(engines.stop(grace=0))
    await asyncio.sleep(0)
    held_load.may_go_on.set()
    await stop
    await start
    assert engines.state("slow") == "dropped"
    await until(lambda: "maxsimd-device" not in {each.name for each in set(threading.enumerate()) - before})


async def test_it_is_started_once_at_a_time(reranker: EngineConfig) -> None:
    engines = Engines({"a": reranker})
    try:
        with pytest.raises(errors.EngineRunningError, match="or will be by start"):
            await engines.load("a", reranker)
        start = asyncio.create_task(engines.start())
        await asyncio.sleep(0)
        for again in (engines.start, engines.__aenter__):
            with pytest.raises(errors.EngineRunningError, match="being loaded already"):
                await again()
        await start
        assert (await engines["a"].score("a", ["b"])).scores
        await engines.start()  # there is nothing left to start
    finally:
        await engines.stop()


@pytest.mark.parametrize(("first", "grace"), [("drop", 0), ("stop", 600), *exhaustive(("drop", None))])
async def test_a_stop_waits_for_a_drop_within_its_own_grace(
    reranker: EngineConfig, first: str, grace: float | None, pairs: list[Pair], config: EngineConfig
) -> None:
    engines = Engines({"a": reranker, "b": config})
    await engines.start()
    own = asyncio.create_task(engines["a"].score("a", [pair.document for pair in pairs[:30]]))
    await asyncio.sleep(0)
    leaving = asyncio.create_task(engines.drop("a", None) if first == "drop" else engines.stop())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (engines.state("a"), engines.state("b")) == ("dropped", "ok" if first == "drop" else "dropped")
    stop = asyncio.create_task(engines.stop(grace))
    await asyncio.sleep(0)
    with pytest.raises(errors.EngineRunningError, match="are being stopped"):
        await engines.load("c", config)
    await stop
    (answer,) = await asyncio.gather(own, return_exceptions=True)
    assert isinstance(answer, errors.EngineDeadError if grace == 0 else ScoreResult)
    await leaving
    assert not engines._devices._shared


async def test_another_loop_is_refused_until_a_stop(reranker: EngineConfig, config: EngineConfig) -> None:
    engines = Engines({"a": reranker})
    await engines.start()
    for act in (engines.start, engines.stop, lambda: engines.drop("a"), lambda: engines.load("b", config)):
        with pytest.raises(errors.EngineNotReadyError, match=r"within one asyncio\.run"):
            await asyncio.to_thread(asyncio.run, act())
    assert (await engines["a"].score("a", ["b"])).scores
    await engines.stop()

    async def elsewhere() -> int:
        async with engines:
            return len((await engines["a"].score("a", ["b"])).scores)

    assert await asyncio.to_thread(asyncio.run, elsewhere()) == 1
    await asyncio.to_thread(asyncio.run, engines.start())
    await engines.stop()  # the event loop of the start has ended
    assert not engines._devices._shared


async def test_cancelled_loads_are_repeated(both: Engines, reranker: EngineConfig, held_load: Pause) -> None:
    load = asyncio.create_task(both.load("late", reranker))
    await asyncio.to_thread(held_load.is_there.wait)
    load.cancel()
    held_load.may_go_on.set()
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


async def test_certain_refusals_come_before_stages(both: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in both.names:
        monkeypatch.setattr(both[name], "rerank", Mock(side_effect=AssertionError("a stage ran")))
    too_long = {"truncation": Truncation(max_tokens=400)}
    for query, documents, stages, options, message in (
        ("a", TEXTS, _stages(TO_RERANK, 1, "be kind"), {}, "this model takes no instruction"),
        (LONG, TEXTS, _stages(TO_EMBED, 1), {"truncation": "error"}, "queries[0] has "),
        ("a", [*TEXTS, LONG], _stages(TO_EMBED), {"truncation": "error"}, "documents[3] has 302 tokens"),
        ("a", ["a", LONG, LONG], _stages(TO_EMBED, 2), {"truncation": "error"}, "documents[1] has 302"),
        ("a", TEXTS, _stages(TO_EMBED, 1), too_long, "max_tokens is 400, more than the 256"),
        (VECTOR, TEXTS, _stages(TO_RERANK, 1), {}, "queries[0] is an embedding, but this model"),
        ("a", ["a", VECTOR, VECTOR], _stages(TO_RERANK, 2), {}, "documents[1] is an embedding, but this"),
        (PAGE, TEXTS, _stages(TO_RERANK, 1), {}, "queries[0] is a picture; this model reads only text"),
    ):
        with pytest.raises(errors.InvalidRequestError) as refused:
            await both.rerank(query, documents, stages, **options)
        assert str(refused.value).startswith(message)
        assert str(refused.value).endswith(f"(the model {stages[1].model!r} of the cascade)")


async def test_possible_refusals_are_not_told_before(both: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = AsyncMock(wraps=both["embed"].check_readable)
    monkeypatch.setattr(both["embed"], "check_readable", tried)
    await cascade.check_stage(both["embed"], "a", [*[LONG] * 5, "a"], 1, {"truncation": "error"})
    assert tried.call_count == 1
    for query in ("a", "a" * 200_000):
        await cascade.check_stage(both["embed"], query, [LONG] * 99, 1, {"truncation": "error"})
        assert tried.call_count <= 6, "the rest is left to the stage"
    for documents, options in (
        *(([VECTOR * 0, *TEXTS], {}), ([LONG * 2, LONG * 3, LONG * 2], {})),
        ([LONG * 2, "", " "], {"truncation": "window"}),
    ):
        keep = len(documents) - 1
        first = (await both["embed"].rerank("a cat", documents, top_n=keep, **options)).results
        found = await both.rerank("a cat", documents, _stages(TO_RERANK, keep), **options)
        assert {one.index for one in found.results} == {one.index for one in first}


async def test_time_on_the_device_goes_by_weight_and_is_counted(config: EngineConfig) -> None:
    async with Engines({"a": config, "b": config}, weights={"a": 3.0}) as engines:
        for name, weight in (("a", 3.0), ("b", 1.0)):
            assert engines[name]._running._device.turn.weight == weight  # type: ignore[union-attr]
            await engines[name].score("a", ["b"])
            assert engines.device_seconds(name) > 0
            counted = engines.registry.get_sample_value("maxsimd_device_seconds_total", {"model": name})
            assert counted == pytest.approx(engines.device_seconds(name))


async def test_no_step_runs_while_a_load_reads(held_load: Pause, config: EngineConfig) -> None:
    """Reading one changes torch's default precision for all threads."""
    held_load.may_go_on.set()
    async with Engines({"a": config}) as engines:
        held_load.is_there.clear()
        held_load.may_go_on.clear()
        loading = asyncio.create_task(engines.load("b", config))
        await asyncio.to_thread(held_load.is_there.wait)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        score = asyncio.create_task(engines["a"].score("a", ["b"], cache="bypass"))
        await asyncio.wait({score}, timeout=0.2)
        assert not score.done()
        held_load.may_go_on.set()
        assert (await score).scores


async def test_caches_and_threads_are_shared(config: EngineConfig) -> None:
    def limits(engines: Engines) -> list[int]:
        return [engines[name].metrics.cache._memory.limit >> 20 for name in engines.names]  # type: ignore[union-attr]

    async with Engines({"a": config, "own": replace(config, cache_mb=7)}) as engines:
        whole = limits(engines)[0]
        assert limits(engines) == [whole, 7]
        await engines.load("b", config)
        assert limits(engines) == [whole // 2, 7, whole // 2]
        await engines.drop("a")
        assert limits(engines) == [7, whole]
        with pytest.raises(errors.ModelLoadError, match="is 1 for those that are there, and 2 for this one"):
            await engines.load("c", replace(config, threads=2))
        await engines.drop("own")
        await engines.drop("b")
        await engines.load("c", replace(config, threads=2))
        assert (await engines["c"].score("a", ["b"])).scores


def _breaking(engines: Engines, name: str, act: Callable[[], Any]) -> None:
    runner: Any = engines[name].device_model.runner
    runner.forward = lambda step: act()


async def test_an_exit_in_one_models_code_ends_that_model_alone(config: EngineConfig) -> None:
    async with Engines({"a": config, "b": config}) as engines:
        right = (await engines["a"].score("a", ["b"])).scores
        _breaking(engines, "b", Mock(side_effect=SystemExit(3)))
        with pytest.raises(errors.EngineDeadError, match="ended by SystemExit"):
            await engines["b"].score("a", ["b"])
        assert (await engines["a"].score("a", ["b"], cache="bypass")).scores == right
        await until(lambda: engines.state("b").startswith("failed"))


async def test_a_step_that_never_ends_fails_all_models_of_its_device(config: EngineConfig) -> None:
    pause, impatient = Pause(), replace(config, step_timeout_seconds=0.5)
    async with Engines({"a": impatient, "b": impatient}) as engines:
        right = (await engines["a"].score("a", ["b"])).scores
        await engines["b"].score("a", ["b"])
        _breaking(engines, "b", pause.here)
        try:
            asked = [asyncio.create_task(engines["b"].score("a", ["c"], cache="bypass")) for _ in range(2)]
            await asyncio.to_thread(pause.is_there.wait)
            asked.append(asyncio.create_task(engines["a"].score("a", ["c"], cache="bypass")))
            async with asyncio.timeout(600):
                answers = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(answer) for answer in answers] == [errors.EngineDeadError] * 3
            await until(lambda: all(engines.state(name).startswith("failed") for name in "ab"))
            with pytest.raises(errors.ModelFailedError, match="stuck with a step of another model"):
                _ = engines["a"]
            await engines.load("a", config)
            assert (await engines["a"].score("a", ["b"])).scores == right
        finally:
            pause.may_go_on.set()
    wait_for(lambda: num_left_behind() == 0)


@pytest.mark.parametrize("cycles", [2, *exhaustive(20)])
async def test_loads_and_drops_lose_nothing(cycles: int, pairs: list[Pair], config: EngineConfig) -> None:
    documents = [pair.document for pair in pairs[:5]]

    def resident() -> int:
        gc.collect()
        give_back_memory()
        return resident_bytes()

    answered = 0

    async def ask(engines: Engines) -> None:
        nonlocal answered
        while True:
            await engines["stays"].score(pairs[answered % 40].query, documents, cache="bypass")
            answered += 1
            await asyncio.sleep(0.02)

    async with Engines({"stays": config}) as engines:
        traffic = asyncio.create_task(ask(engines))
        for cycle in range(cycles):
            await engines.load("comes", config)
            comes = engines["comes"]
            own = [asyncio.create_task(comes.score(pair.query, documents)) for pair in pairs[:4]]
            await asyncio.sleep(0)  # they are in
            await engines.drop("comes", grace=None)
            assert all(len(result.scores) == len(documents) for result in await asyncio.gather(*own))
            del comes, own
            if cycle == 0:  # what libraries keep for ever is there by now
                before, begun = resident(), answered
        await until(lambda: answered > begun)
        assert (resident(), traffic.done()) == (pytest.approx(before, rel=0.03), False)
        traffic.cancel()
        await asyncio.gather(traffic, return_exceptions=True)


async def _model(turn: Turn, clock: Clock, draw: random.Random, longest: float) -> None:
    """Runs steps of up to so many seconds one after the other."""
    while True:
        async with turn:
            started = clock.now
            clock.now += draw.uniform(0, longest)
            turn.charge(started)


async def _run(turns: list[Turn], clock: Clock, longest: list[float], seconds: float) -> list[float]:
    """The seconds of each once the clock has come so far."""
    before = [turn.seconds for turn in turns]
    draw = random.Random(0)
    models = [asyncio.create_task(_model(turns[i], clock, draw, longest[i])) for i in range(len(turns))]
    end = clock.now + seconds
    while clock.now < end:
        await asyncio.sleep(0)
    for model in models:
        model.cancel()
    await asyncio.gather(*models, return_exceptions=True)
    return [turn.seconds - already for turn, already in zip(turns, before, strict=True)]


@pytest.mark.parametrize("weights", [(1, 3), (5, 2, 1)])
async def test_time_is_shared_by_weight_whatever_the_length_of_steps(weights: tuple[float, ...]) -> None:
    turns = Turns(clock := Clock())
    members = [turns.join(weight) for weight in weights]
    used = await _run(members, clock, [0.01, 0.2, 0.05][: len(weights)], 40.0)
    for seconds, weight in zip(used, weights, strict=True):
        assert seconds / sum(used) == pytest.approx(weight / sum(weights), rel=0.03)
    # An idle one costs nothing, and saves up no more than a moment.
    turns = Turns(clock)
    busy, idle = turns.join(1.0), turns.join(1.0)
    assert await _run([busy], clock, [0.1], 20.0) == [pytest.approx(20.0, abs=0.2)]
    used = await _run([busy, idle], clock, [0.1, 0.1], 10.0)
    assert used[1] == pytest.approx(5.0, abs=0.5)


async def test_overlapping_steps_are_paid_for_once_by_a_weight() -> None:
    turns = Turns(clock := Clock())
    first, second = turns.join(1.0), turns.join(1.0)
    clock.now = 3.0
    assert first.charge(1.0) == 2.0
    clock.now = 4.0
    assert (second.charge(2.0), first.charge(5.0)) == (1.0, 0.0)
    for weight in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="must be positive and finite"):
            turns.join(weight)


async def test_whoever_is_cancelled_holds_up_nobody() -> None:
    async def hold(turn: Turn) -> None:
        async with turn:
            await asyncio.sleep(0)

    turns = Turns(Clock())
    members = [turns.join(1.0) for _ in range(3)]
    draw = random.Random(1)
    for _ in range(100):
        tasks = [asyncio.create_task(hold(turn)) for turn in members]
        for _ in range(draw.randrange(8)):
            await asyncio.sleep(0)
        gone = draw.choice(tasks)
        gone.cancel()
        left = [task for task in tasks if task is not gone]
        async with asyncio.timeout(600):
            await asyncio.gather(*left)
            await asyncio.gather(gone, return_exceptions=True)
        assert turns.holder is None
