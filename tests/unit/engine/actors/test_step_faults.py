"""Steps are transactions: an exception at any of their lines ends in right results or a plain error."""

import ast
import asyncio
import inspect
import random
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import pytest_asyncio
import torch

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, EngineDeadError, RequestFailedError, Truncation
from maxsimd.engine.actors import runner as runners
from maxsimd.engine.cache import EmbeddingCache, PendingEmbeddings
from maxsimd.engine.cache.embeddings import CacheWriter
from maxsimd.engine.cache.slab import EmbeddingSlab, Segments
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.device import load
from maxsimd.engine.metrics import EngineStats
from maxsimd.engine.scoring import scorer as scorers
from maxsimd.engine.scoring.scorer import DocumentScorer, QueryStore, StepOutcome, WindowStore
from maxsimd.engine.scoring.similarity import score_pairs
from maxsimd.pooling.dispatch import DispatchPooler
from maxsimd.scheduler import JoinedTokens, ResultSlot, Scheduler, Step, Tokens, TokenSequence
from tests.checkpoints import cross_encoders, language_models, late_interaction
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.exhaustive import exhaustive
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

Function = Callable[..., Any]


def _methods(owner: type, *names: str) -> list[Function]:
    return [getattr(owner, name) for name in names]


# Between forward and delivery: an error here is tried again.
ATTEMPT: list[Function] = [
    *_methods(runners.RunnerActor, "_attempt", "_split_cached"),
    *(DispatchPooler.pool, DocumentScorer._score_ragged, Segments.reserve),
    *_methods(runners.ScoringActor, "_score", "_plain_items"),
    *_methods(DocumentScorer, "score", "_complete_documents"),
    *_methods(DocumentScorer, "_quantize_and_stage_for_cache", "_facts_of", "_score_skipped", "_score_batch"),
    *_methods(DocumentScorer, "_score_cached", "_score_spans", "_score_from_host", "_find_queries"),
    *_methods(QueryStore, "put", "get"),
    *(WindowStore.put, PendingEmbeddings.__init__, StepOutcome.results, score_pairs, EmbeddingCache.rounded),
    *_methods(EmbeddingSlab, "put", "locate", "_copy_from_host", "_copy_run", "_reserve", "_enter"),
]
# Functions that do more where sequences are cut between steps.
CUT_APART = (runners.RunnerActor._attempt, DispatchPooler.pool)
# Handing new embeddings to the cache: an error here costs the cache entry alone.
CACHE_WRITE: list[Function] = [runners.RunnerActor._stage, EmbeddingCache.stage, CacheWriter.stage]
# Delivery and commit: an error here ends the engine.
FINISH: list[Function] = [
    *_methods(runners.RunnerActor, "_finish", "_free"),
    *(runners.CutSequences.finish, DocumentScorer.commit, QueryStore.release, WindowStore.release),
    DispatchPooler.free,
]


def _name(function: Function) -> str:
    return function.__qualname__


class Faults:
    """Raises an error the first time that a chosen statement of a function is reached.

    Instrumented functions call `at` before each of their statements."""

    def __init__(self) -> None:
        self._armed: tuple[str, int] | None = None
        self.raised = False
        self.reached: dict[str, set[int]] = {}

    def arm(self, function: Function, statement: int) -> None:
        self._armed, self.raised = (_name(function), statement), False

    def disarm(self) -> None:
        self._armed = None

    def at(self, name: str, statement: int) -> None:
        self.reached.setdefault(name, set()).add(statement)
        if self._armed == (name, statement) and not self.raised:
            self.raised = True
            raise MemoryError(f"planted in {name}, line {statement}")

    def instrument(self, function: Function) -> None:
        name = _name(function)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))

        class Insert(ast.NodeTransformer):
            def generic_visit(self, node: ast.AST) -> ast.AST:
                super().generic_visit(node)
                for field in ("body", "orelse"):
                    statements = getattr(node, field, None)
                    # Code in a `try` may fail without harm; that is tested where the guarded code is.
                    if isinstance(statements, list) and not isinstance(node, ast.Module | ast.Try):
                        setattr(node, field, [new for one in statements for new in self._before(one)])
                return node

            def _before(self, statement: ast.stmt) -> list[ast.stmt]:
                call = ast.parse(f"__fault_at__({name!r}, {statement.lineno})").body[0]
                return [ast.copy_location(call, statement), statement]

        tree = ast.fix_missing_locations(Insert().visit(tree))
        made: dict[str, Any] = {}
        exec(compile(tree, "<instrumented>", "exec"), function.__globals__, made)
        function.__globals__["__fault_at__"] = self.at
        function.__code__ = made[function.__name__].__code__


