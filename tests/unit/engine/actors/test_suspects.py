"""A sequence that broke a step alone runs alone when it comes again, so that no other is run twice."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, RequestFailedError
from maxsimd.engine.actors.suspects import Suspects
from maxsimd.engine.stats import EngineStats
from maxsimd.scheduler import Chunk, JoinedTokens, ResultSlot, Sequence, Step, Tokens
from tests.checkpoints import cross_encoders, language_models, late_interaction
from tests.checkpoints.shared import SharedCheckpoints
from tests.waiting import until

POISON = "poison"
# Of the engines that tests share.
LOOP = pytest.mark.asyncio(loop_scope="module")


def _text(sequence_id: int, ids: list[int], task: str = "embed") -> Sequence:
    return Sequence.text(sequence_id, ResultSlot(1, 0), task, Tokens(np.array(ids, dtype=np.int32)))


def test_the_latest_are_remembered_until_they_are_forgotten() -> None:
    suspects = Suspects(most=3)
    for word in (1, 2, 3, 1, 4):
        suspects.add(_text(word, [word]))
    assert [word for word in range(5) if _text(0, [word]) in suspects] == [1, 3, 4]
    suspects.discard(_text(9, [3]))
    assert [word for word in range(5) if _text(0, [word]) in suspects] == [1, 4]
    assert len(suspects) == 2


def test_what_the_model_reads_is_what_counts() -> None:
    ids, types = np.array([1, 2], dtype=np.int32), np.array([0, 1], dtype=np.int32)
    suspects = Suspects()
    suspects.add(Sequence.text(1, ResultSlot(1, 0), "embed", Tokens(ids)))
    assert Sequence.text(2, ResultSlot(2, 5), "embed", Tokens(ids.copy())) in suspects
    assert Sequence.text(2, ResultSlot(1, 0), "token_embed", Tokens(ids)) not in suspects
    assert Sequence.text(2, ResultSlot(1, 0), "embed", Tokens(ids, types)) not in suspects
    assert Sequence.text(2, ResultSlot(1, 0), "embed", Tokens(ids, attended_len=1)) not in suspects
    joined = JoinedTokens.of([ids[:1], ids[1:]], [0, 1])
    assert Sequence.text(2, ResultSlot(1, 0), "embed", joined) not in suspects
    suspects.add(Sequence.text(3, ResultSlot(1, 0), "embed", Tokens(ids, types)))
    assert Sequence.text(2, ResultSlot(1, 0), "embed", joined) in suspects


class Counting:
    """An engine whose model fails on sequences with a word, and which counts the runs of each sequence."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: Exception | None = RuntimeError("shapes cannot be multiplied")
        # By the ids of request and sequence.
        self.runs: dict[tuple[int, int], int] = {}
        runner: Any = engine.device_model.prepared.runner
        self._forward, runner.forward = runner.forward, self._run

    def _run(self, step: Step) -> Any:
        for chunk in step.chunks:
            key = chunk.sequence.request_id, chunk.sequence.sequence_id
            self.runs[key] = self.runs.get(key, 0) + (chunk.start == chunk.sequence.shared_prefix_len)
        if self.error and any(map(self._is_poisoned, step.chunks)):
            raise self.error
        return self._forward(step)

    def _is_poisoned(self, chunk: Chunk) -> bool:
        return POISON in self.engine.tokenizer.decode(chunk.sequence.tokens.ids.tolist())

    async def score(self, requests: list[tuple[str, list[str]]]) -> list[Any]:
        """Scores, or what was raised, of requests sent at once; `runs` counts those of these requests."""
        self.runs.clear()
        answers = await asyncio.gather(
            *(self.engine.score(*each, truncation=CUT_LONG, cache="bypass") for each in requests),
            return_exceptions=True,
        )
        await until(lambda: self.engine.stats() == EngineStats())
        return [answer if isinstance(answer, BaseException) else answer.scores for answer in answers]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        late_interaction.stanford,
        pytest.param(cross_encoders.bert, marks=pytest.mark.exhaustive),
        language_models.qwen3_reranker,
    ],
)
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

    return [(text(), [text() for _ in range(random_.randrange(1, 5))]) for _ in range(12)]


@LOOP
async def test_the_second_time_nobody_else_is_run_twice(counting: Counting, pairs: list[Pair]) -> None:
    good = _requests(pairs, 0)
    counting.error = RuntimeError("shapes cannot be multiplied")
    expected = await counting.score(good)
    assert set(counting.runs.values()) == {1}
    bad = [("a question", ["fine", f"{POISON} {i}"]) for i in range(2)]
    mixed = [*good[:3], bad[0], *good[3:9], bad[1], *good[9:]]
    for again in (False, True):
        found = await counting.score(mixed)
        failed = [i for i, answer in enumerate(found) if isinstance(answer, BaseException)]
        assert failed == [3, 10]
        assert all(isinstance(found[i], RequestFailedError) for i in failed)
        for got, right in zip([found[i] for i in range(14) if i not in failed], expected, strict=True):
            np.testing.assert_allclose(got, right, atol=1e-4)
        assert (max(counting.runs.values()) == 1) == again
    counting.error = None
    found = await counting.score(mixed)
    assert not [answer for answer in found if isinstance(answer, BaseException)], "it runs, and is forgotten"
    assert len(_suspects(counting.engine)) == 0


@LOOP
async def test_a_query_that_breaks_a_step_fails_its_documents_alone(
    counting: Counting, pairs: list[Pair]
) -> None:
    good = _requests(pairs, 7)
    counting.error = RuntimeError("shapes cannot be multiplied")
    expected = await counting.score(good)
    mixed = [*good[:4], (POISON, ["one", "two", "three"]), *good[4:]]
    await counting.score(mixed)
    found = await counting.score(mixed)
    assert isinstance(found.pop(4), RequestFailedError)
    for got, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, right, atol=1e-4)
    assert len({request_id for (request_id, _), runs in counting.runs.items() if runs > 1}) <= 1


@LOOP
async def test_what_failed_for_lack_of_memory_is_no_suspect(counting: Counting) -> None:
    before = len(_suspects(counting.engine))
    counting.error = torch.OutOfMemoryError("CUDA out of memory")
    (found,) = await counting.score([("a question", [POISON])])
    assert isinstance(found, RequestFailedError)
    assert len(_suspects(counting.engine)) == before


def _suspects(engine: Engine) -> Suspects:
    running: Any = engine._running
    suspects: Suspects = running._actors._actors[0]._suspects
    return suspects
