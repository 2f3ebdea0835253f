"""A front beside engines that are stand-ins: real sockets and the real protocol, without models."""

import asyncio
import math
import pickle
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from maxsimd.api.answer import ApiError
from maxsimd.api.fleet import messages as wire
from maxsimd.api.fleet import roster as roster_module
from maxsimd.api.fleet.engine_answers import fingerprint_of
from maxsimd.api.fleet.fleet_engine import FleetEngine
from maxsimd.api.fleet.link import Door, Link, LostError, Send, UnixAddress, read_message
from maxsimd.api.fleet.roster import Listed, Roster
from maxsimd.api.fleet.spread import ScoreJob
from maxsimd.engine import Engine, EngineConfig, ScoreResult, Tenant, Usage, errors
from maxsimd.engine.config import ScoreType
from maxsimd.engine.device.facts import ModelFacts, Scales
from maxsimd.engine.engine import SCORE_DEFAULTS
from maxsimd.engine.media import Content, EncodedPicture, MissingPicture, PictureFile
from maxsimd.engine.metrics import MergedMetrics
from maxsimd.engine.scoring.scale import ScoreScale
from maxsimd.engine.workers import yield_to_smaller
from maxsimd.pooling.query_rows import QueryRows
from maxsimd.pooling.vectors import Vectors
from tests.waiting import until

_SCALE = ScoreScale("maxsim", None, None)
_PLAIN = b"cnumpy\nfloat64\n."  # a pickle of something small, in a tokenizer's place
_LONG = " and so on" * 300

_FACTS = ModelFacts(
    name="stand-in", score_type=ScoreType.LATE_INTERACTION, score_task="token_embed", dims={"token_embed": 4},
    normalized=("token_embed",), embed_pooling=None, labels=(), max_tokens=512, step_tokens=2_048,
    reads_pictures=False, scales=Scales(_SCALE, _SCALE, _SCALE), normalizes=True, device="cpu", kernels="",
    precision="float32", execution="packed", findings=(),
)  # fmt: skip
ENCODED = wire.SentQuery(wire.SentVectors(np.ones((3, 4), np.float32), None), 10, True, "one")
Before = Callable[["StandIn", Any], Awaitable[None]] | None


async def _dying(engine: "StandIn", comes_back: bool = True) -> None:
    asyncio.get_running_loop().create_task(engine.restart() if comes_back else engine.die())
    await asyncio.sleep(10)


def _deadly(deaths: list["StandIn"], most: int, comes_back: bool = True) -> Any:
    async def die(engine: "StandIn", question: object) -> None:
        if len(deaths) < most:
            deaths.append(engine)
            await _dying(engine, comes_back)

    return die


class StandIn:
    """Scores each document by its length; `before` runs ahead of answers to one kind of question."""

    def __init__(self, path: str, before: Before = None, kind: Any = wire.Score) -> None:
        self.path, self.fingerprint, self.cancelled = path, "one", 0
        self.score_type = ScoreType.LATE_INTERACTION
        self.asked: list[wire.Score] = []
        self.encoded: list[wire.EncodeQuery] = []
        self.seen: list[type | wire.Command] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self._before, self._kind = before, kind
        self.door = Door(self._answer, lambda: 7)

    async def restart(self) -> None:
        await self.die()
        self.door = Door(self._answer, lambda: 7)
        await self.door.open(self.path)

    async def die(self) -> None:
        await self.door.close()

    async def _answer(self, question: wire.Question, send: Send) -> wire.Answer:
        await self.answers.wait()
        self.seen.append(question if isinstance(question, wire.Command) else type(question))
        if question is wire.Command.INTRODUCE:
            facts = replace(_FACTS, score_type=self.score_type)
            config, fingerprint = EngineConfig(), self.fingerprint
            return wire.Introduction(facts=facts, config=config, tokenizer=_PLAIN, fingerprint=fingerprint)
        if not isinstance(question, wire.EncodeQuery | wire.Score):
            await self._prepare(question)
        try:
            if isinstance(question, wire.EncodeQuery):
                self.encoded.append(question)
                await self._prepare(question)
                return ENCODED
            if isinstance(question, wire.Score):
                self.asked.append(question)
                return await self._score(question, send)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return wire.Done()

    async def _prepare(self, question: wire.Question) -> None:
        kinds = self._kind if isinstance(self._kind, tuple) else (self._kind,)
        if self._before is not None and (question in kinds or type(question) in kinds):
            await self._before(self, question)

    async def _score(self, question: wire.Score, send: Send) -> wire.Answer:
        texts = [text for text in question.documents if isinstance(text, str)]
        if question.streams:
            await send(wire.Arrived(ScoreResult([float(len(texts[0]))], Usage(0), 0), [0]))
        await self._prepare(question)
        timeout = question.run.timeout
        if question.on_timeout == "partial" and timeout is not None and timeout <= 0:
            unscored = tuple(range(len(texts)))
            return wire.Scored(ScoreResult([math.nan] * len(texts), Usage(0), 0, unscored=unscored))
        scores = [float(len(text)) for text in texts]
        return wire.Scored(ScoreResult(scores, Usage(10 + len(texts), 0, 0, 10), 1, truncated_queries=1))


