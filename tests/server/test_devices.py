"""Which device a server uses, and what it says of it."""

import sys

import httpx
import pytest

from tests.checkpoints import late_interaction
from tests.checkpoints.shared import SharedCheckpoints
from tests.server.conftest import StartServer


@pytest.mark.one_process
@pytest.mark.exhaustive  # tests/accelerator has engines on such a device
def test_a_server_on_an_accelerator_says_so(
    start_server: StartServer, checkpoints: SharedCheckpoints
) -> None:
    """One that does not exist, which the program adds to torch."""
    program = [sys.executable, "-m", "tests.accelerator"]
    server = start_server(checkpoints(late_interaction.stanford), "--device", "imaginary", program=program)
    body = {"query": "a cat", "documents": ["a cat", "rain", "a dog"]}
    assert len(httpx.post(server.url + "/rerank", json=body, timeout=60).json()["results"]) == 3
    (card,) = httpx.get(server.url + "/v1/models").json()["data"]
    assert card["device"] == "imaginary"
    assert card["kernels"] == "plain torch: there are no kernels for imaginary"
    assert "packed on imaginary, plain torch" in server.log
