"""Ordinary text at the defaults: the project's own pages, and articles cut into chunks by their characters,
as people cut them. All of it is answered, and what had to be cut is said."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from maxsimd.bench.datasets import docstring_pairs
from maxsimd.engine import Engine, EngineConfig
from tests.server.conftest import Server

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/models.md", "docs/security.md")
ARTICLES, PARTS = 100, 12


def _texts() -> list[str]:
    """The pages, and articles of a dozen docstrings each."""
    docstrings = [pair.document for pair in docstring_pairs()]
    parts = [docstrings[(i * 7) % len(docstrings)] for i in range(ARTICLES * PARTS)]
    articles = ["\n\n".join(parts[i : i + PARTS]) for i in range(0, len(parts), PARTS)]
    return [*((ROOT / page).read_text(encoding="utf-8") for page in PAGES), *articles]


def _chunks(characters: int) -> list[str]:
    return [text[i : i + characters] for text in _texts() for i in range(0, len(text), characters)]


def _in_requests(chunks: list[str]) -> Iterator[list[str]]:
    return (chunks[i : i + 100] for i in range(0, len(chunks), 100))


def _warned_of(answer: Any) -> int:
    """How many inputs were cut, by the warning."""
    return int(answer["warnings"][0].split()[0]) if "warnings" in answer else 0


@pytest.mark.parametrize("characters", [pytest.param(1000, marks=pytest.mark.exhaustive), 4000])
def test_all_chunks_are_answered_and_truncated_ones_counted(server: Server, characters: int) -> None:
    chunks = _chunks(characters)
    assert len(chunks) > ARTICLES
    before = server.metric("maxsimd_truncated_inputs_total")
    warned = 0
    with httpx.Client(base_url=server.url, timeout=120) as client:
        for part in _in_requests(chunks):
            for path, body in (
                ("/v1/embeddings", {"input": part}),
                ("/score", {"queries": "how is a file opened", "documents": part}),
            ):
                response = client.post(path, json=body)
                assert response.status_code == 200, response.text
                answer = response.json()
                assert len(answer["data"]) == len(part)
                warned += _warned_of(answer)
    assert warned > 0
    assert server.metric("maxsimd_truncated_inputs_total") - before == warned


async def test_the_engine_answers_them_too() -> None:
    chunks = _chunks(4000)
    async with Engine(EngineConfig(dtype="float32")) as engine:
        scored = await engine.score("how is a file opened", chunks)
        embedded = await engine.embed(chunks)
    assert len(scored.scores) == len(embedded.embeddings) == len(chunks)
    assert scored.truncated == embedded.truncated > 0
