"""Short versions of the programs, each against a real server: what is promised holds, whatever the speed."""

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from tests.chaos.client import Record
from tests.chaos.disconnects import disconnect
from tests.chaos.faults import Report, disturb
from tests.chaos.poisoned import poison
from tests.chaos.pool import Pool, Reply, Texts
from tests.chaos.running import Running, running
from tests.chaos.stops import stop
from tests.chaos.traffic import Ask, Outcome, error_mismatch, rerank


@pytest.fixture(scope="module")
def server(stanford_colbert: str) -> Iterator[Running]:
    with running(stanford_colbert, "--log-level", "error") as server:
        yield server


@pytest.fixture(scope="module")
def pool(server: Running) -> Pool:
    """Asked of the server before anything disturbs it."""
    return Pool.ask(Texts.draw(0, queries=6, documents=100), server.url)


@pytest.mark.exhaustive
async def test_nothing_is_lost_and_nothing_wrong_while_things_go_wrong(
    stanford_colbert: str, pool: Pool
) -> None:
    report = await disturb(stanford_colbert, pool, 6, processes=2, pause=0.1)
    assert report.is_good, report.lines()
    assert report.count(Outcome.RIGHT) > 10
    assert report.count(Outcome.FAILED) > 0
    assert len(report.recoveries()) > 3
    assert report.samples


async def test_exactly_the_poisoned_sequences_fail(server: Running, pool: Pool) -> None:
    report = await poison(server, pool, 500, 8)
    assert report.is_good, report.lines()
    assert sum(verdict.outcome is Outcome.FAILED for verdict in report.verdicts) > 1


async def test_a_server_is_as_before_when_clients_have_left(server: Running, pool: Pool) -> None:
    report = await disconnect(server, pool, 100)
    assert report.is_restored, report.lines()
    assert len(report.moments) == 5


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
async def test_what_was_accepted_is_answered_when_the_server_stops(
    stanford_colbert: str, pool: Pool, seed: int
) -> None:
    with running(stanford_colbert, "--grace-seconds", "60", hooked=False) as server:
        ended = await stop(server, pool, seed)
    assert ended.status == 0, server.log
    assert ended.lost == 0
    assert ended.wrong == []
    assert any(request.status == 200 for request in ended.requests)


# What the harness itself must notice.


@pytest.fixture
def small() -> Pool:
    texts = Texts(("q",), ("a", "b", "c"), ("a poison", "b poison", "c poison"))
    return Pool(
        texts, np.array([[1.0, 2.0, 3.0]], np.float32), (), {"": (Reply(200, np.zeros(1, np.float32)),)}
    )


def _answer(ask: Ask, **changes: Any) -> dict[str, Any]:
    """The right answer to a request to the small pool, none of it poisoned."""
    scores = {"a": 1.0, "b": 2.0, "c": 3.0}
    documents = json.loads(ask.body)["documents"]
    results = [
        {"index": i, "relevance_score": scores[text]} for i, text in enumerate(documents) if text in scores
    ]
    return {"results": sorted(results, key=lambda one: -one["relevance_score"])} | changes


def _judge(ask: Ask, answer: Mapping[str, Any], status: int = 200) -> Outcome:
    return ask.judge(status, {}, json.dumps(answer).encode()).outcome


def test_a_right_answer_is_right_and_others_are_wrong(small: Pool) -> None:
    ask = rerank(small, random.Random(0), 10)
    right = _answer(ask)
    assert _judge(ask, right) is Outcome.RIGHT
    off = [dict(one, relevance_score=one["relevance_score"] + 0.01) for one in right["results"]]
    for wrong in (
        {"results": right["results"][1:]},
        {"results": right["results"][::-1]},
        {"results": off},
        {"results": [*right["results"], right["results"][0]]},
        right | {"errors": [{"index": 0, "error": "no"}]},
        right | {"unscored": [0]},
        {"results": right["results"][1:], "unscored": [right["results"][0]["index"]]},
    ):
        assert _judge(ask, wrong) is Outcome.WRONG, wrong
    assert _judge(ask, right, 500) is Outcome.WRONG


def test_only_poisoned_documents_may_fail(small: Pool) -> None:
    ask = rerank(small, random.Random(0), 10, 2, {"on_error": "report"})
    broken = [i for i, text in enumerate(json.loads(ask.body)["documents"]) if "poison" in text]
    errors = [{"index": i, "error": "the model failed on it"} for i in broken]
    assert _judge(ask, _answer(ask, errors=errors)) is Outcome.FAILED
    assert _judge(ask, _answer(ask, errors=errors[1:])) is Outcome.WRONG
    more = _answer(ask)["results"]
    taken = {"index": more[-1]["index"], "error": "the model failed on it"}
    assert _judge(ask, {"results": more[:-1], "errors": [*errors, taken]}) is Outcome.WRONG


def test_errors_have_one_shape() -> None:
    error = {"message": "too much", "type": "QueueFullError", "param": None, "code": 429}
    body = json.dumps({"error": error}).encode()
    assert error_mismatch(429, {"retry-after": "1"}, body) is None
    assert error_mismatch(429, {}, body) is not None
    assert error_mismatch(503, {"retry-after": "1"}, body) is not None
    assert error_mismatch(429, {"retry-after": "1"}, b"Too Many Requests") is not None


@pytest.mark.parametrize("outcome", ["lost", "wrong"])
def test_what_is_lost_or_wrong_is_not_good(outcome: str) -> None:
    record = Record("rerank", 0.0, 1.0, outcome, "because", 200)
    report = Report([record], [], [], [], "none", "", 0.0, {})
    assert not report.is_good
    assert "because" in report.lines()
