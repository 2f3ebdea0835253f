"""Several models behind the handlers: where requests go, cascades, models that come, go, fail and die."""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from maxsimd.api.answer import Answer
from maxsimd.api.config import ServerConfig
from maxsimd.api.handlers.embeddings import POOL, PoolingRequest
from maxsimd.api.handlers.tei import wanted_by_fields
from maxsimd.api.model_setup import Loadable, ModelSetup
from maxsimd.api.models import SeveralModels, Wanted
from maxsimd.api.state import ServerState
from maxsimd.engine import EngineConfig, EngineNotReadyError
from maxsimd.engine.several import engines
from tests.unit.calling_handlers import GOOD, Caller, error_of

OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1}
DOCUMENTS = ["a cat sits", "a dog runs", "stocks fell", "cats and dogs", "rain", "a kitten"]
BODY = {"query": "cat", "documents": DOCUMENTS}
CASCADE = [{"model": "embed", "keep": 3}, {"model": "rerank"}]
INSTRUCTED = {"model": "rerank", "instruction": "a"}


class Asking(Caller):
    def __init__(self, models: SeveralModels, keys: Path) -> None:
        self.models = models
        self.state = ServerState(models, ServerConfig(api_key_file=str(keys)))

    async def __call__(self, method: str, path: str, body: Any = b"", key: str = "boss") -> Answer:
        return await super().ask(method, path, body, {"authorization": f"Bearer {key}"})

    async def ask(self, method: str, path: str, body: Any = b"", headers: Any = None) -> Answer:
        return await self(method, path, body)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("boss admin=yes\nuser name=user admin=no\n")
    return file


def _models(setups: dict[str, EngineConfig], folder: str | None = None) -> SeveralModels:
    configured = [ModelSetup(name=name, engine=engine) for name, engine in setups.items()]
    return SeveralModels(configured, Loadable(configured, folder, EngineConfig(**OPTIONS)), grace=0.2)


@pytest.fixture(scope="module")
def reranker(bert_cross_encoder: str) -> EngineConfig:
    return EngineConfig(model=bert_cross_encoder, **OPTIONS)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def asking(reranker: EngineConfig, keys: Path) -> AsyncIterator[Asking]:
    embed, broken = (
        EngineConfig(score_type="bi-encoder", **OPTIONS),
        EngineConfig(model="/nowhere", **OPTIONS),
    )
    setups = {"embed": embed, "rerank": reranker, "broken": broken}
    models = _models(setups, str(Path(str(reranker.model)).parent))
    await models.start()
    try:
        yield Asking(models, keys)
    finally:
        await models.stop(0)


class LoadingEngine:
    """It has started once it may."""

    def __init__(self) -> None:
        self.has_begun, self.may_load, self.num_cleared = asyncio.Event(), asyncio.Event(), 0
        self.metrics = SimpleNamespace(cache=None, registry=CollectorRegistry())
        self.facts = SimpleNamespace(how_it_runs="")
        self.death = None
        self.while_it_clears: Callable[[], None] = lambda: None

    async def start(self) -> None:
        self.has_begun.set()
        await self.may_load.wait()

    def set_tenants(self, tenants: Any) -> None: ...

    async def until_dead(self) -> None:
        await asyncio.Event().wait()

    async def clear_cache(self) -> None:
        self.num_cleared += 1
        await asyncio.sleep(0)
        self.while_it_clears()

    async def stop(self, grace: float | None = None) -> None: ...


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_model_that_loads_beside_a_clearing_clears_its_own(is_first: bool, monkeypatch: Any) -> None:
    setup = ModelSetup(name="a", engine=EngineConfig())
    engine: Any = LoadingEngine()
    monkeypatch.setattr(engines, "SharedEngine", lambda *_: engine)
    models = SeveralModels([setup] * is_first, Loadable([setup], None, EngineConfig()), grace=0)
    loading = asyncio.create_task(models.start() if is_first else models.add("a"))
    await engine.has_begun.wait()
    await models.clear_cache()
    engine.may_load.set()
    await loading
    assert (engine.num_cleared, models.engine("a")) == (1, engine)

    def drop() -> None:
        models.setups.pop("b", None)
        raise EngineNotReadyError("it is dropped")

    engine.while_it_clears = drop
    models.setups["b"], models._models["b"] = models.setups["a"], models._models["a"]
    await models.clear_cache()
    assert engine.num_cleared == 3
    await models.stop()