@pytest.fixture(scope="module")
def faults() -> Iterator[Faults]:
    faults = Faults()
    originals = {function: function.__code__ for function in (*ATTEMPT, *CACHE_WRITE, *FINISH)}
    for function in originals:
        faults.instrument(function)
    yield faults
    for function, code in originals.items():
        function.__code__ = code


# The results of a workload without faults, and the lines that it passes, counted from each function's first.
CleanRun = tuple[list[Any], dict[str, set[int]]]


def _statements(passed: dict[str, set[int]], function: Function, which: str) -> list[int]:
    """Behind a function's last statement most has been done that a repetition must not do twice."""
    found = sorted(passed.get(_name(function), ()))
    return found if which == "every statement" else found[-1:]


class Workload:
    """Requests that together pass every line: new, cached, repeated and windowed documents, and texts."""

    def __init__(self, pairs: list[Pair], faults: Faults) -> None:
        self.faults = faults
        texts = [" ".join(pair.document.split()[:8]) for pair in pairs[:5]]
        self._documents, self._long = texts, " ".join(texts)
        self._clean: dict[tuple[Engine, str], CleanRun] = {}

    def requests(self, engine: Engine) -> list[Coroutine[Any, Any, Any]]:
        windows = Truncation(windows=True, max_tokens=24, window_overlap=4)
        return [
            engine.score("how is a file read", self._documents, truncation=CUT_LONG),
            engine.score("what is a socket", [*self._documents[:2], "new"], truncation=CUT_LONG),
            engine.score("what is a socket", [self._long, "short"], truncation=windows, cache="bypass"),
            engine.embed_tokens(["one text", "another"], truncation=CUT_LONG),
        ]

    async def prepare(self, engine: Engine) -> None:
        cache = engine.device_model.cache
        assert cache is not None
        cache.flush()
        cache.clear()
        await engine.score("how is a file read", self._documents[:2], truncation=CUT_LONG)
        if cache.slab is not None:  # so that some are copied from the host
            cache.flush()
            cache.slab.clear()

    async def clean(self, engine: Engine, delivery: str) -> CleanRun:
        if (engine, delivery) not in self._clean:
            await self.prepare(engine)
            self.faults.reached = {}
            results = await self.run(engine)
            await until(lambda: engine.stats() == EngineStats())
            assert not any(isinstance(one, BaseException) for one in results), results
            self._clean[engine, delivery] = results, self.faults.reached
            self.faults.reached = {}
        return self._clean[engine, delivery]

    async def run_with(self, function: Function, statement: int, engine: Engine) -> list[Any]:
        await self.prepare(engine)
        self.faults.arm(function, statement)
        try:
            found = await self.run(engine)
            # A commit follows the delivery of results.
            await until(lambda: not engine.is_healthy or engine.stats() == EngineStats())
            return found
        finally:
            self.faults.disarm()

    async def run(self, engine: Engine) -> list[Any]:
        answers = await asyncio.gather(*self.requests(engine), return_exceptions=True)
        return [_flat(answer) for answer in answers]


def _flat(answer: Any) -> Any:
    if isinstance(answer, BaseException):
        return answer
    rows = [answer.scores] if hasattr(answer, "scores") else answer.embeddings
    return np.concatenate([np.ravel(row) for row in rows])


@pytest.fixture(scope="module")
def workload(pairs: list[Pair], faults: Faults) -> Workload:
    return Workload(pairs, faults)


def _arrive_by(monkeypatch: pytest.MonkeyPatch, synchronize: Callable[[], object]) -> None:
    monkeypatch.setattr(scorers, "record_arrival", lambda device: SimpleNamespace(synchronize=synchronize))


