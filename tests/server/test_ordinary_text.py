"""Ordinary text at the defaults: the project's own pages, and articles cut into chunks by their characters,
as people cut them. All of it is answered, and what had to be cut is said."""

from pathlib import Path

import httpx
import pytest

from maxsimd.bench.datasets import docstring_pairs
from tests.server.conftest import Server

ROOT = Path(__file__).parents[2]
PARTS = 12  # docstrings of an article


def _texts(articles: int) -> list[str]:
    docstrings = [pair.document for pair in docstring_pairs()]
    parts = [docstrings[(i * 7) % len(docstrings)] for i in range(articles * PARTS)]
    made = ["\n\n".join(parts[i : i + PARTS]) for i in range(0, len(parts), PARTS)]
    return [(ROOT / "docs/security.md").read_text(encoding="utf-8"), *made]


@pytest.mark.parametrize(
    ("characters", "articles"),
    [(4000, 3), *(pytest.param(size, 100, marks=pytest.mark.exhaustive) for size in (1000, 4000))],
)
def test_chunks_are_answered_and_truncated_ones_counted(
    server: Server, characters: int, articles: int
) -> None:
    texts = _texts(articles)
    chunks = [text[i : i + characters] for text in texts for i in range(0, len(text), characters)]
    assert len(chunks) > articles
    before = server.metric("maxsimd_truncated_inputs_total")
    warned = 0
    with httpx.Client(base_url=server.url, timeout=120) as client:
        for part in (chunks[i : i + 100] for i in range(0, len(chunks), 100)):
            for path, body in (
                ("/v1/embeddings", {"input": part}),
                ("/score", {"queries": "how is a file opened", "documents": part}),
            ):
                answer = client.post(path, json=body).raise_for_status().json()
                assert len(answer["data"]) == len(part)
                # The warning says how many inputs were cut.
                warned += int(answer["warnings"][0].split()[0]) if "warnings" in answer else 0
    assert warned > 0
    assert server.metric("maxsimd_truncated_inputs_total") - before == warned
