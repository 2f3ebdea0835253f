"""One engine and one server, from start to stop: what `make test-fast` sees of them."""

import httpx
import pytest

from maxsimd.engine import Engine
from tests.server.conftest import StartServer

pytestmark = pytest.mark.fast

QUERY = "What is the capital of France?"
DOCUMENTS = ["Berlin is a city in Germany.", "Paris is the capital of France.", "The weather was fair."]


async def test_an_engine_ranks_the_answer_first() -> None:
    async with Engine() as engine:
        ranked = (await engine.rerank(QUERY, DOCUMENTS)).results
        pairwise = (await engine.score([QUERY] * 3, DOCUMENTS)).scores
    assert ranked[0].document == DOCUMENTS[1]
    assert sorted(result.index for result in ranked) == [0, 1, 2]
    for result in ranked:
        assert result.score == pytest.approx(pairwise[result.index], abs=1e-2)


def test_a_server_ranks_the_answer_first_and_ends(start_server: StartServer) -> None:
    server = start_server(installed=True)
    response = httpx.post(server.url + "/rerank", json={"query": QUERY, "documents": DOCUMENTS}, timeout=600)
    assert response.status_code == 200, response.text
    assert response.json()["results"][0]["index"] == 1
    refused = httpx.post(server.url + "/rerank", json={"documents": DOCUMENTS}, timeout=600)
    assert refused.status_code == 400, refused.text
    assert server.terminate() == 0
