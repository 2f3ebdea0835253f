"""A server of several models: what befalls one is no other's business."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import yaml

from tests.server.conftest import Server, StartServer

pytestmark = pytest.mark.one_process

FAILING = Path(__file__).parents[1] / "stand_ins" / "failing_server.py"
ADMIN = {"authorization": "Bearer boss"}
DOCUMENTS = [
    "Paris is the capital of France.", "Berlin lies on the Spree.", "The cat sat on the mat.",
    "Rome is an old city, and a capital.", "Rain is expected in the north.",
]  # fmt: skip


@pytest.fixture(scope="module")
def several(
    module_starter: StartServer, bert_cross_encoder: str, tmp_path_factory: pytest.TempPathFactory
) -> Server:
    """Three models and one that cannot be loaded; the word "lose" in a text ends the engine of its model."""
    folder = tmp_path_factory.mktemp("several")
    keys, config = folder / "keys", folder / "maxsimd.yaml"
    keys.write_text("boss admin=yes\n")
    models: dict[str, Any] = {name: {"model": bert_cross_encoder} for name in ("rerank", "org/doomed")}
    models = {"embed": {}, **models, "broken": {"model": str(folder / "nowhere")}}
    options = {"dtype": "float32", "api_key_file": str(keys), "grace_seconds": 1.0}
    config.write_text(yaml.safe_dump({"models": models, **options}, sort_keys=False))
    return module_starter("--config", str(config), file=FAILING)


def _ask(server: Server, model: str | None, query: str = "capital", **more: Any) -> httpx.Response:
    named = {} if model is None else {"model": model}
    body = {"query": query, "documents": DOCUMENTS, "cache": "bypass", **named, **more}
    return httpx.post(server.url + "/rerank", json=body, headers=ADMIN, timeout=600)


def _ranked(server: Server, model: str | None, **more: Any) -> dict[int, float]:
    answer = _ask(server, model, **more)
    assert answer.status_code == 200, answer.text
    return {one["index"]: one["relevance_score"] for one in answer.json()["results"]}


def test_a_model_that_dies_fails_its_own_and_can_be_reloaded(several: Server) -> None:
    before, over = {model: _ranked(several, model) for model in ("embed", "rerank", "org/doomed")}, Event()

    def ask(model: str) -> None:
        while not over.wait(0.02):
            assert _ranked(several, model) == pytest.approx(before[model], rel=1e-5)

    with ThreadPoolExecutor() as threads:
        asking = [threads.submit(ask, model) for model in ("embed", "rerank")]
        lost, again = (_ask(several, "org/doomed", query="lose") for _ in range(2))
        over.set()
        for each in asking:
            each.result()
    assert (lost.status_code, again.status_code, again.headers["retry-after"]) == (503, 503, "30")
    assert "the model `org/doomed` is not served: the engine has died" in lost.json()["error"]["message"]
    health = httpx.get(several.url + "/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok", "models": {"ready": 2, "of": 4}})
    page = httpx.get(several.url + "/metrics", headers=ADMIN).text
    assert 'maxsimd_model_served{model="org/doomed"} 0.0' in page
    url = several.url + "/v1/models/org/doomed"
    assert httpx.post(url, json={}, headers=ADMIN, timeout=600).json()["state"] == "ok"
    assert _ranked(several, "org/doomed") == pytest.approx(before["org/doomed"], rel=1e-5)


def test_without_any_model_left_the_server_ends_with_status_1(several: Server) -> None:
    dropped = httpx.delete(several.url + "/v1/models/org/doomed", headers=ADMIN, timeout=600)
    assert dropped.status_code == 204
    gone = _ask(several, "org/doomed")
    assert gone.status_code == 404
    assert "has been dropped; served here: `embed`, `rerank`" in gone.json()["error"]["message"]
    for name in ("embed", "rerank"):
        assert _ask(several, name, query="lose").status_code == 503
    assert several.process.wait(600) == 1
    assert "no model is left" in several.log or "rerank is not served: " in several.log
