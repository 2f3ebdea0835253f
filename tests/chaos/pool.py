"""Texts, and what an undisturbed server says of them: what all answers are compared with."""

import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
from numpy.typing import NDArray

from maxsimd.bench.datasets import docstring_pairs

# The model's step fails where this word, one token, is in it.
POISON = "poison"
# How far the same text may be off between steps: other sequences beside it, other sums.
TOLERANCE = 1e-3
_VECTORS = 40


@dataclass(frozen=True, slots=True)
class Reply:
    """The status and the numbers that a text gets on a route."""

    status: int
    numbers: NDArray[np.float32]


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
        return cls(
            tuple(pair.query for pair in pairs[:queries]),
            tuple(" ".join(words) for words in chosen),
            tuple(" ".join(_poisoned(words, draw)) for words in chosen),
        )


def _poisoned(words: list[str], draw: random.Random) -> list[str]:
    position = draw.randint(0, min(len(words), 30))  # where no model cuts it off
    return [*words[:position], POISON, *words[position:]]


@dataclass(frozen=True, slots=True)
class Pool:
    """Texts with the scores [queries, documents] of all pairs, the tokens of the first documents, and what
    they get on the routes that embed."""

    texts: Texts
    scores: NDArray[np.float32]
    tokens: tuple[tuple[int, ...], ...]
    vectors: dict[str, tuple[Reply, ...]]

    @classmethod
    def ask(cls, texts: Texts, url: str) -> Self:
        """Asks a server that nothing disturbs."""
        with httpx.Client(base_url=url, timeout=300) as client:
            rows = []
            for query in texts.queries:
                body: dict[str, Any] = {"queries": query, "documents": texts.documents}
                answer = client.post("/score", json=body | {"truncate_prompt_tokens": -1}).raise_for_status()
                rows.append([item["score"] for item in answer.json()["data"]])
            first = texts.documents[:_VECTORS]
            tokens = [client.post("/tokenize", json={"text": text}).json()["tokens"] for text in first]
            vectors = {path: tuple(_vector(client, path, text) for text in first) for path in EMBEDDING}
        return cls(texts, np.array(rows, np.float32), tuple(map(tuple, tokens)), vectors)

    def save(self, path: Path) -> Path:
        path.write_bytes(pickle.dumps(self))
        return path

    @staticmethod
    def load(path: Path) -> "Pool":
        pool = pickle.loads(path.read_bytes())
        assert isinstance(pool, Pool)
        return pool


# Routes that embed, and the field of their answers' items that holds the numbers.
EMBEDDING = {"/v1/embeddings": "embedding", "/pooling": "data"}


def embedding_body(text: str) -> dict[str, Any]:
    return {"input": [text], "truncate_prompt_tokens": -1}


def numbers_of(path: str, answer: Any) -> NDArray[np.float32]:
    return np.array(answer["data"][0][EMBEDDING[path]], np.float32)


def _vector(client: httpx.Client, path: str, text: str) -> Reply:
    answer = client.post(path, json=embedding_body(text))
    numbers = numbers_of(path, answer.json()) if answer.status_code == 200 else np.zeros(0, np.float32)
    return Reply(answer.status_code, numbers)


def agree(found: Sequence[float] | NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    found = np.asarray(found, np.float32)
    return found.shape == expected.shape and bool(
        np.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    )
