"""Real applications on Ray Serve, beside the server that one process is: the same answers, whatever dies."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import httpx
import pytest

from tests.checkpoints import bi_encoders, cross_encoders, language_models, sparse_encoders
from tests.checkpoints.shared import SharedCheckpoints
from tests.clients_under_load import ASKED, DOCUMENTS, SHORT, Clients, numbers_of, right_scores, shape_of
from tests.cluster import on_ray
from tests.cluster.soak import kill_scorers
from tests.exhaustive import exhaustive
from tests.server.conftest import StartServer, start_server
from tests.waiting import wait_for

__all__ = ["start_server"]

pytestmark = [pytest.mark.ray, pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")]
LATE = "late"
# The configuration of its next version.
NEXT: dict[str, int] = {"fronts": 2, "max_batch_tokens": 1_024, "max_documents": 9_999}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with on_ray.ray_session() as url:
        yield url


@pytest.fixture(scope="module")
def late(cluster: str) -> str:
    """The default model on two scorers behind a front."""
    return on_ray.deploy_file(LATE, cluster)


@pytest.mark.parametrize(
    "kind", ["late-interaction", *exhaustive("bi-encoder", "cross-encoder", "listwise", "sparse", "hybrid")]
)
def test_answers_are_those_of_one_process(
    kind: str, cluster: str, late: str, start_server: StartServer, checkpoints: SharedCheckpoints
) -> None:
    models = {
        "cross-encoder": checkpoints(cross_encoders.bert),
        "listwise": checkpoints(language_models.jina_reranker_v3),
        "sparse": checkpoints(sparse_encoders.splade),
        "hybrid": checkpoints(bi_encoders.bge_m3),
    }
    model = models.get(kind)
    options: dict[str, Any] = {} if kind in ("listwise", "cross-encoder") else {"score_type": kind}
    flags = [f"--score-type={kind}"] if options else []
    if kind == "hybrid":  # whose heads are pickles
        options, flags = {**options, "allow_pickle": True}, [*flags, "--allow-pickle"]
    # It loads while Ray starts the others.
    flags += [model] if model else []
    one = start_server(*flags, "--dtype", "float32", "--threads", "1", ready=False)
    many = late if kind == "late-interaction" else on_ray.deploy(kind, cluster, model=model, **options)
    one.wait_until_ready()
    for path, body in ASKED:
        answers = [httpx.post(url + path, json=body, timeout=600) for url in (many, one.url)]
        assert answers[0].status_code == answers[1].status_code, (path, [each.text[:300] for each in answers])
        assert path not in {"/score", "/tokenize"} or answers[0].status_code == 200, "every kind scores"
        spread, whole = (each.json() for each in answers)
        assert shape_of(spread) == shape_of(whole), path
        assert numbers_of(spread) == pytest.approx(numbers_of(whole), rel=1e-6, abs=1e-6), path
    if many != late:
        on_ray.delete(kind)
    one.terminate()


def test_a_scorer_that_is_killed_loses_nothing(late: str) -> None:
    clients = kill_scorers(LATE, late, right_scores(late, DOCUMENTS), 1)
    clients.check()


def _processes() -> set[int]:
    return {pid for kind in ("Scorer", "Front") for pid in on_ray.replicas(LATE, kind)}


@pytest.mark.exhaustive
def test_scorers_keep_their_caches_when_one_more_comes(late: str, cluster: str) -> None:
    body = {"query": "a list", "documents": SHORT}
    httpx.post(late + "/rerank", json=body, timeout=600)
    before = _processes()
    on_ray.deploy_file(LATE, cluster, scorers=3)
    assert before < _processes()
    usage = httpx.post(late + "/rerank", json=body, timeout=600).json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > usage["prompt_tokens"] / 3, "two thirds of the documents are where they were"
    on_ray.deploy_file(LATE, cluster)
    assert len(on_ray.replicas(LATE, "Front")) == 1


@pytest.mark.exhaustive
def test_a_new_version_takes_over_under_load(late: str, cluster: str) -> None:
    clients = Clients(late, right_scores(late, DOCUMENTS))
    before = _processes()
    with clients.asking():
        time.sleep(1)
        on_ray.deploy_file(LATE, cluster, **NEXT)
        time.sleep(1)
    after = _processes()
    assert len(after) == 4
    assert not before & after, "all of them are new"
    clients.check()


@pytest.mark.exhaustive
def test_a_front_that_is_killed_loses_only_its_own_requests(late: str, cluster: str) -> None:
    if len(on_ray.replicas(LATE, "Front")) < 2:
        on_ray.deploy_file(LATE, cluster, **NEXT)
    clients = Clients(late, right_scores(late, DOCUMENTS))
    with clients.asking():
        time.sleep(1)
        fronts = on_ray.replicas(LATE, "Front")
        on_ray.kill(fronts[0])
        wait_for(lambda: bool({*on_ray.replicas(LATE, "Front")} - {*fronts}))
        time.sleep(1)
    clients.check(most_failed=8)
    assert len(on_ray.replicas(LATE, "Scorer")) == 2


@pytest.mark.exhaustive
def test_what_waits_has_more_scorers_started(cluster: str) -> None:
    url = on_ray.deploy("scaled", cluster, replicas=1, max_replicas=2, wanted_seconds=0.1)
    documents = [f"{i} {document}" for i in range(4) for document in DOCUMENTS]
    body = {"query": "a list", "documents": documents, "cache": "bypass"}
    with ThreadPoolExecutor(4) as threads:
        deadline = time.monotonic() + 200
        while on_ray.num_ready(url) < 2 and time.monotonic() < deadline:
            answers = [threads.submit(httpx.post, url + "/rerank", json=body, timeout=600) for _ in range(4)]
            assert {answer.result().status_code for answer in answers} == {200}
    assert on_ray.num_ready(url) == 2
    on_ray.delete("scaled")
