"""Real servers: processes of their own on a free port, always stopped."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.forked import Forked, Program


@dataclass
class Server:
    url: str
    process: "subprocess.Popen[bytes] | Forked"
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def metric(self, name: str) -> float:
        """The sum over all processes of the server."""
        lines = httpx.get(self.url + "/metrics", timeout=600).text.splitlines()
        values = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        process, names = re.compile(r'(?<={)(front|replica)="\d+",?'), (name, f"{name}{{}}")
        return sum(float(value) for sample, value in values if process.sub("", sample) in names)

    def wait_until_ready(self, seconds: float | None = None) -> None:
        deadline = time.monotonic() + (_READY_SECONDS if seconds is None else seconds)
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended:\n{self.log}"
            try:
                # Each connection may reach another front.
                if all(httpx.get(self.url + "/ready").status_code == 200 for _ in range(10 if FLEET else 1)):
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"the server did not become ready:\n{self.log}")

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=_END_SECONDS)


# With MAXSIMD_FLEET=2x2 in the environment, servers in tests are two fronts and two engines; with
# MAXSIMD_FLEET=ray they are a front and two scorers on Ray.
FLEET = os.environ.get("MAXSIMD_FLEET", "")
ON_RAY = FLEET == "ray"
_READY_SECONDS, _END_SECONDS = (300.0, 180.0) if ON_RAY else (120.0, 60.0)


def _serve(arguments: Sequence[str], special: bool) -> list[str]:
    """The arguments that start a server. Skips the test where Ray would have no such server."""
    if not FLEET:
        return ["serve", *arguments]
    if not ON_RAY:
        fronts, replicas = FLEET.split("x")
        return ["serve", *arguments, "--fronts", fronts, "--replicas", replicas]
    pytest.importorskip("ray")
    from maxsimd.api.cluster.config import RAYS_OWN

    options = {each.removeprefix("--").partition("=")[0].replace("-", "_") for each in arguments}
    if special or options & RAYS_OWN:
        pytest.skip("connections and processes are Ray's own there")
    return ["cluster", "serve", *arguments, "--replicas", "2"]


StartServer = Callable[..., Server]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def installed_command() -> str:
    beside = Path(sys.executable).parent / "maxsimd"
    return str(beside) if beside.exists() else shutil.which("maxsimd") or "maxsimd"


class QuietHandler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def web_server(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.serve_forever)
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def starter(folder: Path) -> Iterator[StartServer]:
    """Gives what starts servers that have their logs in a folder, and stops them."""
    servers: list[Server] = []

    def start(
        *arguments: str, ready: bool = True, installed: bool = False, environment: Any = None,
        program: Sequence[str] = (), **special: Any,
    ) -> Server:  # fmt: skip
        """Starts the command, or a `program` in its place. `special` goes to `Program`: a `file` to run
        instead, the most `descriptors`, and a function that its process calls `before`."""
        port = free_port()
        environment = {"MAXSIMD_DRAIN_SECONDS": "0"} | (environment or {})
        is_special = bool(program) or any(special.values())
        words = [*_serve(arguments, is_special), "--host", "127.0.0.1", "--port", str(port)]
        log_file = folder / f"server-{port}.log"
        process: subprocess.Popen[bytes] | Forked
        if ON_RAY or installed or program:
            command = [*(program or [installed_command()]), *words]
            variables = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
            with log_file.open("wb") as log:
                process = subprocess.Popen(command, stderr=log, stdout=log, env=variables)
        else:
            log_file.touch()
            process = Program(words, environment=environment, **special).start(log_file)
        server = Server(f"http://127.0.0.1:{port}", process, log_file)
        servers.append(server)
        if ready:
            server.wait_until_ready()
        return server

    try:
        yield start
    finally:
        for server in servers:
            if server.process.poll() is None:
                if ON_RAY:
                    server.terminate()  # which ends the processes of Ray, too
                server.process.kill()
                server.process.wait()


def slow_steps() -> None:
    """For `before`: each step takes a tenth of a second longer, so that a test can look in between."""
    from maxsimd.engine.actors.runner import RunnerActor

    attempt = RunnerActor._attempt

    async def slow(*given: Any) -> Any:
        time.sleep(0.1)  # noqa: ASYNC251 (it is the device that is busy)
        return await attempt(*given)

    RunnerActor._attempt = slow  # type: ignore[method-assign]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    yield from starter(tmp_path)


@pytest.fixture(scope="session")
def session_starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    yield from starter(tmp_path_factory.mktemp("servers"))


@pytest.fixture(scope="module")
def module_starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    yield from starter(tmp_path_factory.mktemp("servers"))


@pytest.fixture(scope="session")
def server(session_starter: StartServer) -> Server:
    """The default model in float32, shared by all tests that leave it as it is."""
    return session_starter("--dtype", "float32", "--max-documents", "500", "--max-body-mb", "1")


@pytest.fixture(scope="session")
def strict_server(session_starter: StartServer, bert_cross_encoder: str) -> Server:
    """It waits for nobody for longer than 1.5 s, and for no fewer than 500 bytes a second."""
    return session_starter(
        *(bert_cross_encoder, "--max-body-mb", "8", "--log-level", "debug"),
        *("--limit", "header_seconds=0.5", "--limit", "idle_seconds=1.5"),
        *("--limit", "transfer_seconds=1", "--limit", "min_bytes_per_second=500"),
    )


@pytest.fixture(scope="session")
def cross_encoder_server(session_starter: StartServer, bert_cross_encoder: str) -> Server:
    return session_starter(bert_cross_encoder, "--dtype", "float32", "--served-model-name", "reranker")


@pytest.fixture(scope="session")
def colbert_server(session_starter: StartServer, stanford_colbert: str) -> Server:
    return session_starter(stanford_colbert, "--dtype", "float32")
