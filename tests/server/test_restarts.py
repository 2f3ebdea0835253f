"""A server whose device fails: answers to callers and probes, and whether it comes back."""

from pathlib import Path

import httpx
import pytest

from tests.server.conftest import Server, StartServer

pytestmark = pytest.mark.one_process

FAILING = Path(__file__).parents[1] / "stand_ins" / "failing_server.py"
# Long enough for any step of these on a busy machine.
OPTIONS = ("--dtype", "float32", "--threads", "1", "--limit", "step_timeout_seconds=2")
RESTARTING = (*OPTIONS, "--restart-on-failure")


def _ask(server: Server, *documents: str) -> httpx.Response:
    body = {"queries": "capital", "documents": ["Paris is a capital", *documents], "cache": "bypass"}
    return httpx.post(server.url + "/score", json=body, timeout=600)


def _score(server: Server) -> float:
    return float(_ask(server).json()["data"][0]["score"])


def _warm_up(server: Server) -> float:
    """The score, asked for several times: a slow first step alone would let expect slow ones."""
    scores = {_score(server) for _ in range(5)}
    assert len(scores) == 1
    return scores.pop()


def _probe(server: Server) -> tuple[int, int, str]:
    health, ready = (httpx.get(server.url + path) for path in ("/health", "/ready"))
    assert health.json() == ready.json()
    return health.status_code, ready.status_code, health.json()["status"]


def test_failed_actors_and_devices_start_again(start_server: StartServer, stanford_colbert: str) -> None:
    server = start_server(stanford_colbert, *RESTARTING, file=FAILING)
    right = _warm_up(server)
    for restarts, word in enumerate(("die", "lose", "loop"), start=1):
        assert _ask(server, word).status_code == 503
        server.wait_until_ready()
        assert (_score(server), server.metric("maxsimd_engine_restarts_total")) == (right, restarts)
    assert _ask(server, "break").status_code == 500, "a text that fails alone ends nothing"
    assert _probe(server) == (200, 200, "ok")
    assert "in _stay" in server.log, "the log says where the device's thread stands"
    assert server.terminate() == 0, "the stuck thread keeps no process from ending"
