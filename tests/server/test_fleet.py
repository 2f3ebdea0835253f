"""A server of several processes: the same answers as one process gives, whichever of them dies."""

import asyncio
import logging
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import httpx
import pytest

from maxsimd.api.config import ServerConfig
from maxsimd.api.fleet import process
from maxsimd.api.fleet.supervisor import Setup
from maxsimd.api.process import SIGNALS
from maxsimd.engine import EngineConfig
from tests.clients_under_load import ASKED, DOCUMENTS, Clients, numbers_of, right_scores, shape_of
from tests.forked import Program
from tests.processes import descendants
from tests.server.conftest import Server, StartServer
from tests.waiting import wait_for


def _children(server: Server) -> dict[str, list[int]]:
    """The processes of a fleet: engines and fronts."""
    found: dict[str, list[int]] = {"replica": [], "front": []}
    for each in descendants(server.process.pid):
        for kind in found.keys() & set(each.title.split()):
            found[kind].append(each.pid)
    return found


class _Copy:
    """A process of a fleet as a copy of its parent, with the methods of asyncio's that the parent uses."""

    _given: ClassVar[list[BinaryIO]] = []

    def __init__(self, name: str) -> None:
        read, write = os.pipe()
        self.returncode: int | None = None
        self.stdin = open(write, "wb", buffering=0)  # noqa: SIM115
        self._given.append(self.stdin)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._begin(read, name)
            finally:
                os._exit(1)
        os.close(read)

    def _begin(self, read: int, name: str) -> None:
        os.setsid()
        os.dup2(read, 0)
        for each in self._given:
            each.close()
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        logging.getLogger().handlers.clear()  # one whose thread has a lock here could not be closed
        Path("/proc/self/comm").write_text(name)
        process.main()

    async def wait(self) -> int:
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)  # noqa: ASYNC222 (it does not wait)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            else:
                await asyncio.sleep(0.02)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _copy_all_but_one() -> None:
    """Starts the first front as a program, and all other processes as copies, which takes no seconds."""
    start, begun = asyncio.create_subprocess_exec, set[str]()

    async def started(*command: str, **options: Any) -> Any:
        name = " ".join(command[3:])
        if name == "front 0" and name not in begun:
            begun.add(name)
            return await start(*command, **options)
        return _Copy(name)

    asyncio.create_subprocess_exec = started  # type: ignore[assignment]


@pytest.fixture(scope="module")
def fleet(module_starter: StartServer, stanford_colbert: str) -> Server:
    # A request may wait while engines are started again, on a slow machine too.
    patience = ("--max-wait-seconds", "600", "--grace-seconds", "120")
    processes = ("--fronts", "2", "--replicas", "2", "--limit", "replica_timeout_seconds=3")
    options = (stanford_colbert, "--dtype", "float32", *processes, *patience)
    server = module_starter(*options, before=_copy_all_but_one)
    wait_for(lambda: _num_engines(server) == 2)
    wait_for(lambda: _num_fronts(server) == 2)
    return server


def _num_engines(server: Server) -> int:
    status = httpx.get(server.url + "/health").json()
    assert status["replicas"]["of"] == 2
    return int(status["replicas"]["ready"])


def _num_fronts(server: Server) -> int:
    return len(set(re.findall(r'\{front="(\d+)"', httpx.get(server.url + "/metrics").text)))


def _steps(server: Server) -> list[float]:
    page = httpx.get(server.url + "/metrics").text
    return [
        float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith("maxsimd_step_tokens_count{replica=")
    ]


# MUVERA is without hyperplanes: rounding may put a token on either side of one.
EMBEDDED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": [f"{DOCUMENTS[0][:200]} ", DOCUMENTS[1][:200]], "late_chunking": True}),
    ("/v1/embeddings", {"input": DOCUMENTS, "encoding": "muvera", "input_type": "document",
                        "muvera": {"k_sim": 0, "r_reps": 2}}),
]  # fmt: skip