@pytest.fixture(params=["cpu", "gpu"])
def delivery(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How results are delivered: at once, or when the device says that they have arrived."""
    if request.param == "gpu":
        _arrive_by(monkeypatch, lambda: time.sleep(0.001))
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def _slabs() -> Iterator[None]:
    """On this CPU, too, an engine has a slab, of few segments, if it is told to."""

    def opened(config: EngineConfig, model: LoadedModel, *_: Any) -> EmbeddingSlab | None:
        dim = model.tasks[model.score_task].dim
        return EmbeddingSlab(400, dim, torch.float32, torch.device("cpu")) if config.device_cache_mb else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "open_slab", opened)
        yield


@pytest.fixture
def configs(stanford_colbert: str, qwen3_embedding: str) -> list[EngineConfig]:
    """A model that is run in whole sequences, with a slab, and a causal one whose sequences are cut."""
    return [
        EngineConfig(model=stanford_colbert, dtype="float32", max_batch_tokens=256, device_cache_mb=1),
        EngineConfig(
            model=qwen3_embedding, dtype="float32", max_batch_tokens=24, score_type="late-interaction"
        ),
    ]


WHICH = pytest.mark.parametrize("which", ["last statement", *exhaustive("every statement")])


@WHICH
@pytest.mark.parametrize("function", [*ATTEMPT, *CACHE_WRITE], ids=_name)
async def test_a_step_that_fails_before_delivery_is_tried_again(
    function: Function, which: str, configs: list[EngineConfig], workload: Workload, engines: Engines
) -> None:
    raised = 0
    for config in configs:
        engine = await engines(config)
        expected, passed = await workload.clean(engine, "cpu")
        for statement in _statements(passed, function, which):
            where = f"{_name(function)}, line {statement}, {config.model}"
            found = await workload.run_with(function, statement, engine)
            # The fault is raised once, so that it can break no more than a part that stands alone.
            assert sum(isinstance(got, BaseException) for got in found) <= 1, f"{where}: {found}"
            for got, right in zip(found, expected, strict=True):
                if isinstance(got, BaseException):
                    assert isinstance(got, RequestFailedError), f"{where}: {got!r}"
                else:
                    np.testing.assert_allclose(got, right, atol=1e-4, err_msg=where)
            if workload.faults.raised and function in CACHE_WRITE:
                assert not any(isinstance(one, BaseException) for one in found), where
            raised += workload.faults.raised
            assert engine.is_healthy, where
        if raised and which != "every statement" and function not in CUT_APART:
            return
    assert raised, "no request came this way"


@WHICH
@pytest.mark.parametrize(
    ("function", "delivery"),
    [
        *((function, "cpu") for function in FINISH[:4]),
        (runners.RunnerActor._finish, "gpu"),
        *exhaustive(*((function, "cpu") for function in FINISH[4:])),
        *exhaustive(*((function, "gpu") for function in FINISH[1:])),
    ],
    indirect=["delivery"],
    ids=lambda value: value if isinstance(value, str) else _name(value),
)
async def test_a_failed_delivery_or_commit_ends_the_engine(
    function: Function, delivery: str, which: str, configs: Any, workload: Workload, engines: Engines
) -> None:
    tried = 0
    for config in configs:
        _, passed = await workload.clean(await engines(config), delivery)
        for statement in _statements(passed, function, which):
            # Whether a request comes this way hangs on what arrives together.
            for _ in range(10):
                async with Engine(config) as engine, asyncio.timeout(600):
                    found = await workload.run_with(function, statement, engine)
                    if not workload.faults.raised:
                        continue
                    await engine.until_dead()
                    assert not engine.is_healthy
                    for one in found:
                        assert not isinstance(one, BaseException) or isinstance(one, EngineDeadError)
                    break
            assert workload.faults.raised
            tried += 1
        if tried and which != "every statement":
            return
    assert tried, "no request came this way"


async def test_only_errors_of_the_device_itself_are_taken_for_such() -> None:
    for error, is_devices, is_of_memory in (
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True, False),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"), True, False),
        (torch.AcceleratorError("device-side assert triggered"), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), False, True),
        (RuntimeError("CUDA error: out of memory"), False, True),
        (torch.OutOfMemoryError("CUDA out of memory"), False, True),
        (MemoryError(), False, True),
        (RuntimeError("shapes cannot be multiplied"), False, False),
    ):
        assert (runners.is_device_error(error), runners.is_out_of_memory(error)) == (is_devices, is_of_memory)


@pytest.mark.parametrize("where", ["forward", "arrival"])
async def test_an_error_of_the_device_itself_is_not_tried_again(
    where: str, configs: list[EngineConfig], workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Mock(side_effect=RuntimeError("CUDA error: an illegal memory access was encountered"))
    async with Engine(configs[0]) as engine:
        await workload.prepare(engine)
        # Only a GPU cannot be used again.
        running: Any = engine._running
        device = torch.device("cuda" if where == "forward" else "cpu")
        running.device_model = replace(running.device_model, device=device)
        if where == "forward":
            monkeypatch.setattr(engine.device_model.runner, "forward", broken)
        else:
            _arrive_by(monkeypatch, broken)
        async with asyncio.timeout(600):
            found = await workload.run(engine)
        assert (engine.is_healthy, [type(one) for one in found]) == (False, [EngineDeadError] * len(found))
        assert broken.call_count == 1 or where == "arrival"
        assert "illegal memory access" in (engine.death or "")
        assert (engine.restart_obstacle is not None) == (where == "forward")


@pytest.mark.parametrize("on_error", ["report", "fail"])
async def test_nothing_of_a_sequence_runs_after_a_failed_chunk(
    on_error: Any, configs: list[EngineConfig], workload: Workload, engines: Engines, monkeypatch: Any
) -> None:
    engine = await engines(configs[1])
    await workload.prepare(engine)
    documents = ["one two three " * 9, "short", "four five six " * 9]
    expected = await engine.score("a", documents, cache="bypass")
    runner: Any = engine.device_model.runner
    forward, failed, later = runner.forward, set[int](), list[int]()

    def fails_on_first_chunks(step: Step) -> Any:
        for chunk in step.chunks:
            sequence = chunk.sequence
            if chunk.is_first and not chunk.is_last and sequence.payload.document is not None:
                failed.add(sequence.sequence_id)
                while (stats := engine.stats()).open_requests and stats.steps_in_flight < 2:
                    time.sleep(0.001)  # until a step with its next chunk is chosen
                raise RuntimeError("shapes cannot be multiplied")
        later.extend({chunk.sequence.sequence_id for chunk in step.chunks} & failed)
        return forward(step)

    monkeypatch.setattr(runner, "forward", fails_on_first_chunks)
    (found,) = await asyncio.gather(engine.score("a", documents, on_error=on_error), return_exceptions=True)
    running: Any = engine._running
    cut_sequences = running._actors._cut_sequences
    await until(lambda: engine.stats() == EngineStats() and not cut_sequences.have_failed)
    monkeypatch.undo()
    if on_error == "report":
        assert set(found.errors) == {0, 2}
        np.testing.assert_allclose(found.scores, [np.nan, expected.scores[1], np.nan], atol=1e-4)
    else:
        assert isinstance(found, RequestFailedError)
    again = await engine.score("a", documents)
    np.testing.assert_allclose(again.scores, expected.scores, atol=1e-4, err_msg="wrong in the cache")
    assert (bool(failed), later) == (True, [])


POISON = "poison"
COUNTED = [late_interaction.stanford, language_models.qwen3_reranker, *exhaustive(cross_encoders.bert)]


def _text(sequence_id: int, ids: list[int], task: str = "embed") -> TokenSequence:
    return TokenSequence.text(sequence_id, ResultSlot(1, 0), task, Tokens(np.array(ids, dtype=np.int32)))


async def test_the_latest_that_the_model_reads_are_remembered() -> None:
    suspects = runners.Suspects(most=3)
    for word in (1, 2, 3, 1, 4):
        suspects.add(_text(word, [word]))
    assert [word for word in range(5) if _text(0, [word]) in suspects] == [1, 3, 4]
    suspects.discard(_text(9, [3]))
    assert ([word for word in range(5) if _text(0, [word]) in suspects], len(suspects)) == ([1, 4], 2)
    ids, types = np.array([1, 2], dtype=np.int32), np.array([0, 1], dtype=np.int32)
    suspects = runners.Suspects()
    suspects.add(TokenSequence.text(1, ResultSlot(1, 0), "embed", Tokens(ids)))
    assert TokenSequence.text(2, ResultSlot(2, 5), "embed", Tokens(ids.copy())) in suspects
    assert TokenSequence.text(2, ResultSlot(1, 0), "token_embed", Tokens(ids)) not in suspects
    assert TokenSequence.text(2, ResultSlot(1, 0), "embed", Tokens(ids, types)) not in suspects
    assert TokenSequence.text(2, ResultSlot(1, 0), "embed", Tokens(ids, attended_len=1)) not in suspects
    joined = JoinedTokens.of([ids[:1], ids[1:]], [0, 1])
    assert TokenSequence.text(2, ResultSlot(1, 0), "embed", joined) not in suspects
    suspects.add(TokenSequence.text(3, ResultSlot(1, 0), "embed", Tokens(ids, types)))
    assert TokenSequence.text(2, ResultSlot(1, 0), "embed", joined) in suspects


class Counting:
    """An engine whose model fails on sequences with a word, and which counts the runs of each sequence."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: Exception | None = RuntimeError("shapes cannot be multiplied")
        self.runs: dict[tuple[int, int], int] = {}
        runner: Any = engine.device_model.runner
        self._forward, runner.forward = runner.forward, self._run

    def _run(self, step: Step) -> Any:
        for chunk in step.chunks:
            key = chunk.sequence.request_id, chunk.sequence.sequence_id
            self.runs[key] = self.runs.get(key, 0) + (chunk.start == chunk.sequence.shared_prefix_len)
        texts = (self.engine.tokenizer.decode(chunk.sequence.tokens.ids.tolist()) for chunk in step.chunks)
        if self.error and any(POISON in text for text in texts):
            raise self.error
        return self._forward(step)

    async def score(self, requests: list[tuple[str, list[str]]]) -> list[Any]:
        """Scores, or what was raised, of requests sent at once; `runs` counts those of these requests."""
        self.runs.clear()
        calls = (self.engine.score(*each, truncation=CUT_LONG, cache="bypass") for each in requests)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: self.engine.stats() == EngineStats())
        return [answer if isinstance(answer, BaseException) else answer.scores for answer in answers]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=COUNTED)