async def test_requests_go_to_the_named_or_the_fitting_model(asking: Asking) -> None:
    vectors = await asking.json("/v1/embeddings", {"input": "cat"})
    assert (vectors["model"], (await asking.json("/rerank", BODY))["model"]) == ("embed", "rerank")
    assert (await asking.json("/score", {"queries": "a", "documents": "b"}))["model"] == "rerank"
    assert (await asking.json("/rerank", {**BODY, "model": "embed"}))["model"] == "embed"
    assert (await asking.json("/rerank", {**BODY, "model": "all-MiniLM-L6-v2"}))["model"] == "embed"
    assert (await asking.json("/pooling", {"input": "cat"}))["model"] == "embed"
    assert (await asking.json("/invocations", BODY))["model"] == "rerank"
    assert (await asking.json("/invocations", {"input": "cat"}))["model"] == "embed"
    assert await asking.json("/", {"inputs": "cat"}) == [vectors["data"][0]["embedding"]]
    encoded = {"input": "cat", "encoding": "muvera", "input_type": "document", "model": "embed"}
    await asking.refused("/v1/embeddings", encoded, 400, says="late interaction")
    assert (await asking.json("/tokenize", {"text": "cat"}))["max_model_len"] == 256
    assert (await asking.json("/tokenize", {"text": "cat", "model": "rerank"}))["max_model_len"] == 512
    reason = "the model `broken` is not served: there is no folder '/nowhere'; served here: `embed`, `rerank`"
    await asking.refused("/v1/embeddings", {"input": "a", "model": "broken"}, 503, says=reason)
    # Whether it classifies is not known, and no other does.
    for path in ("/classify", "/pooling", "/invocations"):
        await asking.refused(path, {"input": "a", "task": "classify"}, 503, says="may be for `broken`")
    for more in ({"task": "token_embed"}, {"encoding": "muvera"}, {"encoding": "muvera", "task": "embed"}):
        pooled: dict[str, Any] = {"input": "a", **more}
        assert POOL.model_wanted(asking.state, PoolingRequest(**pooled)) == Wanted.TOKEN_VECTORS
        assert wanted_by_fields(asking.state, pooled) == Wanted.TOKEN_VECTORS
    await asking.refused("/invocations", {"input": "a", "task": ["embed"]}, 400, says="task")


async def test_tei_routes_go_to_the_model_that_they_name(asking: Asking) -> None:
    paths = ("/embed", "/embed_all", "/embed_sparse", "/similarity", "/predict", "/decode", "/rerank", "/")
    for path in paths:
        body = {"query": "q", "texts": ["d"]} if path in ("/rerank", "/") else GOOD["POST", path]
        missing = "The model `nope` does not exist; served here: `embed`, `rerank`."
        await asking.refused(path, {**body, "model": "nope"}, 404, says=missing)
        await asking.refused(path, {**body, "model": "broken"}, 503)
        await asking.refused(path, {**body, "model": 3}, 400)
        of_embed = await asking("POST", path, {**body, "model": "embed"})
        assert of_embed.status == (400 if path in ("/embed_sparse", "/predict", "/") else 200)
        of_queries = await asking("POST", path, {**body, "model": "embed:query"})
        assert of_queries.status == (200 if path in ("/embed", "/embed_all", "/similarity") else 400)
        of_rerank = await asking("POST", path, {**body, "model": "rerank"})
        assert of_rerank.status == (200 if path in ("/predict", "/decode", "/rerank", "/") else 400)
    # The root does what the named model is for.
    ranking = {"query": "cat", "texts": DOCUMENTS}
    assert await asking.json("/", {**ranking, "model": "rerank"}) == await asking.json("/rerank", ranking)
    await asking.refused("/", ranking, 400, says="inputs is missing")
    await asking.refused("/", {"inputs": "cat", "model": "rerank"}, 400, says="query is missing")