def test_a_spread_request_is_answered_as_by_one_process(fleet: Server, colbert_server: Server) -> None:
    for each in (fleet, colbert_server):
        assert httpx.delete(each.url + "/cache").status_code == 204, "another test may have filled it"
    for path, body in (*ASKED, *EMBEDDED):
        answers = [httpx.post(each.url + path, json=body, timeout=600) for each in (fleet, colbert_server)]
        spread, whole = (each.json() for each in answers)
        assert shape_of(spread) == shape_of(whole), path
        assert numbers_of(spread) == pytest.approx(numbers_of(whole), rel=1e-6, abs=1e-5), path
    assert len(_steps(fleet)) == 2
    assert min(_steps(fleet)) > 0, "both engines had a part"


def test_clearing_the_cache_reaches_all_engines(fleet: Server) -> None:
    def cached() -> int:
        body = {"query": "a list", "documents": DOCUMENTS}
        usage = httpx.post(fleet.url + "/rerank", json=body, timeout=600).json()["usage"]
        return int(usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))

    cached()
    assert cached() > 0
    assert httpx.delete(fleet.url + "/cache").status_code == 204
    assert cached() == 0


def test_each_engine_finds_its_documents_by_digest(fleet: Server, colbert_server: Server) -> None:
    texts = [f"{i} {text[:100]}" for i in range(10) for text in DOCUMENTS]
    added = httpx.post(fleet.url + "/documents", json={"documents": texts[1:]}, timeout=600).json()
    assert all(each["kept"] for each in added["data"])
    digests = [sha256(text.encode()).hexdigest() for text in texts]
    assert [each["digest"] for each in added["data"]] == digests[1:]
    body: dict[str, Any] = {"query": "a list", "documents": [{"digest": digest} for digest in digests]}
    missing = httpx.post(fleet.url + "/rerank", json=body, timeout=600)
    assert (missing.status_code, missing.json()["error"]["unknown_digests"]) == (409, digests[:1])
    explained = httpx.post(fleet.url + "/rerank", json=body | {"explain": True}, timeout=600)
    assert explained.status_code == 400, "no engine has all"
    body["documents"][0] = texts[0]
    bodies = ((fleet, body), (colbert_server, body | {"documents": texts}))
    answers = [httpx.post(server.url + "/rerank", json=each, timeout=600).json() for server, each in bodies]
    assert answers[0]["usage"]["prompt_tokens_details"]["cached_documents"] == len({*texts}) - 1
    scores = [[each["relevance_score"] for each in answer["results"]] for answer in answers]
    assert scores[0] == pytest.approx(scores[1], rel=1e-6, abs=1e-5)


@pytest.fixture(scope="module")
def right(colbert_server: Server) -> dict[str, float]:
    return right_scores(colbert_server.url, DOCUMENTS)


@pytest.fixture
def clients(fleet: Server, right: dict[str, float]) -> Clients:
    return Clients(fleet.url, right)


def test_an_engine_that_is_killed_loses_nothing(fleet: Server, clients: Clients) -> None:
    with clients.asking():
        time.sleep(0.5)
        engines = _children(fleet)["replica"]
        os.kill(engines[0], signal.SIGKILL)
        wait_for(lambda: len({*_children(fleet)["replica"]} - {*engines}) == 1)
        wait_for(lambda: _num_engines(fleet) == 2)
    clients.check()


def test_an_engine_that_is_stopped_loses_nothing_and_returns(fleet: Server, clients: Clients) -> None:
    stopped = _children(fleet)["replica"][0]
    os.kill(stopped, signal.SIGSTOP)
    try:
        with clients.asking():
            wait_for(lambda: _num_engines(fleet) == 1)
            cleared = httpx.delete(fleet.url + "/cache", timeout=600)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert cleared.status_code == 503
    assert "the cache is not cleared yet by replica " in cleared.json()["error"]["message"]
    clients.check()
    wait_for(lambda: _num_engines(fleet) == 2)
    assert stopped in _children(fleet)["replica"], "it was not killed"
    wait_for(lambda: httpx.delete(fleet.url + "/cache", timeout=600).status_code == 204)


