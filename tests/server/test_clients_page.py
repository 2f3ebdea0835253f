"""The examples of docs/clients.md for curl. Those of other clients need what `make test-clients` installs."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.clients.page import CURL, Example, examples, printed
from tests.server.conftest import Server

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
RANKING, EMBEDDING = examples(CURL)


def _answer(example: Example, server: Server, folder: Path) -> dict[str, list[dict[str, object]]]:
    answer: dict[str, list[dict[str, object]]] = json.loads(
        printed(example, "sh", server.url, os.environ, folder)
    )
    return answer


def test_the_example_that_ranks_has_the_answer_first(server: Server, tmp_path: Path) -> None:
    results = _answer(RANKING, server, tmp_path)["results"]
    assert [result["index"] for result in results] == [1, 2]


def test_the_example_that_embeds_gets_a_vector_for_each_text(server: Server, tmp_path: Path) -> None:
    vectors = [each["embedding"] for each in _answer(EMBEDDING, server, tmp_path)["data"]]
    assert len(vectors) == 2
    assert vectors[0] != vectors[1]
