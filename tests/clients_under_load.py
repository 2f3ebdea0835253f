"""Clients that ask a server until they are stopped, and compare what they get with what is right."""

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from maxsimd.bench.datasets import docstring_pairs

QUERY = "how is a file opened"
# More than one step, so that requests are spread.
DOCUMENTS = [pair.document[:400] for pair in docstring_pairs() if len(pair.document) > 200][:60]
SHORT = [document[:300] for document in DOCUMENTS]
_LONG = [" ".join(DOCUMENTS[i : i + 5]) for i in range(12)]
# Requests that several processes answer as one does: good ones and bad ones, to any kind of model.
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/score", {"queries": QUERY, "documents": DOCUMENTS, "cache": "bypass"}),
    ("/score", {"queries": QUERY, "documents": ["a file", "a list", "opened"]}),
    ("/rerank", {"query": "a list", "documents": DOCUMENTS, "top_n": 7, "cache": "bypass"}),
    ("/rerank", {"query": "a list", "documents": [*SHORT, *SHORT[:9]], "cache": "bypass"}),
    ("/rerank", {"query": "a list " * 300, "documents": DOCUMENTS, "cache": "bypass"}),
    ("/rerank", {"query": "a list", "documents": _LONG, "long_documents": "window", "cache": "bypass"}),
    ("/v1/embeddings", {"input": DOCUMENTS}),
    ("/classify", {"input": DOCUMENTS[:5]}),
    ("/tokenize", {"prompt": "two words"}),
    # Parts that are run before one is refused may be cached or not.
    ("/rerank", {"query": "a list", "documents": [*SHORT, "long " * 3_000], "long_documents": "error",
                 "cache": "bypass"}),
    ("/rerank", {"query": "a list", "documents": ["x"], "model": "another"}),
    ("/nowhere", {}),
]  # fmt: skip


class Clients:
    """Eight of them. `wrong` and `failed` are to stay empty."""

    def __init__(self, url: str, right: Mapping[str, float]) -> None:
        self._url, self._right = url, right
        self._stop = threading.Event()
        self.wrong: list[str] = []
        self.failed: list[str] = []
        self.answered = 0

    @contextmanager
    def asking(self) -> Iterator[None]:
        with ThreadPoolExecutor(8) as threads:
            tasks = [threads.submit(self._ask, seed) for seed in range(8)]
            try:
                yield
            finally:
                self._stop.set()
            for task in tasks:
                task.result()

    def check(self, most_failed: int = 0) -> None:
        """Asserts that answers are right. Each client may lose the one request that it has at a time."""
        assert self.answered > 0
        assert self.wrong == []
        assert len(self.failed) <= most_failed, self.failed

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        texts = [*self._right]
        while not self._stop.is_set():
            documents = rng.sample(texts, rng.randrange(1, 25))
            body = {"query": QUERY, "documents": documents, "cache": "bypass", "return_documents": True}
            try:
                answer = httpx.post(self._url + "/rerank", json=body, timeout=600)
            except httpx.TransportError as error:
                self.failed.append(repr(error))
                continue
            if answer.status_code != 200:
                self.failed.append(f"{answer.status_code} {answer.text}")
                continue
            self._compare(documents, answer.json()["results"])
            self.answered += 1
            self._stop.wait(0.02)  # else they take all cores from what is started again

    def _compare(self, documents: Sequence[str], results: list[dict]) -> None:
        if sorted(each["index"] for each in results) != list(range(len(documents))):
            self.wrong.append("a document is missing or doubled")
        for each in results:
            text = each["document"]["text"]
            if text != documents[each["index"]] or abs(each["relevance_score"] - self._right[text]) > 1e-4:
                self.wrong.append(f"documents[{each['index']}]")


def right_scores(url: str, documents: Sequence[str]) -> dict[str, float]:
    body = {"queries": QUERY, "documents": [*documents], "cache": "bypass"}
    data = httpx.post(url + "/score", json=body, timeout=600).json()["data"]
    return {documents[each["index"]]: each["score"] for each in data}


_OWN = {"id", "created"}


def shape_of(answer: object) -> object:
    """An answer without its floating-point numbers."""
    if isinstance(answer, dict):
        return {name: shape_of(value) for name, value in answer.items() if name not in _OWN}
    if isinstance(answer, list):
        return [shape_of(each) for each in answer if not isinstance(each, float)]
    return "a number" if isinstance(answer, float) else answer


def numbers_of(answer: object) -> list[float]:
    """An answer's floating-point numbers."""
    if isinstance(answer, dict):
        return [each for name, value in answer.items() if name not in _OWN for each in numbers_of(value)]
    if isinstance(answer, list):
        return [each for value in answer for each in numbers_of(value)]
    return [answer] if isinstance(answer, float) else []