async def test_a_cascade_is_the_two_calls_by_hand(asking: Asking) -> None:
    first = (await asking.json("/rerank", {**BODY, "model": "embed", "top_n": 3}))["results"]
    best = [document["index"] for document in first]
    by_hand = await asking.json("/rerank", {**BODY, "documents": [DOCUMENTS[i] for i in best]})
    expected = [{**one, "index": best[one["index"]], "model": "rerank"} for one in by_hand["results"]]
    bodies: Any = {"/rerank": {"top_n": 0}, "/v2/rerank": {}, "/invocations": {}, "/": {"model": "rerank"}}
    for path, added in bodies.items():
        found = await asking.json(path, {**BODY, "cascade": CASCADE, **added})
        assert (found["results"], found["model"]) == (expected, "rerank")
        stages = [(stage["model"], stage["documents"]) for stage in found["stages"]]
        assert stages == [("embed", 6), ("rerank", 3)]
        assert all(stage["milliseconds"] > 0 for stage in found["stages"])
        assert found["score_scale"] == by_hand["score_scale"]
    plain = {**BODY, "cascade": CASCADE, "top_n": 1, "return_documents": False}
    (few,) = (await asking.json("/rerank", plain))["results"]
    assert (few["index"], "document" in few) == (expected[0]["index"], False), few
    for added, status, message in (
        ({"cascade": []}, 400, "2 to 8 stages, not 0"),
        ({"cascade": [CASCADE[0]] * 9}, 400, "2 to 8 stages, not 9"),
        ({"cascade": [{"model": "embed"}, {"model": "rerank"}]}, 400, "cascade[0] must say how many"),
        ({"cascade": [{"model": "embed", "keep": 0}, {"model": "rerank"}]}, 400, "`int` >= 1"),
        ({"cascade": [CASCADE[0], CASCADE[0]]}, 400, "the last stage of a cascade has no keep"),
        ({"cascade": [CASCADE[0], {"model": "nope"}]}, 404, "The model `nope` does not exist"),
        ({"cascade": [CASCADE[0], {"model": "broken"}]}, 503, "the model `broken` is not served"),
        ({"cascade": [CASCADE[0], {}]}, 400, "cascade[1].model is missing"),
        ({"cascade": [CASCADE[0], INSTRUCTED]}, 400, "leave it out (the model 'rerank' of the cascade)"),
        ({"cascade": CASCADE, "model": "nope"}, 404, "The model `nope` does not exist"),
        ({"cascade": CASCADE, "timeout": 1e-9}, 504, "not done within"),
        *(
            ({"cascade": CASCADE, **option}, 400, "a cascade does not support")
            for option in (
                *({"texts": ["a"], "documents": None}, {"top_k": 1}, {"truncation": True}, {"stream": True}),
                *({"explain": True}, {"on_timeout": "partial"}, {"on_error": "report"}),
            )
        ),
    ):
        await asking.refused("/rerank", {**BODY, **added}, status, says=message)


async def test_pages_say_what_each_model_is_and_how_it_stands(asking: Asking) -> None:
    async def page(path: str) -> Any:
        return json.loads((await asking("GET", path)).body)

    cards = {card["id"]: card for card in (await page("/v1/models"))["data"]}
    states = {"embed": "ok", "rerank": "ok", "broken": "failed: there is no folder '/nowhere'"}
    assert [(name, card["state"]) for name, card in cards.items()] == [*states.items()]
    assert cards["embed"]["score_type"] == "bi-encoder"
    assert cards["rerank"]["score_scale"] == {"transform": "sigmoid", "min": 0.0, "max": 1.0}
    for path in ("rerank", "rerank%2F", "rerank//"):
        assert (await page(f"/v1/models/{path}"))["id"] == "rerank"
    for path in ("..", "%2F", "..%2Frerank", "%00", "rerank%25"):
        assert (await asking("GET", f"/v1/models/{path}")).status == 404
    assert (await asking("GET", "/v1/models/nope")).status == 404
    assert "`a/b`" in error_of(await asking("GET", "/v1/models/a%2Fb"))["message"]
    assert (await page("/health")) == {"status": "ok", "models": {"ready": 2, "of": 3}}
    assert (await asking("GET", "/ready")).status == 200
    assert (await page("/info"))["models"] == ["embed", "rerank"]
    metrics = (await asking("GET", "/metrics")).body.decode()
    for line in ('served{model="embed"} 1.0', 'served{model="broken"} 0.0'):
        assert f"maxsimd_model_{line}" in metrics
    assert "maxsimd_tokens_total{model=" in metrics
    assert metrics.count("# TYPE maxsimd_step_tokens ") == 1
    assert set((await page("/openapi.json"))["paths"]["/v1/models/{name}"]) == {"get", "post", "delete"}
    refused = await asking("PUT", "/v1/models/rerank")
    assert (refused.status, refused.headers["Allow"]) == (405, "DELETE, GET, HEAD, POST")


