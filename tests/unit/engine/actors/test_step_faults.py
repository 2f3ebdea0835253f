"""A step is a transaction: whatever fails in it ends in right results, in one request's error, or in a dead
engine that says so. An exception is raised at each line of the code that a step passes, one at a time."""

import ast
import asyncio
import inspect
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, EngineDeadError, RequestFailedError, Truncation
from maxsimd.engine.actors import scoring as scoring_module
from maxsimd.engine.actors.cut_sequences import CutSequences
from maxsimd.engine.actors.runner import RunnerActor, is_device_error, is_out_of_memory
from maxsimd.engine.actors.scoring import ScoringActor
from maxsimd.engine.cache import Arriving, EmbeddingCache
from maxsimd.engine.cache.segments import Segments
from maxsimd.engine.cache.slab import EmbeddingSlab
from maxsimd.engine.cache.writer import CacheWriter
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.device import load
from maxsimd.engine.scoring.document_scorer import DocumentScorer
from maxsimd.engine.scoring.outcome import StepOutcome
from maxsimd.engine.scoring.query_store import QueryStore
from maxsimd.engine.scoring.similarity import score_pairs
from maxsimd.engine.scoring.window_store import WindowStore
from maxsimd.engine.stats import EngineStats
from maxsimd.pooling.dispatch import DispatchPooler
from tests.engines import Engines
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Between forward and delivery: an error here is tried again.
ATTEMPT: list[Callable[..., Any]] = [
    RunnerActor._attempt,
    RunnerActor._split_cached,
    DispatchPooler.pool,
    ScoringActor._score,
    ScoringActor._plain_items,
    DocumentScorer.score,
    DocumentScorer._store_queries,
    DocumentScorer._complete_documents,
    DocumentScorer._quantise_and_stage_for_cache,
    DocumentScorer._about,
    DocumentScorer._score_skipped,
    DocumentScorer._score_batch,
    DocumentScorer._score_cached,
    DocumentScorer._score_spans,
    DocumentScorer._score_from_host,
    DocumentScorer._find_queries,
    DocumentScorer._score_asked,
    DocumentScorer._against_queries,
    QueryStore.put,
    QueryStore.get,
    WindowStore.put,
    Arriving.__init__,
    StepOutcome.results,
    score_pairs,
    EmbeddingCache.rounded,
    EmbeddingSlab.put,
    EmbeddingSlab.locate,
    EmbeddingSlab._copy_from_host,
    EmbeddingSlab._copy_run,
    EmbeddingSlab._reserve,
    EmbeddingSlab._enter,
    Segments.reserve,
]
# What does more where sequences are cut between steps.
CUT_APART = (RunnerActor._attempt, DispatchPooler.pool)
# Handing new embeddings to the cache: an error here costs the cache entry alone.
CACHE_WRITE: list[Callable[..., Any]] = [RunnerActor._stage, EmbeddingCache.stage, CacheWriter.stage]
# Delivery and commit: an error here ends the engine.
FINISH: list[Callable[..., Any]] = [
    RunnerActor._finish,
    RunnerActor._free,
    CutSequences.finish,
    DocumentScorer.commit,
    QueryStore.release,
    WindowStore.release,
    DispatchPooler.free,
]


def _name(function: Callable[..., Any]) -> str:
    return function.__qualname__


class Faults:
    """Raises an error the first time that a chosen statement of a function is reached.

    Instrumented functions call `at` before each of their statements."""

    def __init__(self) -> None:
        self._armed: tuple[str, int] | None = None
        self.raised = False
        self.reached: dict[str, set[int]] = {}

    def arm(self, function: Callable[..., Any], statement: int) -> None:
        self._armed, self.raised = (_name(function), statement), False

    def disarm(self) -> None:
        self._armed = None

    def at(self, name: str, statement: int) -> None:
        self.reached.setdefault(name, set()).add(statement)
        if self._armed == (name, statement) and not self.raised:
            self.raised = True
            raise MemoryError(f"planted in {name}, line {statement}")

    def instrument(self, function: Callable[..., Any]) -> None:
        name = _name(function)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))

        class Insert(ast.NodeTransformer):
            def generic_visit(self, node: ast.AST) -> ast.AST:
                super().generic_visit(node)
                for field in ("body", "orelse"):
                    statements = getattr(node, field, None)
                    # What a `try` guards may fail without harm; that is tested where the guarded code is.
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


@dataclass(frozen=True)
class CleanRun:
    """What a workload gives where nothing fails, and the lines that it passes, counted from each function's
    first."""

    results: list[Any]
    passed: dict[str, set[int]]

    def statements(self, function: Callable[..., Any], which: str) -> list[int]:
        """Behind a function's last statement most has been done that a repetition must not do twice."""
        found = sorted(self.passed.get(_name(function), ()))
        return found if which == "every statement" else found[-1:]


