"""Results in part: what is scored when the time is up or beside documents that fail, and streams of parts."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Any

import pytest
import pytest_asyncio

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, WINDOW_LONG, Engine, EngineConfig, SyncEngine, Truncation, errors
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.engine import SCORE_DEFAULTS, ScoreStream
from maxsimd.engine.metrics import EngineStats
from maxsimd.engine.processors.processor import ProcessorContext, RequestIds, ScoreProcessor, UnscoredPlan
from maxsimd.engine.processors.text.builder import LengthLimits
from maxsimd.engine.requests import ScoreRequest, ScoreResult
from maxsimd.scheduler import Step
from tests.checkpoints import bi_encoders, cross_encoders
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import held_steps
from tests.unit.calling_handlers import Caller, RecordingEngine
from tests.unit.engine.processors.small_models import model, tokenizer
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

POISON = "poison"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["late interaction", "cross-encoder"])
async def engine(request: Any, checkpoints: SharedCheckpoints) -> AsyncIterator[RecordingEngine]:
    """An engine of small steps, whose model fails on one word."""
    kind: dict[str, Any] = {"model": checkpoints(cross_encoders.bert)}
    if request.param == "late interaction":
        kind = {"model": checkpoints(bi_encoders.bge), "score_type": "late-interaction"}
    config = EngineConfig(dtype="float32", max_batch_tokens=512, cache_mb=0, **kind)
    async with RecordingEngine(config) as engine:
        runner: Any = engine.device_model.runner
        forward: Callable[[Step], Any] = runner.forward
        poison = engine.tokenizer.encode([POISON], "texts")[0][0]

        def fails_on_poison(step: Step) -> Any:
            if any(poison in chunk.sequence.tokens.ids for chunk in step.chunks):
                raise RuntimeError("cannot run this")
            return forward(step)

        runner.forward = fails_on_poison
        yield engine


@pytest.fixture
def documents(pairs: list[Pair]) -> list[str]:
    texts = [f"{i} {pair.document}" for i, pair in enumerate(pairs)]
    return [text for text in texts if POISON not in text.lower()][:60]


async def test_failed_documents_have_errors(engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxsimd.engine.workers._MANY_VALUES", 40)
    short, too_long = [f"text {i}" for i in range(80)], "word " * 600
    whole = await engine.score("a query", short)
    mixed = [*short[:40], too_long, *short[40:], POISON, "\ud800", POISON]
    with pytest.raises(errors.InvalidRequestError):
        await engine.score("a query", mixed, truncation="error")
    with pytest.raises(errors.RequestFailedError, match=r"^documents\[1\]: the model failed on it"):
        await engine.score("a query", ["fine", POISON])
    result = await engine.score("a query", mixed, truncation="error", on_error="report")
    assert sorted(result.errors) == [40, 81, 82, 83]
    assert result.errors[40].startswith("documents[40] has ")
    assert result.errors[81] == result.errors[83] == "the model failed on it"
    assert result.errors[82].startswith("documents[82] has half of a character")
    assert math.isnan(result.scores[40])
    there = [result.scores[i] for i in range(84) if i not in result.errors]
    assert (there, result.unscored) == (pytest.approx(whole.scores, abs=1e-4), ())
    ranked = await engine.rerank("a query", mixed, truncation="error", on_error="report")
    assert (len(ranked.results), sorted(ranked.errors)) == (80, sorted(result.errors))
    for documents in ([too_long] * 3, [POISON]):
        ranked = await engine.rerank("a", documents, truncation="error", on_error="report")
        assert (ranked.results, sorted(ranked.errors)) == ([], [*range(len(documents))])
    # One window of two breaks the model.
    long = "word " * 400 + POISON + " word" * 400
    result = await engine.score("a", [long, "fine"], truncation=WINDOW_LONG, on_error="report")
    assert (set(result.errors), math.isfinite(result.scores[1])) == ({0}, True)
    await until(lambda: engine.stats() == EngineStats())


async def test_a_broken_document_is_tried_once() -> None:
    tried = []

    class Recording(ScoreProcessor):
        @classmethod
        def is_for(cls, model: LoadedModel) -> bool:
            return True

        def plan(self, request: ScoreRequest, ids: RequestIds) -> UnscoredPlan:
            tried.append(request.documents)
            if "\ud83d" in request.documents:
                raise errors.InvalidRequestError("documents[0] is broken", "documents")
            return UnscoredPlan.of(request)

        def shortest_sequences(self) -> dict[str, int]:
            return {}

    documents = ("a", *["\ud83d"] * 100, "b")
    request = ScoreRequest(queries=("q",), documents=documents, skip_unreadable=True)
    processor = Recording(ProcessorContext(model(), tokenizer(), LengthLimits(10, 0)))
    found = processor.prepare(request, RequestIds(0, count(), 9))
    assert found.errors == {i: f"documents[{i}] is broken" for i in range(1, 101)}
    assert tried == [documents, ("\ud83d",), ("a", "b"), ("a", "b")]


async def test_what_is_wrong_with_the_query_fails_the_request(engine: RecordingEngine) -> None:
    for queries, named in (("\ud800", 0), (["a", "\ud800"], 1)):
        with pytest.raises(errors.InvalidRequestError, match=rf"^queries\[{named}\] has half"):
            await engine.score(queries, ["\ud800", "b"], on_error="report")
    if engine.model.score_task == "classify":
        assert set((await engine.rerank(POISON, ["a", "b"], on_error="report")).errors) == {0, 1}
    else:
        with pytest.raises(errors.RequestFailedError):
            await engine.rerank(POISON, ["a", "b"], on_error="report")
    await until(lambda: engine.stats() == EngineStats())


async def test_in_the_end_what_is_scored_comes_back(engine: RecordingEngine, documents: list[str]) -> None:
    whole = await engine.score("why", documents, truncation=CUT_LONG)
    with held_steps(engine, after=4):
        result = await engine.score("why", documents, truncation=CUT_LONG, timeout=2.5, on_timeout="partial")
    there = [i for i in range(len(documents)) if i not in result.unscored]
    assert 0 < len(result.unscored) < len(documents)
    assert [result.scores[i] for i in there] == pytest.approx([whole.scores[i] for i in there], abs=1e-4)
    assert all(math.isnan(result.scores[i]) for i in result.unscored)
    assert result.errors == {}
    await until(lambda: engine.stats() == EngineStats())
    ranked = await engine.rerank("a", documents, timeout=1e-6, on_timeout="partial")
    assert (ranked.results, ranked.unscored, ranked.usage.prompt_tokens) == ([], tuple(range(60)), 0)
    ranked = await engine.rerank("a", ["b", "c"], timeout=60, on_timeout="partial")
    assert (len(ranked.results), ranked.unscored) == (2, ()), "what is done in time is complete"
    await until(lambda: engine.stats() == EngineStats())


async def test_a_partial_request_can_be_cancelled(engine: RecordingEngine, documents: list[str]) -> None:
    with held_steps(engine):
        task = asyncio.create_task(engine.rerank("a", documents, timeout=60, on_timeout="partial"))
        await until(lambda: engine.stats().waiting_tokens > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    running: Any = engine._running
    assert not running._awaited
    await until(lambda: engine.stats() == EngineStats())


async def test_the_wire_says_what_is_missing_where_it_is_asked(engine: RecordingEngine) -> None:
    caller, documents = Caller(engine), ["fine", POISON, "also fine"]
    rerank = {"query": "a", "documents": documents, "on_error": "report"}
    answer = await caller.json("/rerank", rerank)
    assert sorted(result["index"] for result in answer["results"]) == [0, 2]
    assert (answer["errors"], "complete" in answer) == (
        [{"index": 1, "error": "the model failed on it"}],
        False,
    )
    answer = await caller.json("/rerank", rerank | {"on_timeout": "partial", "timeout": 1e-6})
    assert (answer["results"], answer["complete"], answer["unscored"]) == ([], False, [0, 1, 2])
    score = {"queries": "a", "documents": documents, "on_error": "report", "on_timeout": "partial"}
    answer = await caller.json("/score", score)
    assert [item["index"] for item in answer["data"]] == [0, 2]
    assert (answer["complete"], answer["unscored"], answer["object"]) == (True, [], "list")
    plain = await caller.json("/score", {"queries": "a", "documents": ["fine"]})
    assert not {"complete", "unscored", "errors"} & set(plain)


async def test_a_listwise_model_gives_all_at_once_and_nothing_in_part(listwise: str) -> None:
    async with Engine(EngineConfig(model=listwise, dtype="float32")) as source:
        for option, value in (("on_timeout", "partial"), ("on_error", "report")):
            with pytest.raises(errors.InvalidRequestError, match="scores documents by each other") as refused:
                await source.score("a", ["b"], **{option: value})  # type: ignore[arg-type]
            assert refused.value.param == option
        short = [f"file {i}" for i in range(126)]  # one more than are read together
        for queries, documents in ((QUERY, short), ([QUERY] * 9, short[:9])):
            parts, result = await _streamed(source, queries, documents)
            assert len(parts) == 1, "before all are scored none is"
            assert [one.score for one in parts[-1]] == result.scores


QUERY = "how is a file opened"
DOCUMENTS = [f"{i} open the file number {i}, read it and close it" for i in range(48)]
# Documents of several steps, so that some wait while another runs.
MANY = [f"{document} again {i}" for i in range(4) for document in DOCUMENTS]
WINDOWS = Truncation(max_tokens=40, windows=True)


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["late interaction", "bi-encoder", "cross-encoder"]
)
async def source(request: pytest.FixtureRequest, checkpoints: SharedCheckpoints) -> AsyncIterator[Engine]:
    options: dict[str, Any] = {"dtype": "float32", "max_batch_tokens": 256}
    if request.param == "cross-encoder":
        options["model"] = checkpoints(cross_encoders.bert)
    else:
        options |= {"model": checkpoints(bi_encoders.bge), "score_type": request.param.replace(" ", "-")}
    async with Engine(EngineConfig(**options)) as source:
        yield source


async def _streamed(source: Engine, *texts: Any, **options: Any) -> tuple[list[list[Any]], Any]:
    async with source.stream(*texts, **options) as stream:
        return [part async for part in stream], stream.result


@pytest.mark.parametrize(
    "options", [{}, {"explain": True, "normalize": True}, {"truncation": WINDOWS, "cache": "bypass"}], ids=str
)
@pytest.mark.parametrize("queries", [QUERY, [f"{QUERY} {i}" for i in range(50)]], ids=["1:N", "N:N"])
async def test_parts_are_the_whole(source: Engine, queries: str | list[str], options: dict[str, Any]) -> None:
    documents = [*DOCUMENTS, DOCUMENTS[0], " ".join(DOCUMENTS[:9])]
    await source.score(QUERY, documents[:20])
    for _ in range(2):  # first some documents come from the cache, then all
        parts, result = await _streamed(source, queries, documents, **options)
        found = [one for part in parts for one in part]
        assert sorted(one.index for one in found) == list(range(len(documents)))
        assert all([one.index for one in part] == sorted(one.index for one in part) for part in parts)
        assert all(one.document == documents[one.index] for one in found)
        assert {one.index: one.score for one in found} == dict(enumerate(result.scores))
        assert all((one.explanation is not None) == ("explain" in options) for one in found)
        whole = await source.score(queries, documents, **(options | {"explain": False}))
        assert whole.scores == pytest.approx(result.scores, abs=1e-5)
        assert (result.unscored, whole.usage.prompt_tokens) == ((), result.usage.prompt_tokens)


async def test_the_first_part_is_there_long_before_the_last(source: Engine) -> None:
    running: Any = source._running
    waiting = []
    with held_steps(source, after=2) as go_on:
        async with source.stream(QUERY, MANY, cache="bypass") as stream:
            async for part in stream:
                assert part
                waiting.append(running.scheduler.waiting_tokens)
                go_on.set()
    assert (waiting[0] > 0, waiting[-1]) == (True, 0), "documents are still to be run"


async def test_leaving_early_cancels_the_rest(source: Engine) -> None:
    running: Any = source._running
    with held_steps(source, after=2):
        async with source.stream(QUERY, MANY, cache="bypass") as stream:
            async for part in stream:
                assert part
                break
            with pytest.raises(RuntimeError, match="the result is there"):
                _ = stream.result
    await until(lambda: source.stats() == EngineStats())
    with held_steps(source):
        task = asyncio.create_task(_streamed(source, QUERY, MANY, cache="bypass"))
        await until(lambda: running.scheduler.waiting_tokens > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await until(lambda: source.stats().open_requests == 0 and running.scheduler.waiting_tokens == 0)


async def test_a_caller_that_is_cancelled_as_it_leaves_is_told(source: Engine) -> None:
    leaving = asyncio.Event()

    class Slow(ScoreStream):
        async def _score_all(self) -> ScoreResult:
            try:
                return await super()._score_all()
            finally:
                leaving.set()
                await asyncio.sleep(0.1)

    async def leave_early() -> None:
        async with Slow(source, QUERY, MANY, SCORE_DEFAULTS):
            await asyncio.sleep(0)

    task = asyncio.create_task(leave_early())
    await leaving.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_errors_are_raised_by_the_iteration(source: Engine) -> None:
    for documents, options, error in (
        *(([], {}, errors.InvalidRequestError), (["a", "\ud800"], {}, errors.InvalidRequestError)),
        (DOCUMENTS * 20, {"timeout": 1e-6}, errors.RequestTimeoutError),
    ):
        async with source.stream(QUERY, documents, **options) as stream:
            for _ in range(2):  # also when it goes on after the error
                with pytest.raises(error):
                    await asyncio.wait_for(anext(stream), 600)
    with pytest.raises(TypeError, match="no argument top_n"):
        source.stream(QUERY, DOCUMENTS, top_n=3)  # type: ignore[call-arg]
    # Documents without a score are left out.
    parts, result = await _streamed(source, QUERY, ["a", "\ud800", "b"], on_error="report")
    assert [one.index for part in parts for one in part] == [0, 2]
    assert ([*result.errors], math.isnan(result.scores[1])) == ([1], True)


async def test_a_blocking_caller_gets_the_same(stanford_colbert: str) -> None:
    with SyncEngine(EngineConfig(model=stanford_colbert, max_batch_tokens=256, dtype="float32")) as source:
        with held_steps(source._engine, after=2) as go_on, source.stream(QUERY, DOCUMENTS) as stream:
            parts = [next(stream)]
            go_on.set()
            parts += stream
            scores = {one.index: one.score for part in parts for one in part}
            assert scores == dict(enumerate(stream.result.scores))
        assert len(parts) > 1
        with source.stream(QUERY, DOCUMENTS * 3, cache="bypass") as stream:
            assert next(stream)
        while source.stats().open_requests:
            await asyncio.sleep(0.01)
        with pytest.raises(errors.InvalidRequestError), source.stream(QUERY, []) as stream:
            next(stream)
