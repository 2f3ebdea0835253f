"""Values to results: in which thread, and in which order."""

import asyncio
import math
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from maxsimd.engine.cache.store import RunFacts
from maxsimd.engine.engine import SCORE_DEFAULTS, ScoreStream
from maxsimd.engine.processors.classification import activate, keeps_order
from maxsimd.engine.processors.cross_encoder import CrossEncoderPlan, ScoreLabel
from maxsimd.engine.processors.processor import FoundScores
from maxsimd.engine.requests import Value, Values, rank
from maxsimd.engine.workers import run_in_thread_if_large
from tests.unit.engine.processors.small_models import score_request

# Few values, so that there are ties; both zeros are one.
FEW = st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 2.0, math.inf, math.nan])
SCORES = st.lists(FEW | st.floats(width=32))


async def test_what_is_made_of_many_values_is_made_in_a_thread() -> None:
    async def thread(values: int) -> int:
        return await run_in_thread_if_large(values, threading.get_ident)

    own = threading.get_ident()
    assert await thread(0) == await thread(500) == own
    assert await thread(501) != own
    for values in (1, 1000):
        with pytest.raises(ZeroDivisionError):
            await run_in_thread_if_large(values, lambda: 1 // 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(run_in_thread_if_large(1000, lambda: next(iter(()))), 600)
    assert (Values([0.5] * 501, {}).work, Values([np.zeros((1, 384), np.float32)] * 10, {}).work) == (501, 19)
    assert Values([np.zeros((512, 128), np.float32)] * 2, {}).work == 655


@given(SCORES, st.none() | st.integers(0, 5))
def test_the_best_come_first_ties_in_order_and_no_nan(scores: list[float], top_n: int | None) -> None:
    documents = [f"document {i}" for i in range(len(scores))]
    expected = sorted((i for i, s in enumerate(scores) if not math.isnan(s)), key=lambda i: (-scores[i], i))
    ranked = rank(scores, documents, top_n)
    best = [(i, documents[i]) for i in expected[: top_n or None]]
    assert [(each.index, each.document) for each in ranked] == best
    assert np.array_equal([each.score for each in ranked], [scores[each.index] for each in ranked])


def test_equal_scores_are_ranked_by_other_numbers() -> None:
    ranked = rank([1.0, math.nan, 1.0, 0.5, 1.0], list("abcde"), 3, 0.6, by=[7.0, math.nan, 9.0, 8.0, 7.0])
    assert [(each.index, each.score) for each in ranked] == [(2, 1.0), (0, 1.0), (4, 1.0)]


def test_an_activation_may_keep_the_order() -> None:
    for activation, expected in (
        *((nn.Sigmoid(), True), (nn.Identity(), True), (nn.Tanh(), True), (nn.ReLU(), True)),
        *((torch.sigmoid, True), (nn.GELU(), False), (torch.sin, False), (torch.neg, False)),
    ):
        assert keeps_order(activation) is expected


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 200])
def test_an_activation_has_the_bits_of_a_row_by_itself(rows: int) -> None:
    logits = np.random.default_rng(rows).standard_normal((rows, 3)).astype(np.float32)
    found = activate(logits, lambda part: part.softmax(dim=1))
    assert found.shape == (rows, 3)
    for row, expected in zip(logits, found, strict=True):
        np.testing.assert_array_equal(activate(row[None], lambda part: part.softmax(dim=1))[0], expected)


@pytest.mark.parametrize("exclusive", [True, False])
async def test_labels_become_one_number_once_for_all(exclusive: bool, monkeypatch: Any) -> None:
    rows = np.random.default_rng(0).normal(scale=30, size=(9, 4)).astype(np.float32)
    made: list[int] = []
    logits_of = ScoreLabel.logits_of
    counting = lambda label, logits: made.append(len(logits)) or logits_of(label, logits)  # noqa: E731
    monkeypatch.setattr(ScoreLabel, "logits_of", counting)
    request = score_request(["q"], ["d"] * 10, explain=10)
    plan = CrossEncoderPlan(
        sequences=[], num_values=10, request=request, found=FoundScores.none(request),
        facts=[RunFacts(1, 0, False, 1)] * 10, label=ScoreLabel(1, exclusive),
    )  # fmt: skip
    values: list[Value | None] = [*rows[:4], None, *rows[4:]]
    assert set(plan.explanations(values, range(10))) == {0, 1, 2, 3, 5, 6, 7, 8, 9}
    assert made == [9], "once for all documents"
    scores = plan.raw_scores(values)
    assert np.isnan(scores[4])
    logits = torch.from_numpy(rows).double()
    expected = logits[:, 1] - logits[:, [0, 2, 3]].logsumexp(dim=1) if exclusive else logits[:, 1]
    np.testing.assert_allclose(np.delete(scores, 4), expected, rtol=1e-6)
    assert np.isnan(plan.raw_scores([None] * 10)).all()

    class Arriving(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from super().__iter__()
            self[4] = rows[0]

    engine = Mock(_explanations=AsyncMock(side_effect=[asyncio.CancelledError, {}, {}]))
    stream = ScoreStream(engine, ["q"], ["d"], SCORE_DEFAULTS)
    stream._arrived(plan, Arriving(values))
    stream._task = asyncio.create_task(AsyncMock()())
    await stream._task
    with pytest.raises(asyncio.CancelledError):
        await anext(stream)
    assert len(await anext(stream)) == 9, "what a cancelled iteration did not yield comes with the next"
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