@asynccontextmanager
async def fleet(
    folder: Path, count: int, before: Before = None, kind: Any = wire.Score,
    score_type: ScoreType = ScoreType.LATE_INTERACTION, timeout: float = 60.0, is_alone: bool = True,
) -> AsyncIterator[tuple[FleetEngine, list[StandIn]]]:  # fmt: skip
    engines = [StandIn(str(folder / str(i)), before, kind) for i in range(count)]
    for engine in engines:
        engine.score_type = score_type
        await engine.door.open(engine.path)
    listed = [Listed(slot, UnixAddress(engine.path)) for slot, engine in enumerate(engines)]
    front = FleetEngine(Roster(listed, timeout=timeout, is_alone=is_alone))
    await front.start()
    await until(lambda: front.size == (count, count))
    try:
        yield front, engines
    finally:
        await front.stop()
        for engine in engines:
            await engine.die()


def replace_first(front: FleetEngine, engines: list[StandIn]) -> StandIn:
    """Lists another engine, which does not listen yet, in place of the first."""
    engines.append(StandIn(engines[0].path + "-next", engines[0]._before, engines[0]._kind))
    front.set_listed([Listed(1, UnixAddress(engines[1].path))])
    return engines[1]


async def test_a_silent_engine_gets_no_work_until_it_answers(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2, timeout=0.3) as (front, engines):
        silent, other = engines
        silent.answers.clear()
        result = await asyncio.wait_for(front.score("q", DOCUMENTS), 600)
        assert (result.scores, silent.asked, front.size) == (LENGTHS, [], (1, 2))
        registry = front.metrics.registry
        assert registry.get_sample_value("maxsimd_replicas_silent") == 1
        await until(lambda: len(front._roster._links) == 2)
        for _ in range(2):
            with pytest.raises(ApiError, match="not cleared yet by replica 0; "):
                await front.clear_cache()
        assert wire.Command.CLEAR_CACHE in other.seen
        silent.seen.clear()
        silent.answers.set()
        await until(lambda: front.size == (2, 2))
        assert silent.seen.count(wire.Command.CLEAR_CACHE) == 1
        await front.clear_cache()
        assert (await front.score("q", DOCUMENTS, cache="bypass")).scores == result.scores
        assert silent.asked
        assert registry.get_sample_value("maxsimd_replicas_silent") == 0
    async with fleet(tmp_path, 1, timeout=0.2) as (front, (engine,)):
        engine.answers.clear()
        asking = []
        async with asyncio.timeout(600):
            while front.is_healthy:  # what is sent is no sign of life
                asking.append(asyncio.create_task(front.score("q", ["abc"])))
                await asyncio.sleep(0.01)
        engine.answers.set()
        assert all([(await each).scores == [3.0] for each in asking])


