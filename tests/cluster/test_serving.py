"""Real applications on Ray Serve, beside the server that one process is: the same answers, whatever dies."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.checkpoints import bi_encoders, language_models, sparse_encoders
from tests.checkpoints.shared import SharedCheckpoints
from tests.clients_under_load import QUERY, Clients, numbers_of, right_scores, shape_of
from tests.cluster import on_ray
from tests.cluster.kills import DOCUMENTS, kill_scorers
from tests.server.conftest import StartServer, start_server
from tests.waiting import wait_for

pytest.importorskip("ray")

from maxsimd.api.cluster.config import AppConfig
from maxsimd.api.cluster.scorer import Scorer
from maxsimd.api.cluster.serve import application

__all__ = ["start_server"]

pytestmark = pytest.mark.ray
SHORT = [document[:300] for document in DOCUMENTS]
# How often a scorer is killed; `make soak-cluster` does it more often.
KILLS = 1
LATE = "late"
# What the next version of it is configured by.
NEXT: dict[str, int] = {"fronts": 2, "max_batch_tokens": 1_024, "max_documents": 9_999}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with on_ray.ray_session() as url:
        yield url


@pytest.fixture(scope="module")
def late(cluster: str) -> str:
    """The default model on two scorers behind a front."""
    return on_ray.deploy_file(LATE, cluster)


# What is asked of every kind of model: the route, and what is sent there.
ASKED = [
    ("/score", {"queries": QUERY, "documents": DOCUMENTS, "cache": "bypass"}),
    ("/score", {"queries": QUERY, "documents": ["a file", "a list", "opened"]}),
    ("/rerank", {"query": "a list", "documents": DOCUMENTS, "top_n": 7, "cache": "bypass"}),
    ("/rerank", {"query": "a list", "documents": [*SHORT, *SHORT[:9]], "cache": "bypass"}),
    ("/rerank", {"query": "a list " * 300, "documents": DOCUMENTS, "cache": "bypass"}),
    ("/rerank", {"query": "a list", "documents": DOCUMENTS[:20], "long_documents": "window"}),
    ("/v1/embeddings", {"input": DOCUMENTS}),
    ("/classify", {"input": DOCUMENTS[:5]}),
    ("/tokenize", {"prompt": "two words"}),
    ("/rerank", {"query": "a list", "documents": [*SHORT, "long " * 3_000], "long_documents": "error"}),
    ("/rerank", {"query": "a list", "documents": [*SHORT, 7]}),
    ("/rerank", {"query": "a list", "documents": []}),
    ("/rerank", {"query": "a list", "documents": ["x"], "model": "another"}),
    ("/nowhere", {}),
]


@pytest.mark.parametrize(
    "kind",
    [
        "late-interaction",
        *(
            pytest.param(kind, marks=pytest.mark.exhaustive)
            for kind in ("bi-encoder", "cross-encoder", "listwise", "sparse", "hybrid")
        ),
    ],
)
def test_answers_are_those_of_one_process(
    kind: str,
    cluster: str,
    late: str,
    start_server: StartServer,
    checkpoints: SharedCheckpoints,
    bert_cross_encoder: str,
) -> None:
    models = {
        "cross-encoder": bert_cross_encoder,
        "listwise": checkpoints(language_models.jina_reranker_v3),
        "sparse": checkpoints(sparse_encoders.splade),
        "hybrid": checkpoints(bi_encoders.bge_m3),
    }
    model = models.get(kind)
    options: dict[str, Any] = {} if kind in ("listwise", "cross-encoder") else {"score_type": kind}
    flags = [f"--score-type={kind}"] if options else []
    if kind == "hybrid":
        # The heads of bge-m3 are pickles.
        options, flags = {**options, "allow_pickle": True}, [*flags, "--allow-pickle"]
    # It loads while Ray starts the others.
    one = start_server(
        *([model] if model else []), *flags, "--dtype", "float32", "--threads", "1", ready=False
    )
    many = late if kind == "late-interaction" else on_ray.deploy(kind, cluster, model=model, **options)
    one.wait_until_ready()
    for path, body in ASKED:
        answers = [httpx.post(url + path, json=body, timeout=120) for url in (many, one.url)]
        assert answers[0].status_code == answers[1].status_code, (path, [each.text[:300] for each in answers])
        assert path not in {"/score", "/tokenize"} or answers[0].status_code == 200, "every kind scores"
        spread, whole = (each.json() for each in answers)
        assert shape_of(spread) == shape_of(whole), path
        assert numbers_of(spread) == pytest.approx(numbers_of(whole), rel=1e-6, abs=1e-6), path
    if many != late:
        on_ray.delete(kind)
    one.terminate()


@pytest.mark.exhaustive
def test_a_stream_gives_each_document_once(late: str) -> None:
    right = right_scores(late, DOCUMENTS)
    body = {"query": QUERY, "documents": DOCUMENTS, "stream": True, "cache": "bypass"}
    with httpx.stream("POST", late + "/rerank", json=body, timeout=60) as answer:
        lines = [httpx.Response(200, content=line).json() for line in answer.iter_lines()]
    given = {line["index"]: line["relevance_score"] for line in lines[:-1]}
    assert len(lines) == len(DOCUMENTS) + 1
    assert given == pytest.approx({i: right[text] for i, text in enumerate(DOCUMENTS)}, rel=1e-6, abs=1e-5)


@pytest.mark.exhaustive
def test_metrics_and_the_cache_are_those_of_all_scorers(late: str) -> None:
    body = {"query": "a list", "documents": DOCUMENTS}
    for _ in range(2):
        usage = httpx.post(late + "/rerank", json=body, timeout=60).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    page = httpx.get(late + "/metrics", timeout=30).text
    steps = [line for line in page.splitlines() if line.startswith("maxsimd_step_tokens_count{replica=")]
    assert len(steps) == 2
    assert all(float(line.rpartition(" ")[2]) > 0 for line in steps), "both scorers had a part"
    assert httpx.delete(late + "/cache").status_code == 204
    usage = httpx.post(late + "/rerank", json=body, timeout=60).json()["usage"]
    assert not (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


@pytest.mark.exhaustive
def test_a_compressed_body_and_a_head_request_are_answered(late: str) -> None:
    import gzip
    import json

    body = gzip.compress(json.dumps({"query": "q", "documents": ["a"]}).encode())
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    assert httpx.post(late + "/rerank", content=body, headers=headers).status_code == 200
    assert httpx.post(late + "/rerank", content=body[:-9], headers=headers).status_code == 400
    answer = httpx.head(late + "/health")
    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["content-length"]) > 0
    given = httpx.get(late + "/health", headers={"x-request-id": "mine"})
    assert given.headers["x-request-id"] == "mine"


def test_a_scorer_that_is_killed_loses_nothing(late: str) -> None:
    clients = kill_scorers(LATE, late, right_scores(late, DOCUMENTS), KILLS)
    assert clients.answered > 0
    assert clients.wrong == []
    assert clients.failed == []


@pytest.mark.exhaustive
def test_scorers_keep_their_caches_when_one_more_comes(late: str, cluster: str) -> None:
    body = {"query": "a list", "documents": SHORT}
    httpx.post(late + "/rerank", json=body, timeout=60)
    before = {*on_ray.replicas(LATE, "Scorer"), *on_ray.replicas(LATE, "Front")}
    on_ray.deploy_file(LATE, cluster, scorers=3)
    assert before < {*on_ray.replicas(LATE, "Scorer"), *on_ray.replicas(LATE, "Front")}
    usage = httpx.post(late + "/rerank", json=body, timeout=60).json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > usage["prompt_tokens"] / 3, "two thirds of the documents are where they were"
    on_ray.deploy_file(LATE, cluster)
    assert len(on_ray.replicas(LATE, "Front")) == 1


@pytest.mark.exhaustive
def test_a_new_version_takes_over_under_load(late: str, cluster: str) -> None:
    clients = Clients(late, right_scores(late, DOCUMENTS))
    before = {*on_ray.replicas(LATE, "Scorer"), *on_ray.replicas(LATE, "Front")}
    with clients.asking():
        time.sleep(1)
        on_ray.deploy_file(LATE, cluster, **NEXT)
        time.sleep(1)
    after = {*on_ray.replicas(LATE, "Scorer"), *on_ray.replicas(LATE, "Front")}
    assert len(after) == 4
    assert not before & after, "all of them are new"
    assert clients.answered > 0
    assert clients.wrong == []
    assert clients.failed == []


@pytest.mark.exhaustive
def test_a_front_that_is_killed_loses_only_its_own_requests(late: str, cluster: str) -> None:
    if len(on_ray.replicas(LATE, "Front")) < 2:
        on_ray.deploy_file(LATE, cluster, **NEXT)
    clients = Clients(late, right_scores(late, DOCUMENTS))
    with clients.asking():
        time.sleep(1)
        fronts = on_ray.replicas(LATE, "Front")
        on_ray.kill(fronts[0])
        wait_for(lambda: bool({*on_ray.replicas(LATE, "Front")} - {*fronts}), 120)
        time.sleep(1)
    assert clients.answered > 0
    assert clients.wrong == []
    assert len(clients.failed) <= 8, "each client had at most one request there"
    assert len(on_ray.replicas(LATE, "Scorer")) == 2


@pytest.mark.exhaustive
def test_what_waits_has_more_scorers_started(cluster: str) -> None:
    """Autoscaling by queued tokens: from one scorer to two, by what the first has to do."""
    url = on_ray.deploy("scaled", cluster, replicas=1, max_replicas=2, wanted_seconds=0.1)
    documents = [f"{i} {document}" for i in range(4) for document in DOCUMENTS]
    body = {"query": "a list", "documents": documents, "cache": "bypass"}
    with ThreadPoolExecutor(4) as threads:
        deadline = time.monotonic() + 200
        while on_ray.num_ready(url) < 2 and time.monotonic() < deadline:
            answers = [threads.submit(httpx.post, url + "/rerank", json=body, timeout=120) for _ in range(4)]
            assert {answer.result().status_code for answer in answers} == {200}
    assert on_ray.num_ready(url) == 2
    on_ray.delete("scaled")


async def _killed_by_poison(self: Scorer, *args: Any) -> None:
    """The constructor of a scorer whose engine takes the process along when it reads a certain document."""
    await Scorer.__init__(self, *args)
    score = self._engine.score

    async def dying(queries: Any, documents: Any, **options: Any) -> Any:
        if any("poison" in document for document in documents):
            os.kill(os.getpid(), signal.SIGKILL)
        return await score(queries, documents, **options)

    self._engine.score = dying  # type: ignore[method-assign]


@pytest.mark.exhaustive
def test_a_document_that_kills_scorers_fails_alone(cluster: str) -> None:
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    mortal = type("Scorer", (Scorer,), {"__init__": _killed_by_poison, "__module__": __name__})
    config = AppConfig.of({"dtype": "float32", "replicas": 2})
    url = on_ray.run("mortal", cluster, application(config, mortal), 2)
    seen = {*on_ray.replicas("mortal", "Scorer")}
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.update(on_ray.replicas("mortal", "Scorer"))
            time.sleep(0.1)

    documents = [*DOCUMENTS[:9], "poison " * 40, *DOCUMENTS[9:20]]
    with ThreadPoolExecutor(1) as threads:
        watching = threads.submit(watch)
        body = {"query": QUERY, "documents": documents, "cache": "bypass"}
        answer = httpx.post(url + "/rerank", json=body, timeout=300)
        wait_for(lambda: on_ray.num_ready(url) == 2, on_ray.READY_SECONDS)
        done.set()
        watching.result()
    assert answer.status_code == 500
    assert "documents[9]" in answer.json()["error"]["message"]
    assert len(seen) == 2 + 3, "three have died, and others have taken their places"
    right = httpx.post(url + "/rerank", json={**body, "documents": DOCUMENTS[:20]}, timeout=60)
    assert right.status_code == 200
    on_ray.delete("mortal")
