"""What the server says of the model that it serves."""

from pathlib import Path

import httpx
import pytest

from tests.checkpoints.architectures import Architecture, build
from tests.server.conftest import Server, StartServer


def test_the_model_card_says_what_was_checked_at_load(server: Server) -> None:
    card = httpx.get(server.url + "/v1/models").json()["data"][0]
    assert card["execution"] == "packed"
    proven, as_run, together = card["checked"]
    assert proven.startswith(
        "packed, in float32: as the model's own library one by one: 8 sequences, largest"
    )
    assert as_run.startswith("as it is run, in float32: beside float32: 8 sequences,")
    assert together.startswith("alone and together: the same")


@pytest.fixture
def fnet(tmp_path: Path) -> str:
    """FNet mixes all tokens of a batch, padding too, so that its texts must stand alone."""
    return build(Architecture("cross-encoder", "fnet"), tmp_path)


def test_a_model_that_is_run_one_by_one_says_so(start_server: StartServer, fnet: str) -> None:
    server = start_server(fnet)
    card = httpx.get(server.url + "/v1/models").json()["data"][0]
    assert card["execution"] == "one by one"
    assert "much slower" in server.log
    response = httpx.post(server.url + "/rerank", json={"query": "a", "documents": ["b", "c d e"]})
    assert response.status_code == 200
    assert len(response.json()["results"]) == 2