class Workload:
    """Requests that together pass every line: new, cached, repeated and windowed documents, and texts."""

    def __init__(self, pairs: list[Pair], faults: Faults) -> None:
        self._faults = faults
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
        """Leaves the first documents in the cache, and no others."""
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
            self._faults.reached = {}
            results = await self.run(engine)
            await until(lambda: engine.stats() == EngineStats())
            assert not any(isinstance(one, BaseException) for one in results), results
            self._clean[engine, delivery] = CleanRun(results, self._faults.reached)
            self._faults.reached = {}
        return self._clean[engine, delivery]

    async def run_with(self, function: Callable[..., Any], statement: int, engine: Engine) -> list[Any]:
        """Results where a statement fails once."""
        await self.prepare(engine)
        self._faults.arm(function, statement)
        try:
            found = await self.run(engine)
            # A commit follows the delivery of results.
            await until(lambda: not engine.is_healthy or engine.stats() == EngineStats())
            return found
        finally:
            self._faults.disarm()

    async def run(self, engine: Engine) -> list[Any]:
        """Results, as flat arrays, or errors."""
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
    """Waits for numbers by this, in another thread, in place of by a CUDA event."""
    event = SimpleNamespace(synchronize=synchronize)
    monkeypatch.setattr(scoring_module, "record_arrival", lambda device: event)


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
    """A model that is run in whole sequences, with a slab, and a causal one whose sequences are cut between
    steps."""
    return [
        EngineConfig(model=stanford_colbert, dtype="float32", max_batch_tokens=256, device_cache_mb=1),
        EngineConfig(
            model=qwen3_embedding, dtype="float32", max_batch_tokens=24, score_type="late-interaction"
        ),
    ]


def _assert_right(found: list[Any], expected: list[Any], where: str) -> None:
    assert len(found) == len(expected)
    # The fault is raised once, so that it can break no more than a part that stands alone.
    assert sum(isinstance(got, BaseException) for got in found) <= 1, f"{where}: {found}"
    for got, right in zip(found, expected, strict=True):
        if isinstance(got, BaseException):
            assert isinstance(got, RequestFailedError), f"{where}: {got!r}"
        else:
            np.testing.assert_allclose(got, right, atol=1e-4, err_msg=where)


WHICH = pytest.mark.parametrize(
    "which", ["last statement", pytest.param("every statement", marks=pytest.mark.exhaustive)]
)


@WHICH
@pytest.mark.parametrize("function", [*ATTEMPT, *CACHE_WRITE], ids=_name)
async def test_a_step_that_fails_before_delivery_is_tried_again(
    function: Any,
    which: str,
    configs: list[EngineConfig],
    workload: Workload,
    faults: Faults,
    engines: Engines,
) -> None:
    raised = 0
    for config in configs:
        engine = await engines(config)
        clean = await workload.clean(engine, "cpu")
        for statement in clean.statements(function, which):
            where = f"{_name(function)}, line {statement}, {config.model}"
            found = await workload.run_with(function, statement, engine)
            _assert_right(found, clean.results, where)
            if faults.raised and function in CACHE_WRITE:
                assert not any(isinstance(one, BaseException) for one in found), where
            raised += faults.raised
            assert engine.is_healthy, where
        if raised and which != "every statement" and function not in CUT_APART:
            return
    assert raised, "no request came this way"


@WHICH
@pytest.mark.parametrize(
    ("function", "delivery"),
    [
        *((function, "cpu") for function in FINISH[:4]),
        (RunnerActor._finish, "gpu"),
        *(pytest.param(function, "cpu", marks=pytest.mark.exhaustive) for function in FINISH[4:]),
        *(pytest.param(function, "gpu", marks=pytest.mark.exhaustive) for function in FINISH[1:]),
    ],
    indirect=["delivery"],
    ids=lambda value: value if isinstance(value, str) else _name(value),
)
async def test_a_failed_delivery_or_commit_ends_the_engine(
    function: Any,
    delivery: str,
    which: str,
    configs: list[EngineConfig],
    workload: Workload,
    faults: Faults,
    engines: Engines,
) -> None:
    clean = await workload.clean(await engines(configs[-1]), delivery)
    statements = clean.statements(function, which)
    assert statements, "no request came this way"
    for statement in statements:
        # Whether a request comes this way hangs on what arrives together.
        for _ in range(10):
            async with Engine(configs[-1]) as engine, asyncio.timeout(30):
                found = await workload.run_with(function, statement, engine)
                if not faults.raised:
                    continue
                await engine.until_dead()
                assert not engine.is_healthy
                for one in found:
                    assert not isinstance(one, BaseException) or isinstance(one, EngineDeadError)
                break
        assert faults.raised


@pytest.mark.parametrize(
    ("error", "is_devices", "is_of_memory"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True, False),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"), True, False),
        (torch.AcceleratorError("device-side assert triggered"), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), False, True),
        (RuntimeError("CUDA error: out of memory"), False, True),
        (torch.OutOfMemoryError("CUDA out of memory"), False, True),
        (MemoryError(), False, True),
        (RuntimeError("shapes cannot be multiplied"), False, False),
    ],
)
async def test_only_errors_of_the_device_itself_are_taken_for_such(
    error: BaseException, is_devices: bool, is_of_memory: bool
) -> None:
    assert (is_device_error(error), is_out_of_memory(error)) == (is_devices, is_of_memory)


@pytest.mark.parametrize("where", ["forward", "arrival"])
async def test_an_error_of_the_device_itself_is_not_tried_again(
    where: str, configs: list[EngineConfig], workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def broken(*_: Any) -> Any:
        nonlocal calls
        calls += 1
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    async with Engine(configs[-1]) as engine:
        await workload.prepare(engine)
        if where == "forward":
            monkeypatch.setattr(engine.device_model.prepared.runner, "forward", broken)
        else:
            _arrive_by(monkeypatch, broken)
        async with asyncio.timeout(20):
            found = await workload.run(engine)
        assert not engine.is_healthy
        assert [type(one) for one in found] == [EngineDeadError] * len(found)
        assert calls == 1 or where == "arrival"
        assert "illegal memory access" in (engine.death or "")