def test_a_front_that_is_killed_loses_only_its_own_requests(fleet: Server, clients: Clients) -> None:
    wait_for(lambda: _num_fronts(fleet) == 2)
    with clients.asking():
        time.sleep(1)
        fronts = _children(fleet)["front"]
        os.kill(fronts[0], signal.SIGKILL)
        wait_for(lambda: len(set(_children(fleet)["front"]) - set(fronts)) == 1)
        time.sleep(1)
    clients.check(most_failed=8)
    assert fleet.process.poll() is None


def test_all_processes_show_their_stacks(fleet: Server) -> None:
    wait_for(lambda: _num_engines(fleet) == 2)
    wait_for(lambda: _num_fronts(fleet) == 2)
    fleet.process.send_signal(signal.SIGUSR1)
    wait_for(lambda: fleet.log.count("Current thread") == 5)


def test_a_fleet_finishes_its_work_and_then_ends(fleet: Server) -> None:
    wait_for(lambda: _num_engines(fleet) == 2)
    processes = [pid for pids in _children(fleet).values() for pid in pids]
    assert len(processes) >= 3
    restarts = fleet.log.count("is started again")
    with ThreadPoolExecutor() as threads:
        documents = [f"{i} {text}" for i in range(40) for text in DOCUMENTS]
        body = {"query": "a list", "documents": documents, "cache": "bypass"}
        asked = threads.submit(httpx.post, fleet.url + "/rerank", json=body, timeout=600)
        wait_for(lambda: fleet.metric("maxsimd_queue_tokens") > 0)
        for pid in (*processes, fleet.process.pid):  # as service managers do
            os.kill(pid, signal.SIGINT)
        assert fleet.process.wait(600) == 0
        assert asked.result().status_code == 200, "what is in flight is finished"
    assert not [pid for pid in processes if os.path.exists(f"/proc/{pid}")]
    assert fleet.log.count("is started again") == restarts


@pytest.mark.one_process
def test_a_front_that_connects_ends_without_a_traceback(tmp_path: Path) -> None:
    given, log, own, engine = (tmp_path / name for name in ("given", "log", "front-0", "engine-0"))
    os.mkfifo(given)
    engine.touch()  # nobody listens there
    log.touch()
    setup = Setup(True, 0, (str(engine),), (str(own),), (), EngineConfig(), ServerConfig(), b"")
    with open(os.open(given, os.O_RDWR), "wb", buffering=0) as writing:
        writing.write(setup.encoded())
        front = Program(["front", "0"], module="maxsimd.api.fleet.process").start(log, given=given)
        wait_for(own.exists)
        time.sleep(0.3)
        assert front.poll() is None
        front.send_signal(signal.SIGINT)
        assert front.wait(600) == 0, log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.exhaustive
@pytest.mark.one_process
def test_a_fleet_that_drains_accepts_work(start_server: StartServer) -> None:
    draining = start_server("--dtype", "float32", "--replicas", "2", "--drain-seconds", "10")
    draining.process.send_signal(signal.SIGTERM)
    wait_for(lambda: httpx.get(draining.url + "/ready").json()["status"] == "draining")
    body = {"query": "a list", "documents": DOCUMENTS}
    assert httpx.post(draining.url + "/rerank", json=body, timeout=600).status_code == 200
    assert draining.process.wait(600) == 0


@pytest.mark.exhaustive
@pytest.mark.one_process  # other servers have a front more
def test_the_only_front_returns_and_ends_with_its_parent(start_server: StartServer, server: Server) -> None:
    alone = start_server("--dtype", "float32", "--replicas", "2")
    clients = Clients(alone.url, right_scores(server.url, DOCUMENTS))
    with clients.asking():
        (front,) = _children(alone)["front"]
        os.kill(front, signal.SIGKILL)
        wait_for(lambda: alone.log.count("all-MiniLM-L6-v2 is ready after") == 2)
    clients.check(most_failed=8)
    assert not any("503" in reason for reason in clients.failed)
    processes = [pid for pids in _children(alone).values() for pid in pids]
    assert len(processes) == 3
    alone.process.kill()
    alone.process.wait()
    wait_for(lambda: not [pid for pid in processes if os.path.exists(f"/proc/{pid}")])
