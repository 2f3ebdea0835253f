"""A server of several models: each as in a server alone, and what befalls one is no other's business."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import yaml

from tests.server.conftest import Server, StartServer
from tests.waiting import wait_for

pytestmark = pytest.mark.one_process

FAILING = Path(__file__).parents[1] / "stand_ins" / "failing_server.py"
ADMIN = {"authorization": "Bearer boss"}
QUERY = "capital"
DOCUMENTS = [
    "Paris is the capital of France.",
    "Berlin lies on the Spree.",
    "The cat sat on the mat.",
    "Rome is an old city, and a capital.",
    "Rain is expected in the north.",
]


@pytest.fixture(scope="module")
def several(
    module_starter: StartServer, bert_cross_encoder: str, tmp_path_factory: pytest.TempPathFactory
) -> Server:
    """Three models and one that cannot be loaded; the word "lose" in a text ends the engine of its model."""
    folder = tmp_path_factory.mktemp("several")
    keys, config = folder / "keys", folder / "maxsimd.yaml"
    keys.write_text("boss admin=yes\n")
    models: dict[str, Any] = {
        "embed": {},
        "rerank": {"model": bert_cross_encoder},
        "org/doomed": {"model": bert_cross_encoder},
        "broken": {"model": str(folder / "nowhere")},
    }
    options = {"dtype": "float32", "api_key_file": str(keys), "grace_seconds": 1.0}
    config.write_text(yaml.safe_dump({"models": models, **options}, sort_keys=False))
    return module_starter("--config", str(config), file=FAILING)


def _post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=ADMIN, timeout=120)


def _ranked(server: Server, model: str | None, documents: list[str] = DOCUMENTS, **more: Any) -> Any:
    body = {"query": QUERY, "documents": documents, **({} if model is None else {"model": model}), **more}
    answer = _post(server, "/rerank", body)
    assert answer.status_code == 200, answer.text
    return answer.json()["results"]


def _scores(results: Any) -> dict[int, Any]:
    return {one["index"]: pytest.approx(one["relevance_score"], rel=1e-6, abs=1e-5) for one in results}


def _plain(results: Any) -> dict[int, float]:
    return {one["index"]: one["relevance_score"] for one in results}


def _error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


@pytest.mark.exhaustive
def test_each_scores_as_in_a_server_alone(
    several: Server, server: Server, cross_encoder_server: Server
) -> None:
    assert _plain(_ranked(several, "embed")) == _scores(_ranked(server, None))
    assert _plain(_ranked(several, "rerank")) == _scores(_ranked(cross_encoder_server, None))
    together, alone = (
        _post(each, "/v1/embeddings", {"input": DOCUMENTS}).json()["data"] for each in (several, server)
    )
    for ours, theirs in zip(together, alone, strict=True):
        assert ours["embedding"] == pytest.approx(theirs["embedding"], rel=1e-6, abs=1e-5)


def test_a_cascade_is_the_two_calls_by_hand(several: Server) -> None:
    best = [one["index"] for one in _ranked(several, "embed", top_n=3)]
    by_hand = _ranked(several, "rerank", [DOCUMENTS[i] for i in best])
    stages = [{"model": "embed", "keep": 3}, {"model": "rerank"}]
    found = _ranked(several, None, cascade=stages)
    assert _plain(found) == {best[i]: score for i, score in _scores(by_hand).items()}
    assert {one["model"] for one in found} == {"rerank"}


def test_one_that_cannot_be_loaded_is_told_and_the_others_serve(several: Server) -> None:
    status, message = _error(_post(several, "/rerank", {"query": "a", "documents": ["b"], "model": "broken"}))
    assert status == 503
    assert "the model `broken` is not served: there is no folder" in message
    cards = httpx.get(several.url + "/v1/models", headers=ADMIN).json()["data"]
    states = {card["id"]: card["state"].partition(":")[0] for card in cards}
    assert states == {"embed": "ok", "rerank": "ok", "org/doomed": "ok", "broken": "failed"}
    one = httpx.get(several.url + "/v1/models/org/doomed", headers=ADMIN).json()
    assert (one["id"], one["score_type"]) == ("org/doomed", "cross-encoder")


def _beside_load(several: Server, happens: Callable[[], None]) -> None:
    """Asks the other models again and again while something happens: all is answered, and alike."""
    expected = {model: _plain(_ranked(several, model)) for model in ("embed", "rerank")}
    over = Event()

    def ask(model: str) -> int:
        asked = 0
        while not over.is_set() or asked < 3:
            found = _plain(_ranked(several, model, cache="bypass"))
            assert found == {
                i: pytest.approx(score, rel=1e-6, abs=1e-5) for i, score in expected[model].items()
            }
            asked += 1
        return asked

    with ThreadPoolExecutor() as threads:
        asking = [threads.submit(ask, model) for model in expected]
        try:
            happens()
        finally:
            over.set()
        assert all(each.result() >= 3 for each in asking)


def test_a_model_that_dies_fails_its_own_and_can_be_reloaded(several: Server) -> None:
    expected = _plain(_ranked(several, "org/doomed"))

    def dies() -> None:
        lost = _post(several, "/rerank", {"query": "lose", "documents": DOCUMENTS, "model": "org/doomed"})
        status, message = _error(lost)
        assert status == 503
        assert "the model `org/doomed` is not served: the engine has died" in message
        again = _post(several, "/rerank", {"query": "a", "documents": ["b"], "model": "org/doomed"})
        assert _error(again)[0] == 503
        assert again.headers["retry-after"] == "30"

    _beside_load(several, dies)
    assert several.process.poll() is None
    health = httpx.get(several.url + "/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok", "models": {"ready": 2, "of": 4}})
    page = httpx.get(several.url + "/metrics", headers=ADMIN).text
    assert 'maxsimd_model_served{model="org/doomed"} 0.0' in page
    assert _post(several, "/v1/models/org/doomed", {}).json()["state"] == "ok"
    assert _plain(_ranked(several, "org/doomed")) == expected


@pytest.mark.exhaustive
def test_one_that_is_dropped_while_requests_wait_tells_them(several: Server) -> None:
    heavy = {
        "query": QUERY,
        "documents": [f"{i} " + "word " * 450 for i in range(3000)],
        "model": "org/doomed",
        "cache": "bypass",
    }

    def is_dropped() -> None:
        with ThreadPoolExecutor() as threads:
            waiting = [threads.submit(_post, several, "/rerank", heavy) for _ in range(2)]
            sample = 'maxsimd_queue_tokens{model="org/doomed"}'
            wait_for(lambda: _metric(several, sample) > 0, 60)
            dropped = httpx.delete(several.url + "/v1/models/org/doomed", headers=ADMIN, timeout=120)
            assert dropped.status_code == 204
            for each in waiting:
                status, message = _error(each.result())
                assert (status, "was dropped before the request was done" in message) == (503, True)

    _beside_load(several, is_dropped)
    gone = _post(several, "/rerank", {"query": "a", "documents": ["b"], "model": "org/doomed"})
    status, message = _error(gone)
    assert (status, message) == (
        404,
        "the model `org/doomed` has been dropped; served here: `embed`, `rerank`",
    )


def _metric(server: Server, sample: str) -> float:
    lines = httpx.get(server.url + "/metrics", headers=ADMIN, timeout=30).text.splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(sample)), 0.0)


def test_without_any_model_left_the_server_ends_with_status_1(several: Server) -> None:
    dropped = httpx.delete(several.url + "/v1/models/org/doomed", headers=ADMIN, timeout=120)
    assert dropped.status_code in (204, 404), "another test may have dropped it"
    for name in ("embed", "rerank"):
        lost = {"query": "lose", "documents": ["a"], "model": name, "cache": "bypass"}
        assert _post(several, "/rerank", lost).status_code == 503
    assert several.process.wait(60) == 1
    assert "no model is left" in several.log or "is not served any more" in several.log