@pytest.mark.parametrize("is_alone", [True, False])
async def test_an_engine_that_restarts_clears_its_cache_first(tmp_path: Path, is_alone: bool) -> None:
    async with fleet(tmp_path, 2, is_alone=is_alone) as (front, engines):
        restarting, _ = engines
        await restarting.die()
        await until(lambda: front.size == (1, 2))
        restarting.seen.clear()
        # Another front may give it work before it has cleared its cache for this one.
        with nullcontext() if is_alone else pytest.raises(ApiError, match="not cleared yet by replica 0; "):
            await front.clear_cache()
        await restarting.restart()
        await until(lambda: front.size == (2, 2))
        assert restarting.seen.index(wire.Command.CLEAR_CACHE) == 1, "before it gets work"
        await front.clear_cache()
        restarting.seen.clear()
        await restarting.restart()
        await until(lambda: wire.Command.INTRODUCE in restarting.seen)
        assert wire.Command.CLEAR_CACHE not in restarting.seen


async def test_an_engine_that_connects_learns_what_changes_meanwhile(tmp_path: Path) -> None:
    told, clearing = list[object](), list[asyncio.Task[None]]()

    async def change(engine: StandIn, question: Any) -> None:
        if question is wire.Command.CLEAR_CACHE:
            await until(lambda: engine.seen.count(wire.Command.CLEAR_CACHE) > 1)
            front.set_tenants({"a": Tenant(weight=2)})
            return
        told.append(question.tenants)
        if not clearing:
            clearing.append(asyncio.create_task(front.clear_cache()))
            await until(lambda: wire.Command.CLEAR_CACHE in engine.seen)

    async with fleet(tmp_path, 1) as (front, (engine,)):
        await engine.die()
        await until(lambda: not front.is_healthy)
        engine._before, engine._kind, engine.seen = change, (wire.Command.CLEAR_CACHE, wire.SetTenants), []
        await engine.restart()
        await until(lambda: front.is_healthy and bool(told))
        assert told[-1] == {"a": Tenant(weight=2)}
        await clearing[0]


async def test_a_front_withdraws_work_that_nobody_waits_for(tmp_path: Path) -> None:
    begun, ended, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    def work() -> None:
        end = time.monotonic() + 3600
        loop.call_soon_threadsafe(begun.set)
        try:
            while time.monotonic() < end:
                time.sleep(0.01)
                yield_to_smaller()
        finally:
            loop.call_soon_threadsafe(ended.set)

    async with fleet(tmp_path, 1) as (front, _):
        working = asyncio.create_task(front.in_thread(work, 1))
        await begun.wait()
        working.cancel()
        await asyncio.wait_for(ended.wait(), 600)


