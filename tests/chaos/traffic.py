"""Requests drawn at random, and whether an answer to one is right."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from tests.chaos.pool import EMBEDDING, Pool, agree, embedding_body, numbers_of


class Outcome(Enum):
    RIGHT = "right"
    REFUSED = "refused"  # as a request that cannot be served now, or makes no sense, should be
    FAILED = "failed"  # as a poisoned request should
    WRONG = "wrong"
    ABANDONED = "abandoned"  # by its own client
    LOST = "lost"  # no answer came


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    reason: str = ""


RIGHT, FAILED = Verdict(Outcome.RIGHT), Verdict(Outcome.FAILED)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request and the judge of its answer, which is given status, headers in lower case and body."""

    kind: str
    path: str
    body: bytes
    judge: Callable[[int, Mapping[str, str], bytes], Verdict]


@dataclass(frozen=True, slots=True)
class Expected:
    """What the answer to a request that scores should be: the scores of all documents, those that break the
    model, the ones that cannot be read, and what it asked for."""

    scores: Sequence[float]
    broken: frozenset[int]
    reports: bool
    partial: bool
    timed: bool
    field: str  # of an answer's items, with the score


def draw_ask(pool: Pool, draw: random.Random) -> Ask:
    """One of the mixed traffic."""
    [kind] = draw.choices(list(_KINDS), [weight for _, weight in _KINDS.values()])
    return _KINDS[kind][0](pool, draw)


def draw_small(pool: Pool, draw: random.Random) -> Ask:
    """A request of 20 documents, of which none is poisoned."""
    return rerank(pool, draw, 20)


def rerank(
    pool: Pool,
    draw: random.Random,
    documents: int,
    poisoned: int = 0,
    options: Mapping[str, Any] | None = None,
    path: str = "/rerank",
) -> Ask:
    """A query against that many documents, some of them poisoned, with further options of the request."""
    query = draw.randrange(len(pool.texts.queries))
    indices = draw.choices(range(len(pool.texts.documents)), k=documents)
    broken = frozenset(draw.sample(range(documents), poisoned))
    sources = pool.texts.documents, pool.texts.poisoned
    documents_sent = [sources[position in broken][index] for position, index in enumerate(indices)]
    options = options or {}
    body = {"query": pool.texts.queries[query], "documents": documents_sent, "return_documents": False}
    if path == "/score":
        body = {
            "queries": pool.texts.queries[query],
            "documents": documents_sent,
            "truncate_prompt_tokens": -1,
        }
    expected = Expected(
        pool.scores[query, indices].tolist(),
        broken,
        options.get("on_error") == "report",
        options.get("on_timeout") == "partial",
        "timeout" in options,
        "score" if path == "/score" else "relevance_score",
    )
    kind = path + " poisoned" if poisoned else path
    return Ask(kind, path, json.dumps(body | options).encode(), partial(_judge_scores, expected))


def _mixed(path: str, pool: Pool, draw: random.Random) -> Ask:
    documents = min(200, int(draw.paretovariate(0.6)))
    options: dict[str, Any] = {}
    if draw.random() < 0.3:
        options["cache"] = draw.choice(["bypass", "refresh"])
    if draw.random() < 0.15:
        options |= {"on_timeout": "partial", "timeout": draw.choice([0.001, 0.02, 0.1, 30.0])}
    elif draw.random() < 0.1:
        options["timeout"] = draw.choice([0.005, 0.1, 60.0])
    poisoned = 0
    if draw.random() < 0.1:
        poisoned = min(documents, draw.choice([1, 1, 2, 5]))
    if poisoned or draw.random() < 0.1:
        options["on_error"] = draw.choice(["report", "report", "fail"])
    return rerank(pool, draw, documents, poisoned, options, path)


def _paired(pool: Pool, draw: random.Random) -> Ask:
    """N queries with a document each."""
    count = draw.randint(2, 30)
    queries = draw.choices(range(len(pool.texts.queries)), k=count)
    documents = draw.choices(range(len(pool.texts.documents)), k=count)
    body = {
        "queries": [pool.texts.queries[i] for i in queries],
        "documents": [pool.texts.documents[i] for i in documents],
        "truncate_prompt_tokens": -1,
    }
    scores = [float(pool.scores[i, j]) for i, j in zip(queries, documents, strict=True)]
    expected = Expected(scores, frozenset(), False, False, False, "score")
    return Ask("/score N:N", "/score", json.dumps(body).encode(), partial(_judge_scores, expected))


def _embed(pool: Pool, draw: random.Random) -> Ask:
    path = draw.choice(list(EMBEDDING))
    index = draw.randrange(len(pool.vectors[path]))
    reply = pool.vectors[path][index]

    def judge(status: int, headers: Mapping[str, str], answer: bytes) -> Verdict:
        if status != 200 or reply.status != 200:
            return judge_refusal(status, headers, answer, {reply.status})
        same = agree(numbers_of(path, json.loads(answer)), reply.numbers)
        return RIGHT if same else Verdict(Outcome.WRONG, f"{path}: other numbers")

    return Ask(path, path, json.dumps(embedding_body(pool.texts.documents[index])).encode(), judge)


