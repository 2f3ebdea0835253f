"""Scores as they are ready: the same as all at once, in several parts, and nothing left where a caller
leaves."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from maxsimd.engine import (
    Engine,
    EngineConfig,
    InvalidRequestError,
    RankedDocument,
    RequestTimeoutError,
    SyncEngine,
    Truncation,
)
from tests.checkpoints import bi_encoders, cross_encoders, language_models
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import held_steps
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUERY = "how is a file opened"
DOCUMENTS = [f"{i} open the file number {i}, read it and close it" for i in range(48)]
# Of several steps, so that some wait while another runs.
MANY = [f"{document} again {i}" for i in range(4) for document in DOCUMENTS]
WINDOWS = Truncation(max_tokens=40, windows=True)


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["late interaction", "bi-encoder", "cross-encoder"]
)
async def engine(request: pytest.FixtureRequest, checkpoints: SharedCheckpoints) -> AsyncIterator[Engine]:
    options: dict[str, Any] = {"dtype": "float32", "max_batch_tokens": 256}
    if request.param == "cross-encoder":
        options["model"] = checkpoints(cross_encoders.bert)
    else:
        options |= {"model": checkpoints(bi_encoders.bge), "score_type": request.param.replace(" ", "-")}
    async with Engine(EngineConfig(**options)) as engine:
        yield engine


async def _streamed(engine: Engine, *texts: Any, **options: Any) -> tuple[list[list[RankedDocument]], Any]:
    async with engine.stream(*texts, **options) as stream:
        parts = [part async for part in stream]
        return parts, stream.result


@pytest.mark.parametrize(
    "options", [{}, {"explain": True, "normalize": True}, {"truncation": WINDOWS, "cache": "bypass"}], ids=str
)
@pytest.mark.parametrize("queries", [QUERY, [f"{QUERY} {i}" for i in range(50)]], ids=["1:N", "N:N"])
async def test_parts_equal_the_whole(
    engine: Engine, queries: str | list[str], options: dict[str, Any]
) -> None:
    documents = [*DOCUMENTS, DOCUMENTS[0], " ".join(DOCUMENTS[:9])]
    await engine.score(QUERY, documents[:20])
    for _ in range(2):  # first some documents come from the cache, then all
        parts, result = await _streamed(engine, queries, documents, **options)
        found = [one for part in parts for one in part]
        assert sorted(one.index for one in found) == list(range(len(documents)))
        assert all([one.index for one in part] == sorted(one.index for one in part) for part in parts)
        assert all(one.document == documents[one.index] for one in found)
        assert {one.index: one.score for one in found} == dict(enumerate(result.scores))
        assert all((one.explanation is not None) == ("explain" in options) for one in found)
        assert not result.unscored
        whole = await engine.score(queries, documents, **(options | {"explain": False}))
        assert whole.scores == pytest.approx(result.scores, abs=1e-5)
        assert whole.usage.prompt_tokens == result.usage.prompt_tokens


async def test_the_first_part_is_there_long_before_the_last(engine: Engine) -> None:
    running: Any = engine._running
    waiting = []
    with held_steps(engine, after=2) as go_on:
        async with engine.stream(QUERY, MANY, cache="bypass") as stream:
            async for part in stream:
                assert part
                waiting.append(running.scheduler.waiting_tokens)
                go_on.set()
    assert waiting[0] > 0, "documents are still to be run"
    assert waiting[-1] == 0


async def test_leaving_early_cancels_the_rest(engine: Engine) -> None:
    running: Any = engine._running
    with held_steps(engine, after=2):
        async with engine.stream(QUERY, MANY, cache="bypass") as stream:
            async for part in stream:
                assert part
                break
            with pytest.raises(RuntimeError, match="the result is there"):
                _ = stream.result
    await until(lambda: engine.stats().open_requests == 0 and running.scheduler.waiting_tokens == 0)
    await until(lambda: engine.stats().requests == 0)
    with held_steps(engine):
        task = asyncio.create_task(_streamed(engine, QUERY, MANY, cache="bypass"))
        await until(lambda: running.scheduler.waiting_tokens > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await until(lambda: engine.stats().open_requests == 0 and running.scheduler.waiting_tokens == 0)


async def test_errors_are_raised_by_the_iteration(engine: Engine) -> None:
    for documents, options, error in (
        ([], {}, InvalidRequestError),
        (["a", "\ud800"], {}, InvalidRequestError),
        (DOCUMENTS * 20, {"timeout": 1e-6}, RequestTimeoutError),
    ):
        with pytest.raises(error):
            await _streamed(engine, QUERY, documents, **options)
    with pytest.raises(TypeError, match="no argument top_n"):
        engine.stream(QUERY, DOCUMENTS, top_n=3)  # type: ignore[call-arg]
    # Documents without a score are left out.
    parts, result = await _streamed(engine, QUERY, ["a", "\ud800", "b"], on_error="report")
    assert [one.index for part in parts for one in part] == [0, 2]
    assert list(result.errors) == [1]
    assert math.isnan(result.scores[1])


async def test_a_listwise_model_gives_all_at_once(checkpoints: SharedCheckpoints) -> None:
    async with Engine(EngineConfig(model=checkpoints(language_models.jina_reranker_v3))) as engine:
        short = [f"file {i}" for i in range(126)]  # one more than are read together
        for queries, documents in ((QUERY, short), ([QUERY] * 9, short[:9])):
            parts, result = await _streamed(engine, queries, documents)
            assert len(parts) == 1, "before all are scored none is"
            assert [one.score for one in parts[-1]] == result.scores


async def test_a_blocking_caller_gets_the_same(stanford_colbert: str) -> None:
    with SyncEngine(EngineConfig(model=stanford_colbert, max_batch_tokens=256, dtype="float32")) as engine:
        with held_steps(engine._engine, after=2) as go_on, engine.stream(QUERY, DOCUMENTS) as stream:
            parts = [next(stream)]
            go_on.set()
            parts += stream
            scores = {one.index: one.score for part in parts for one in part}
            assert scores == dict(enumerate(stream.result.scores))
        assert len(parts) > 1
        with engine.stream(QUERY, DOCUMENTS * 3, cache="bypass") as stream:
            assert next(stream)
        while engine.stats().open_requests:
            await asyncio.sleep(0.01)
        with pytest.raises(InvalidRequestError), engine.stream(QUERY, []) as stream:
            next(stream)
