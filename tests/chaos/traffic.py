"""Texts, requests drawn at random of them, and whether an answer is what an undisturbed server says."""

import asyncio
import json
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Self

import aiohttp
import httpx
import numpy as np
from numpy.typing import NDArray

from maxsimd.bench.datasets import docstring_pairs

# The model's step fails where this word, one token, is in it.
POISON = "poison"
# How far the same text may be off between steps: other sequences beside it, other sums.
_CLOSE = 1e-3
_VECTORS = 40

Headers = Mapping[str, str]


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


def verdict_of(wrong: str | None, other: Verdict) -> Verdict:
    return other if wrong is None else Verdict(Outcome.WRONG, wrong)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request and the judge of its answer, which is given status, headers in lower case and body."""

    kind: str
    path: str
    body: bytes
    judge: Callable[[int, Headers, bytes], Verdict]


@dataclass(frozen=True, slots=True)
class Texts:
    """Real English. `poisoned[i]` is `documents[i]` with the poison in it."""

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    poisoned: tuple[str, ...]

    @classmethod
    def draw(cls, seed: int, queries: int = 20, documents: int = 600) -> Self:
        draw = random.Random(seed)
        pairs = [pair for pair in docstring_pairs() if POISON not in (pair.query + pair.document).lower()]
        draw.shuffle(pairs)
        chosen = [pair.document.split()[: draw.randint(5, 80)] for pair in pairs[:documents]]
        plain = tuple(" ".join(words) for words in chosen)
        for words in chosen:
            words.insert(draw.randint(0, min(len(words), 30)), POISON)  # where no model truncates it
        return cls(tuple(pair.query for pair in pairs[:queries]), plain, tuple(map(" ".join, chosen)))


@dataclass(frozen=True, slots=True)
class Pool:
    """Texts, the scores [queries, documents] of all pairs, and tokens and vectors of the first documents."""

    texts: Texts
    scores: NDArray[np.float32]
    tokens: tuple[tuple[int, ...], ...]
    vectors: tuple[NDArray[np.float32], ...]

    @classmethod
    def ask(cls, texts: Texts, url: str) -> Self:
        with httpx.Client(base_url=url, timeout=300) as client:

            def data(path: str, **body: Any) -> Any:
                asked = body | {"truncate_prompt_tokens": -1}
                return client.post(path, json=asked).raise_for_status().json()["data"]

            rows = [
                [item["score"] for item in data("/score", queries=query, documents=texts.documents)]
                for query in texts.queries
            ]
            first = texts.documents[:_VECTORS]
            tokens = [client.post("/tokenize", json={"text": text}).json()["tokens"] for text in first]
            vectors = [np.array(data("/pooling", input=[text])[0]["data"], np.float32) for text in first]
        return cls(texts, np.array(rows, np.float32), tuple(map(tuple, tokens)), tuple(vectors))

    def save(self, path: Path) -> Path:
        path.write_bytes(pickle.dumps(self))
        return path

    @staticmethod
    def load(path: Path) -> "Pool":
        pool = pickle.loads(path.read_bytes())
        assert isinstance(pool, Pool)
        return pool


async def send(session: aiohttp.ClientSession, ask: Ask) -> tuple[int, Verdict]:
    headers = {"Content-Type": "application/json"}
    async with session.post(ask.path, data=ask.body, headers=headers) as response:
        body = await response.read()
        named = {name.lower(): value for name, value in response.headers.items()}
        return response.status, ask.judge(response.status, named, body)


async def read_answer(reader: asyncio.StreamReader, method: str = "POST") -> tuple[int, Headers, bytes]:
    """Status, headers in lower case and body of what comes on a connection."""
    status = 0
    while status < 200:  # others say that the body may come
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    length = 0 if method == "HEAD" or status in (204, 304) else int(headers.get("content-length", 0))
    return status, headers, await reader.readexactly(length)


@dataclass(frozen=True, slots=True)
class Expected:
    """All scores, the documents that break the model, and the options of the request."""

    scores: Sequence[float]
    broken: frozenset[int]
    options: Mapping[str, Any]


def rerank(
    pool: Pool, draw: random.Random, documents: int, poisoned: int = 0, options: Any = None, path: str = ""
) -> Ask:
    """A query against that many documents, some of them poisoned, with further options of the request."""
    query = draw.randrange(len(pool.texts.queries))
    indices = draw.choices(range(len(pool.texts.documents)), k=documents)
    broken = frozenset(draw.sample(range(documents), poisoned))
    sources = pool.texts.documents, pool.texts.poisoned
    sent = [sources[position in broken][index] for position, index in enumerate(indices)]
    options, path = options or {}, path or "/rerank"
    body: dict[str, Any] = {"documents": sent}
    if path == "/score":
        body |= {"queries": pool.texts.queries[query], "truncate_prompt_tokens": -1}
    else:
        body |= {"query": pool.texts.queries[query], "return_documents": False}
    expected = Expected(pool.scores[query, indices].tolist(), broken, options)
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


def _embed(pool: Pool, draw: random.Random) -> Ask:
    index = draw.randrange(len(pool.vectors))
    body = {"input": [pool.texts.documents[index]], "truncate_prompt_tokens": -1}
    judge = partial(_judge_data, lambda answer: agree(answer["data"][0]["data"], pool.vectors[index]))
    return Ask("/pooling", "/pooling", json.dumps(body).encode(), judge)


def _tokenize(pool: Pool, draw: random.Random) -> Ask:
    index = draw.randrange(len(pool.tokens))
    judge = partial(_judge_data, lambda answer: tuple(answer["tokens"]) == pool.tokens[index])
    return Ask("/tokenize", "/tokenize", json.dumps({"text": pool.texts.documents[index]}).encode(), judge)


MALFORMED: dict[bytes, int] = {
    b"": 400, b"\xff\xfe": 400, b'{"query": "a"}': 400, b'{"query": "a", "documents": [1]}': 400,
    b'{"query": "\\ud800", "documents": ["a"]}': 400,
    b'{"query": "a", "documents": ["a"], "model": "another"}': 404,
    b'{"query": "a", "documents": ' + b"[" * 5000: 400,
}  # fmt: skip


def malformed(pool: Pool, draw: random.Random) -> Ask:
    body = draw.choice(list(MALFORMED))
    return Ask("malformed", "/rerank", body, partial(judge_refusal, {MALFORMED[body]}))


_KINDS: tuple[tuple[float, Callable[[Pool, random.Random], Ask]], ...] = (
    (50, partial(_mixed, "/rerank")),
    (20, partial(_mixed, "/score")),
    *((12, _embed), (8, _tokenize), (6, malformed)),
)


def draw_ask(pool: Pool, draw: random.Random) -> Ask:
    [kind] = draw.choices([kind for _, kind in _KINDS], [weight for weight, _ in _KINDS])
    return kind(pool, draw)


def agree(found: Any, expected: NDArray[np.float32]) -> bool:
    numbers = np.asarray(found, np.float32)
    is_close = numbers.shape == expected.shape and np.allclose(numbers, expected, rtol=_CLOSE, atol=_CLOSE)
    return bool(is_close)


def judge_refusal(allowed: set[int], status: int, headers: Headers, answer: bytes) -> Verdict:
    """A server may always have too much to do; else only what is allowed."""
    wrong = error_mismatch(status, headers, answer)
    if wrong is None and status not in allowed | {429}:
        wrong = f"status {status}: {answer[:200]!r}"
    return verdict_of(wrong, Verdict(Outcome.REFUSED))


def error_mismatch(status: int, headers: Headers, answer: bytes) -> str | None:
    """The mismatch of an answer with the one shape of all errors; None if there is none."""
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


def _judge_data(is_right: Callable[[Any], bool], status: int, headers: Headers, answer: bytes) -> Verdict:
    if status != 200:
        return judge_refusal(set(), status, headers, answer)
    return RIGHT if is_right(json.loads(answer)) else Verdict(Outcome.WRONG, "other numbers")


def _judge_scores(expected: Expected, status: int, headers: Headers, body: bytes) -> Verdict:
    reports = expected.options.get("on_error") == "report"
    is_partial = expected.options.get("on_timeout") == "partial"
    if status != 200:
        if status == 500 and expected.broken and not reports:
            return verdict_of(error_mismatch(status, headers, body), FAILED)
        return judge_refusal({504, 413} if "timeout" in expected.options else set(), status, headers, body)
    answer = json.loads(body)
    items = answer.get("results", answer.get("data"))
    found = {item["index"]: item.get("relevance_score", item.get("score")) for item in items}
    errors = {item["index"] for item in answer.get("errors", ())}
    unscored = set(answer.get("unscored", ()))
    failing = expected.broken - unscored if reports else set()
    wrong = None
    if len(found) != len(items) or set(found) | errors | unscored != set(range(len(expected.scores))):
        wrong = f"{len(expected.scores)} documents, {len(items)} scores, {len(errors)} errors"
    elif set(found) & (errors | unscored) or (unscored and not is_partial):
        wrong = "a document has a score and none"
    elif errors != failing or set(found) & expected.broken:
        wrong = f"errors {sorted(errors)}, broken {sorted(expected.broken)}, unscored {len(unscored)}"
    elif is_partial and answer["complete"] != (not unscored):
        wrong = "an answer that is not as complete as it says"
    elif not agree(list(found.values()), np.array([expected.scores[i] for i in found], np.float32)):
        worst = max(abs(score - expected.scores[i]) for i, score in found.items())
        wrong = f"scores are off by {worst}"
    elif "results" in answer and list(found.values()) != sorted(found.values(), reverse=True):
        wrong = "not best first"
    return verdict_of(wrong, FAILED if errors else RIGHT)