def _tokenize(pool: Pool, draw: random.Random) -> Ask:
    index = draw.randrange(len(pool.tokens))

    def judge(status: int, headers: Mapping[str, str], answer: bytes) -> Verdict:
        if status != 200:
            return judge_refusal(status, headers, answer, set())
        same = tuple(json.loads(answer)["tokens"]) == pool.tokens[index]
        return RIGHT if same else Verdict(Outcome.WRONG, "/tokenize: other tokens")

    return Ask("/tokenize", "/tokenize", json.dumps({"text": pool.texts.documents[index]}).encode(), judge)


MALFORMED: dict[bytes, int] = {
    b"": 400,
    b"{": 400,
    b"[]": 400,
    b"\xff\xfe": 400,
    b'{"query": 1, "documents": ["a"]}': 400,
    b'{"query": "a"}': 400,
    b'{"query": "a", "documents": []}': 400,
    b'{"query": "a", "documents": [1]}': 400,
    b'{"query": "\\ud800", "documents": ["a"]}': 400,
    b'{"query": "a", "documents": ["a"], "timeout": -1}': 400,
    b'{"query": "a", "documents": ["a"], "top_n": "all"}': 400,
    b'{"query": "a", "documents": ["a"], "model": "another"}': 404,
    b'{"query": "a", "documents": ' + b"[" * 5000: 400,
}


def malformed(pool: Pool, draw: random.Random) -> Ask:
    body = draw.choice(list(MALFORMED))
    judge = partial(judge_refusal, allowed={MALFORMED[body]})
    return Ask("malformed", "/rerank", body, lambda status, headers, answer: judge(status, headers, answer))


_KINDS: dict[str, tuple[Callable[[Pool, random.Random], Ask], float]] = {
    "rerank": (partial(_mixed, "/rerank"), 50),
    "score": (partial(_mixed, "/score"), 20),
    "paired": (_paired, 8),
    "embed": (_embed, 8),
    "tokenize": (_tokenize, 8),
    "malformed": (malformed, 6),
}


def judge_refusal(
    status: int, headers: Mapping[str, str], answer: bytes, allowed: set[int] | frozenset[int]
) -> Verdict:
    """A server may always have too much to do; else only what is allowed."""
    wrong = error_mismatch(status, headers, answer)
    if wrong is None and status not in allowed | {429}:
        wrong = f"status {status}: {answer[:200]!r}"
    return Verdict(Outcome.REFUSED) if wrong is None else Verdict(Outcome.WRONG, wrong)


def error_mismatch(status: int, headers: Mapping[str, str], answer: bytes) -> str | None:
    """What an error lacks of the one shape of all errors."""
    try:
        error = json.loads(answer)["error"]
        has_all = set(error) == {"message", "type", "param", "code"} and bool(error["message"])
    except (ValueError, KeyError, TypeError):
        has_all, error = False, {}
    if not has_all or error["code"] != status:
        return f"status {status} without the shape of errors: {answer[:200]!r}"
    if status in (429, 503) and "retry-after" not in headers:
        return f"status {status} without Retry-After"
    return None


def _judge_scores(expected: Expected, status: int, headers: Mapping[str, str], body: bytes) -> Verdict:
    if status != 200:
        return _judge_failure(expected, status, headers, body)
    answer = json.loads(body)
    items = answer.get("results", answer.get("data"))
    found = {item["index"]: item[expected.field] for item in items}
    errors = {item["index"] for item in answer.get("errors", ())}
    unscored = set(answer.get("unscored", ()))
    wrong = None
    if len(found) != len(items) or set(found) | errors | unscored != set(range(len(expected.scores))):
        wrong = f"{len(expected.scores)} documents, {len(items)} scores, {len(errors)} errors"
    elif set(found) & (errors | unscored) or (unscored and not expected.partial):
        wrong = "a document has a score and none"
    elif (
        errors != (expected.broken - unscored if expected.reports else set()) or set(found) & expected.broken
    ):
        wrong = f"errors {sorted(errors)}, broken {sorted(expected.broken)}, unscored {len(unscored)}"
    elif expected.partial and answer["complete"] != (not unscored):
        wrong = "an answer that is not as complete as it says"
    elif not agree(list(found.values()), np.array([expected.scores[i] for i in found], np.float32)):
        worst = max(abs(score - expected.scores[i]) for i, score in found.items())
        wrong = f"scores are off by {worst}"
    elif "results" in answer and list(found.values()) != sorted(found.values(), reverse=True):
        wrong = "not best first"
    if wrong is not None:
        return Verdict(Outcome.WRONG, wrong)
    return FAILED if errors else RIGHT


def _judge_failure(expected: Expected, status: int, headers: Mapping[str, str], body: bytes) -> Verdict:
    if status == 500 and expected.broken and not expected.reports:
        wrong = error_mismatch(status, headers, body)
        return FAILED if wrong is None else Verdict(Outcome.WRONG, wrong)
    return judge_refusal(status, headers, body, {504, 413} if expected.timed else set())