async def counting(request: pytest.FixtureRequest, checkpoints: SharedCheckpoints) -> AsyncIterator[Counting]:
    config = EngineConfig(model=checkpoints(request.param), dtype="float32", threads=1, max_batch_tokens=512)
    async with Engine(config) as engine:
        yield Counting(engine)


def _requests(pairs: list[Pair], seed: int) -> list[tuple[str, list[str]]]:
    random_ = random.Random(seed)
    words = " ".join(pair.document for pair in pairs).split()

    def text() -> str:
        start = random_.randrange(len(words) - 60)
        return " ".join(words[start : start + random_.choice((1, 3, 10, 20))])

    return [(text(), [text() for _ in range(random_.randrange(1, 5))]) for _ in range(8)]


async def test_the_second_time_nobody_else_is_run_twice(counting: Counting, pairs: list[Pair]) -> None:
    good = _requests(pairs, 0)
    counting.error = RuntimeError("shapes cannot be multiplied")
    expected = await counting.score(good)
    assert set(counting.runs.values()) == {1}
    bad = [("a question", ["fine", f"{POISON} {i}"]) for i in range(2)]
    mixed = [*good[:3], bad[0], *good[3:6], bad[1], *good[6:]]
    for again in (False, True):
        found = await counting.score(mixed)
        failed = [i for i, answer in enumerate(found) if isinstance(answer, BaseException)]
        assert failed == [3, 7]
        assert all(isinstance(found[i], RequestFailedError) for i in failed)
        for got, right in zip([found[i] for i in range(10) if i not in failed], expected, strict=True):
            np.testing.assert_allclose(got, right, atol=1e-4)
        assert (max(counting.runs.values()) == 1) == again
    counting.error = None
    found = await counting.score(mixed)
    assert not [answer for answer in found if isinstance(answer, BaseException)], "it runs, and is forgotten"
    assert len(_suspects(counting.engine)) == 0
    counting.error = RuntimeError("shapes cannot be multiplied")
    mixed = [*good[:4], (POISON, ["one", "two", "three"]), *good[4:]]
    await counting.score(mixed)
    found = await counting.score(mixed)
    assert isinstance(found.pop(4), RequestFailedError)
    for got, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, right, atol=1e-4)
    assert len({request_id for (request_id, _), runs in counting.runs.items() if runs > 1}) <= 1


async def test_an_empty_step_and_a_lack_of_memory_make_no_suspect(counting: Counting) -> None:
    before = len(_suspects(counting.engine))
    steps, schedule = iter([Step(10**9, ())]), Scheduler.schedule
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "schedule", lambda scheduler: next(steps, None) or schedule(scheduler))
        await counting.score([("an empty step", ["harms nobody"])])
    counting.error = torch.OutOfMemoryError("CUDA out of memory")
    (found,) = await counting.score([("a question", [POISON])])
    assert isinstance(found, RequestFailedError)
    assert len(_suspects(counting.engine)) == before


def _suspects(engine: Engine) -> Any:
    running: Any = engine._running
    return running._actors._actors[0]._suspects