async def test_a_link_out_of_it_is_a_422(asking: Asking, reranker: EngineConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    folder = Path(str(reranker.model)).parent / f"linked-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "config.json").symlink_to(tmp_path / "config.json")
        leads = f"the link {folder.name}/config.json leads out of"
        await asking.refused(f"/v1/models/{folder.name}", b"", 422, says=leads)
    finally:
        shutil.rmtree(folder)


async def test_only_an_admin_loads_and_drops_models(asking: Asking, reranker: EngineConfig) -> None:
    name = Path(str(reranker.model)).name
    for method in ("POST", "DELETE"):
        refused = await asking(method, f"/v1/models/{name}", key="user")
        assert (refused.status, "admin=yes" in error_of(refused)["message"]) == (403, True)
        assert (await asking(method, f"/v1/models/{name}", key="nobody")).status == 401
        assert (await asking(method, "/v1/models/nope")).status == 404
        for unreadable in (b'{"\xff": 1}', b'{"a": %s}' % (b"[" * 9_999 + b"]" * 9_999)):
            assert (await asking(method, "/v1/models/nope", unreadable)).status == 400
        assert (await asking(method, "/v1/models/nope", b"{}".ljust(100_000))).status == 413
    await asking.refused("/v1/models/broken", b"", 422)
    starting = Asking(_models({"a": reranker}), Path(str(asking.state.config.api_key_file)))
    assert (await starting("DELETE", "/v1/models/a")).status == 503
    loaded, again = await asyncio.gather(*(asking("POST", f"/v1/models/{name}") for _ in range(2)))
    assert (loaded.status, again.status, json.loads(loaded.body)["score_type"]) == (200, 200, "cross-encoder")
    expected = (await asking.json("/rerank", {**BODY, "model": "rerank"}))["results"]
    assert (await asking.json("/rerank", {**BODY, "model": name}))["results"] == expected
    path = str(reranker.model)
    which = f"several models are `{path}`; say which you mean by its name: `rerank`, `{name}`"
    await asking.refused("/rerank", {**BODY, "model": path}, 404, says=which)
    answer = await asking("DELETE", f"/v1/models/{name}", {"force": True})
    assert (answer.status, "`force`" in answer.headers["x-maxsimd-warnings"]) == (204, True)
    assert f'model_served{{model="{name}"}}' not in (await asking("GET", "/metrics")).body.decode()
    assert (await asking.json("/rerank", {**BODY, "model": path}))["model"] == "rerank"
    dropped = f"the model `{name}` has been dropped; served here: `embed`, `rerank`"
    await asking.refused("/rerank", {**BODY, "model": name}, 404, says=dropped)


async def test_without_admins_the_routes_are_off_and_not_listed(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("boss\n")
    without = Asking(_models({"rerank": EngineConfig()}), tmp_path / "keys")
    for method in ("POST", "DELETE"):
        answer = await without(method, "/v1/models/rerank")
        assert (answer.status, "--api-key-file" in error_of(answer)["message"]) == (403, True)
    assert (await without("PUT", "/v1/models/rerank")).headers["Allow"] == "GET, HEAD"
    paths = json.loads((await without("GET", "/openapi.json")).body)["paths"]
    assert set(paths["/v1/models/{name}"]) == {"get"}


async def test_a_dropped_model_fails_its_own_alone(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = asking.models.engine("rerank")
    assert engine is not None
    begun, rerank = asyncio.Event(), engine.rerank

    async def slow(*texts: Any, **options: Any) -> Any:
        begun.set()
        return await rerank(texts[0], [f"{i} {'word ' * 400}" for i in range(2000)], **options)

    monkeypatch.setattr(engine, "rerank", slow)
    gone = "the model `rerank` was dropped before the request was done"
    waiting = asyncio.create_task(asking.refused("/rerank", {**BODY, "cache": "bypass"}, 503, says=gone))
    await begun.wait()
    await asyncio.sleep(0.05)
    dropping = asyncio.create_task(asking("DELETE", "/v1/models/rerank"))
    expected = (await asking.json("/rerank", {**BODY, "model": "embed"}))["results"]
    await waiting
    assert (await dropping).status == 204
    assert (await asking.json("/rerank", {**BODY, "model": "embed"}))["results"] == expected
    last = await asking("DELETE", "/v1/models/embed")
    assert (last.status, "the last model" in error_of(last)["message"]) == (409, True)
    assert (await asking("POST", "/v1/models/rerank")).status == 200
    assert (await asking.json("/rerank", {**BODY, "model": "rerank"}))["model"] == "rerank"