async def test_one_with_a_locked_cache_gets_no_work(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(roster_module, "_PAUSE_SECONDS", 0.01)
    unlocked = asyncio.Event()

    async def clear(engine: StandIn, question: object) -> None:
        if len(engine.seen) < 5:
            await unlocked.wait()
        elif not unlocked.is_set():
            raise errors.RequestFailedError("the cache is locked")

    async with fleet(tmp_path, 1, clear, wire.Command.CLEAR_CACHE, timeout=0.3) as (front, (engine,)):
        engine.seen.clear()
        for _ in range(2):
            with pytest.raises(ApiError, match="not cleared yet by replica 0; "):
                await front.clear_cache()
        assert engine.seen.count(wire.Command.CLEAR_CACHE) == 1, "it is asked once at a time"
        engine.seen += [wire.Command.PING] * 5
        await engine.restart()
        await until(lambda: engine.seen.count(wire.Command.CLEAR_CACHE) > 4)
        assert not front.is_healthy
        unlocked.set()
        await until(lambda: front.is_healthy)
    assert caplog.text.count("cannot clear its cache: the cache is locked") == 1


async def test_a_leaving_engine_that_is_silent_is_given_up(tmp_path: Path) -> None:
    async def wait(engine: StandIn, question: object) -> None:
        if engine is engines[0]:
            await asyncio.sleep(3600)

    async with fleet(tmp_path, 1, wait, wire.Command.CLEAR_CACHE, timeout=0.3) as (front, engines):
        other = replace_first(front, engines)
        with pytest.raises(ApiError, match="not cleared yet by replica 0; "):
            await front.clear_cache()
        engines[0].answers.clear()
        asking = asyncio.create_task(front.score("q", ["abc"]))
        await other.door.open(other.path)
        assert (await asyncio.wait_for(asking, 600)).scores == [3.0]


def _documents(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [f"{i} {'x' * rng.randrange(1, 900)}{_LONG}" for i in range(count)]


DOCUMENTS = _documents(60)
LENGTHS = [float(len(text)) for text in DOCUMENTS]


async def test_large_requests_are_spread_unless_they_belong_together(tmp_path: Path) -> None:
    async with fleet(tmp_path, 3) as (front, engines):
        result = await front.score("q", DOCUMENTS)
        assert result.scores == LENGTHS
        assert result.usage == Usage(10 + 60, 0, 0, 10), "the query counts once"
        assert (result.truncated, sum(len(engine.asked) for engine in engines)) == (1, 3)
        assert (await front.score("q", DOCUMENTS)).scores == result.scores
        for engine in engines:
            first, second = (set(question.documents) for question in engine.asked)
            assert first == second, "each document goes to its owner again"
        assert (await front.score("q", ["short"])).scores == [5.0]
        asked = [len(engine.asked) for engine in engines]
        for _ in range(2):
            await front.score("q", DOCUMENTS, cache="bypass")
        added = [len(engine.asked) - before for engine, before in zip(engines, asked, strict=True)]
        assert added == [2, 2, 2], "what no engine caches is spread each time"
    async with fleet(tmp_path, 2, score_type=ScoreType.LISTWISE) as (front, engines):
        await front.score("q", DOCUMENTS)
        assert sorted(len(engine.asked) for engine in engines) == [0, 1]
    async with fleet(tmp_path, 2, _deadly([], most=2)) as (front, engines):
        documents = _documents(20)
        result = await front.score(["a"] * 20, documents)
        assert result.scores == [float(len(text)) for text in documents]
        assert {len(question.documents) for engine in engines for question in engine.asked} == {20}


async def test_parts_without_time_count_no_query() -> None:
    assert ScoreJob(_FACTS, "q", ["𝄞"], SCORE_DEFAULTS).most_tokens == 1 + 4 + 1_024, "a token is a byte"
    scored = ScoreJob(_FACTS, "q", ["a", "b", "c"], SCORE_DEFAULTS)
    whole = ScoreResult([1.0], Usage(30, 0, 0, 10), 1, truncated_queries=1, raw_scores=[20.0])
    none = ScoreResult([math.nan], Usage(0), 0, unscored=(0,))
    bad = ScoreResult([math.nan], Usage(0), 0, errors={0: "documents[0] is bad"})
    for index, part in ((1, none), (0, whole), (2, bad)):
        scored.commit(np.array([index]), wire.Scored(part))
    result = scored.result()
    assert (result.usage, result.truncated, result.truncated_queries) == (Usage(30, 0, 0, 10), 1, 1)
    assert (result.unscored, result.errors) == ((1,), {2: "documents[2] is bad"})
    np.testing.assert_array_equal(result.ranking_scores, [20.0, math.nan, math.nan])
    late = ScoreJob(_FACTS, "q", ["a", "b"], {**SCORE_DEFAULTS, "on_timeout": "partial"}, lambda *_: None)
    late.arrived(np.array([1]), wire.Arrived(ScoreResult([2.0], Usage(0), 0), [0]))
    late.commit(np.array([0]), wire.Scored(whole))
    assert late.result().ranking_scores == [1.0, 2.0], "raw scores are no match for final ones"


def test_the_fingerprint_has_the_settings_that_change_scores() -> None:
    def of(facts: dict[str, Any] | None = None, weights: str = "w", **options: Any) -> str:
        stated, model = replace(_FACTS, **(facts or {})), SimpleNamespace(fingerprint=weights)
        engine = SimpleNamespace(facts=stated, model=model, config=EngineConfig(**options))
        return fingerprint_of(cast("Engine", engine))

    scored = {
        "model": "a/b", "revision": "r", "dtype": "bfloat16", "cutoff_layer": 2, "query_prompt": "q: ",
        "document_prompt": "d: ", "instruction": "i", "score_template": "{{ query }}", "calibration": "c",
        "compress_ratio": 2, "compress_layers": "3", "doc_token_pooling": 2.0, "hybrid_weights": "1,0,0",
        "cache_precision": "int8", "dimensions": 8, "score_label": "yes",
    }  # fmt: skip
    fingerprints = [of(), of({"precision": "bfloat16"}), of(weights="v")]
    fingerprints += [of(**{name: value}) for name, value in scored.items()]
    assert len(set(fingerprints)) == len(fingerprints)
    assert of() == of(threads=3, max_batch_tokens=99, cache_mb=7, device="cpu", max_wait_seconds=1.0)
    assert of() == of({"device": "cuda:1", "findings": ("1.4e-07",), "step_tokens": 1_024})


async def test_a_poisonous_document_kills_three_and_fails_alone(tmp_path: Path) -> None:
    deaths = []

    async def die_of_poison(engine: StandIn, question: wire.Score) -> None:
        if any(isinstance(text, str) and text.startswith("poison") for text in question.documents):
            deaths.append(engine)
            await _dying(engine)

    async with fleet(tmp_path, 2, die_of_poison) as (front, _):
        documents = _documents(24)
        documents[17] = "poison" + _LONG
        others = [asyncio.create_task(front.score("q", _documents(30, seed))) for seed in range(1, 4)]
        with pytest.raises(errors.RequestFailedError, match=r"documents\[17\]"):
            await front.score("q", documents)
        assert len(deaths) == 3
        for seed, other in enumerate(others, start=1):
            assert (await other).scores == [float(len(text)) for text in _documents(30, seed)]


async def test_a_full_engine_is_passed_by_and_two_full_ones_refuse(tmp_path: Path) -> None:
    full: set[str] = set()

    async def refuse(engine: StandIn, question: wire.Score) -> None:
        if engine.path in full:
            raise errors.QueueFullError("too much waits", 3.0 + len(full))

    async with fleet(tmp_path, 2, refuse) as (front, engines):
        full.add(engines[0].path)
        assert (await front.score("q", DOCUMENTS)).scores
        full.add(engines[1].path)
        with pytest.raises(errors.QueueFullError, match="too much waits") as refused:
            await front.score("q", DOCUMENTS)
        assert refused.value.retry_after == 5.0


async def test_an_error_or_leaving_ends_the_other_parts(tmp_path: Path) -> None:
    async def refuse_one(engine: StandIn, question: wire.Score) -> None:
        for i, text in enumerate(question.documents):
            if isinstance(text, str) and text.startswith("41 "):
                raise errors.InvalidRequestError(f"documents[{i}] is not good", "documents")
        await asyncio.sleep(10)

    async with fleet(tmp_path, 3, refuse_one) as (front, engines):
        with pytest.raises(errors.InvalidRequestError, match=r"documents\[41\] is not good") as refused:
            await front.score("q", DOCUMENTS)
        assert refused.value.param == "documents"
        await until(lambda: sum(engine.cancelled for engine in engines) == 2)
        asking = asyncio.create_task(front.score("q", _documents(30)))
        await until(lambda: sum(len(engine.asked) for engine in engines) > 3)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: sum(len(engine.asked) - engine.cancelled for engine in engines) == 1)
    refuse_query = AsyncMock(side_effect=errors.InvalidRequestError("queries[0] is not good", "queries"))
    async with fleet(tmp_path, 3, refuse_query, wire.EncodeQuery) as (front, engines):
        with pytest.raises(errors.InvalidRequestError, match=r"^queries\[0\] is not good$"):
            await front.score("q", DOCUMENTS)
        assert [engine.asked for engine in engines] == [[], [], []]
    lack_a_disk = AsyncMock(side_effect=OSError("no space left on the device"))
    async with fleet(tmp_path, 1, lack_a_disk) as (front, _):
        with pytest.raises(errors.RequestFailedError, match="inside of the engine"):
            await asyncio.wait_for(front.score("q", ["a"]), 600)


async def test_a_stream_gives_what_comes_and_then_the_rest_but_for_what_is_late(tmp_path: Path) -> None:
    async def hang(engine: StandIn, question: Any) -> None:
        if isinstance(question, wire.Rank) or (question.run.timeout and engine is engines[1]):
            await asyncio.sleep(3600)

    async with fleet(tmp_path, 3, hang, (wire.Score, wire.Rank)) as (front, engines):
        for timeout in (None, 0.2):
            async with front.stream("q", DOCUMENTS, timeout=timeout, on_timeout="partial") as stream:
                given = [one async for new in stream for one in new]
            assert all(one.score == float(len(DOCUMENTS[one.index])) for one in given)
            assert sorted([*(one.index for one in given), *stream.result.unscored]) == list(range(60))
            late = engines[1].asked[-1].documents[1:] if timeout else []
            assert [DOCUMENTS[i] for i in stream.result.unscored] == late
        ranked = await front.rerank("q", DOCUMENTS, timeout=0.2, on_timeout="partial", explain=True)
        assert (ranked.results, ranked.unscored) == ([], tuple(range(60)))


async def test_a_request_that_cannot_be_sent_fails(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as (front, engines):
        with pytest.raises(errors.InvalidRequestError, match="64 bits"):
            await front.score("q", ["a"], priority=2**70)
        assert (await front.score("q", ["abc"])).scores == [3.0], "what cannot be sent hurts no other"
        await engines[0].die()
        await until(lambda: not front.is_healthy)
        with pytest.raises(errors.RequestTimeoutError, match=r"not done within 0\.2 seconds"):
            await front.score("q", ["a"], timeout=0.2)


async def test_a_leaving_engine_serves_until_it_is_replaced(tmp_path: Path) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def wait(engine: StandIn, question: wire.Score) -> None:
        asked.set()
        await may_answer.wait()

    async with fleet(tmp_path, 1, wait) as (front, engines):
        other, roster = replace_first(front, engines), front._roster
        await asyncio.sleep(0.05)
        assert front.is_healthy
        first = asyncio.create_task(front.score("q", ["abc"], timeout=60))
        await asked.wait()
        await other.door.open(other.path)
        while [member.slot for member in roster.members] != [1]:
            assert front.is_healthy
            await asyncio.sleep(0)
        second = asyncio.create_task(front.score("q", ["ab"], timeout=60))
        await until(lambda: bool(other.asked))
        may_answer.set()
        assert (await first).scores == [3.0], "it answers what it was asked"
        assert ((await second).scores, [len(engine.asked) for engine in engines]) == ([2.0], [1, 1])
        await asyncio.wait_for(engines[0].door.until_left(), 600)
        roster.set_listed([Listed(7, UnixAddress(other.path))])
        assert [member.slot for member in roster.members] == [7]


async def test_who_has_not_the_secret_is_not_let_in() -> None:
    engine = StandIn("")
    address = await engine.door.open_port("127.0.0.1")
    link = await Link.open(address)
    assert isinstance((await link.ask(wire.Command.INTRODUCE)).answer, wire.Introduction)
    await link.close()
    stranger = await Link.open(replace(address, secret="00" * 32))
    with pytest.raises(LostError):
        await stranger.ask(wire.Command.INTRODUCE)
    await stranger.close()
    await engine.door.close()


async def test_a_replica_of_another_version_is_unused(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(roster_module, "_PAUSE_SECONDS", 0.01)
    came: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frame = wire.greeting("9.9.9")
        writer.write(len(frame).to_bytes(4, "little") + frame + b"\x01\x00\x00\x00?")
        came.append(await read_message(reader))
        writer.close()

    address = UnixAddress(str(tmp_path / "0"))
    roster = Roster([Listed(0, address)])
    async with await asyncio.start_unix_server(answer, address.path):
        roster.start()
        await until(lambda: len(came) > 2)
        await roster.close()
    assert (came[0], roster.members) == (wire.greeting(wire.own_version()), ())
    both = f"it runs maxsimd 9.9.9, and this process {wire.own_version()}; run the same version everywhere"
    assert caplog.messages == [f"replica 0 is not used: {both}"]


@pytest.mark.parametrize(
    ("first", "named"),
    [(wire.greeting("9.9.9"), "9.9.9"), (wire.encode(wire.Ask(1, wire.Command.PING)), "an older version")],
)
async def test_a_front_of_another_version_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: bytes, named: str
) -> None:
    engine = StandIn(str(tmp_path / "0"))
    await engine.door.open(engine.path)
    reader, writer = await asyncio.open_unix_connection(engine.path)
    writer.write(len(first).to_bytes(4, "little") + first)
    assert await read_message(reader) == wire.greeting(wire.own_version())
    with pytest.raises((EOFError, OSError)):
        await read_message(reader)
    writer.close()
    await engine.die()
    assert engine.seen == []
    both = f"it runs maxsimd {named}, and this process {wire.own_version()}; run the same version everywhere"
    assert caplog.messages == [f"a front that asks is refused: {both}"]


async def test_scores_of_two_models_are_never_mixed(tmp_path: Path) -> None:
    following = {"one": "two"}

    async def change(engine: StandIn, question: wire.Score) -> None:
        if engine.fingerprint in following:
            engine.fingerprint = following[engine.fingerprint]
            await _dying(engine)

    async with fleet(tmp_path, 2, change) as (front, engines):
        assert (await front.score("q", DOCUMENTS, timeout=20)).scores == LENGTHS
        of_another = [len(question.documents) for engine in engines for question in engine.asked[1:]]
        assert sum(of_another) == 60, "nothing that the engines before them gave is in it"
        following = {"two": "three"}
        async with front.stream("q", DOCUMENTS) as stream:
            with pytest.raises(errors.EngineNotReadyError, match="taken over"):
                [new async for new in stream]
    async with fleet(tmp_path, 2) as (front, engines):
        await engines[0].die()
        engines[0].fingerprint = "another"
        await engines[0].restart()
        await asyncio.sleep(0.5)
        assert front.size == (1, 2)
        asked = len(engines[0].asked)
        await front.score("q", DOCUMENTS)
        assert len(engines[0].asked) == asked


async def test_a_query_is_encoded_once_where_there_are_parts(tmp_path: Path) -> None:
    async with fleet(tmp_path, 3) as (front, engines):
        result = await front.score("q", DOCUMENTS, instruction="find it")
        assert sorted([len(engine.encoded) for engine in engines]) == [0, 0, 1]
        (encoder,) = [engine for engine in engines if engine.encoded]
        assert (encoder.encoded[0].query, encoder.encoded[0].instruction) == ("q", "find it")
        asked = [question for engine in engines for question in engine.asked]
        assert len(asked) == 3
        for question in asked:
            (query,) = question.queries
            assert isinstance(query, wire.SentQuery)
            assert np.array_equal(query.rows.values, ENCODED.rows.values)
            assert (query.tokens, query.truncated, query.fingerprint) == (10, True, "one")
            assert question.instruction is None, "it is part of the embedding"
        tokens = {engine.path: sum(map(len, engine.asked[0].documents)) for engine in engines}  # type: ignore[arg-type]
        assert tokens[encoder.path] == max(tokens.values())
        assert (result.usage.query_tokens, result.truncated_queries) == (10, 1)
    async with fleet(tmp_path, 3) as (front, engines):
        await front.score("q", ["a", "b"], instruction="find it")
        await front.score(np.ones((2, 4), np.float32), DOCUMENTS)
        assert [len(engine.encoded) for engine in engines] == [0, 0, 0]
        questions = [question for engine in engines for question in engine.asked]
        (small,) = [question for question in questions if len(question.documents) == 2]
        assert (small.queries, small.instruction) == (["q"], "find it")
    async with fleet(tmp_path, 2, score_type=ScoreType.CROSS_ENCODER) as (front, engines):
        await front.score("q", DOCUMENTS)
        assert {query for engine in engines for one in engine.asked for query in one.queries} == {"q"}


async def test_where_the_encoding_engine_dies_three_try(tmp_path: Path) -> None:
    died, deaths = list[StandIn](), list[StandIn]()
    async with fleet(tmp_path, 3, _deadly(died, 1, comes_back=False), wire.EncodeQuery) as (front, engines):
        assert (await front.score("q", DOCUMENTS)).scores == LENGTHS
        assert sum([len(engine.encoded) for engine in engines]) == 2
        assert not died[0].asked
    async with fleet(tmp_path, 2, _deadly(deaths, most=9), wire.EncodeQuery) as (front, _):
        with pytest.raises(errors.RequestFailedError, match="while they encoded the query"):
            await front.score("q", DOCUMENTS)
        assert len(deaths) == 3


async def test_deadlines_and_cancelling_hold_while_encoding(tmp_path: Path) -> None:
    async def slow(engine: StandIn, question: wire.EncodeQuery) -> None:
        if question.run.timeout is None:
            await asyncio.sleep(3600)
        await asyncio.sleep(question.run.timeout or 0)
        raise errors.RequestTimeoutError.after(question.run.timeout or 0)

    async with fleet(tmp_path, 2, slow, wire.EncodeQuery) as (front, engines):
        with pytest.raises(errors.RequestTimeoutError, match=r"not done within 0\.2 seconds"):
            await front.score("q", DOCUMENTS, timeout=0.2)
        asking = asyncio.create_task(front.score("q", DOCUMENTS))
        await until(lambda: sum([len(engine.encoded) for engine in engines]) == 2)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: sum(engine.cancelled for engine in engines) == 1)
        partial = await front.score("q", DOCUMENTS, timeout=0.2, on_timeout="partial")
        assert (partial.unscored, partial.usage) == (tuple(range(60)), Usage(0))
        assert [engine.asked for engine in engines] == [[], []]


def test_what_is_sent_is_received() -> None:
    rows = [torch.arange(12.0).reshape(3, 4), torch.zeros(0, 4), torch.arange(4.0).reshape(1, 4).bfloat16()]
    pictures = [PictureFile(b"\x89PNG"), EncodedPicture("AAAA"), MissingPicture("it is gone")]
    documents: list[Any] = [
        *("", "größer\n", "a\ud83d", Content.of(["one", *pictures])),
        *(QueryRows(each, tokens=2**40, truncated=True, fingerprint="f") for each in rows),
        *(Vectors(np.arange(8).astype(dtype).reshape(2, 4)) for dtype in ("float32", "float16", "int8")),
        Vectors(rows[2]),
    ]
    run, items = wire.Run(wire.Truncation(), 0, "", None), wire.sent_items(documents)
    question = wire.Score(queries=["q"], documents=items, run=run, explain="maps", instruction="i")
    received: Any = wire.decode_to_engine(wire.encode(wire.Ask(3, question)))
    assert (type(received), type(received.question)) == (wire.Ask, wire.Score)
    assert received.question.instruction == "i"
    for sent, got in zip(documents, map(wire.received_item, received.question.documents), strict=True):
        assert type(got) is type(sent)
        if isinstance(got, QueryRows):
            assert (got.tokens, got.truncated, got.fingerprint) == (2**40, True, "f")
            assert got.rows.dtype == sent.rows.dtype
        if isinstance(got, Vectors):
            assert torch.equal(torch.as_tensor(got.values), torch.as_tensor(sent.values))
        else:
            assert got == sent


def test_errors_survive_the_way() -> None:
    plain = (errors.RequestTimeoutError, errors.RequestFailedError, errors.EngineNotReadyError)
    telling_more = errors.InvalidRequestError("m", "documents"), errors.QueueFullError("m", 2.5, "wait")
    for error in (*telling_more, *(kind("m") for kind in plain)):
        for back in (wire.as_error(wire.as_failed(error)), pickle.loads(pickle.dumps(error))):
            assert (type(back), str(back), back.__dict__) == (type(error), str(error), error.__dict__)
    failed = wire.as_failed(errors.InvalidRequestError("documents[1] is like queries[1]", "documents"))
    assert wire.in_whole(failed.message, [4, 9]) == "documents[9] is like queries[1]"
    assert wire.in_whole(failed.message, [4]) == failed.message, "a number that is none of its documents"


def test_metrics_of_processes_are_one() -> None:
    counts = ("a", "of a", "counter", [("a_total", {"x": "1 2"}, 3.0), ("a_total", {}, 4.0)])
    sent = wire.Metrics([counts]), wire.Metrics([("b", "of b", "gauge", [("b", {}, 1.0)]), counts])
    one, other = (wire.decode_to_front(wire.encode(wire.Reply(1, each))).answer.collect() for each in sent)
    registry = CollectorRegistry()
    registry.register(MergedMetrics(lambda: [({"replica": "0"}, one), ({"front": "1"}, other)]))
    assert generate_latest(registry).decode().splitlines() == [
        *("# HELP a_total of a", "# TYPE a_total counter"),
        *('a_total{replica="0",x="1 2"} 3.0', 'a_total{replica="0"} 4.0'),
        *('a_total{front="1",x="1 2"} 3.0', 'a_total{front="1"} 4.0'),
        *("# HELP b of b", "# TYPE b gauge", 'b{front="1"} 1.0'),
    ]
