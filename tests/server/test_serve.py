"""The life of the server in this process: where it listens, how it drains, and with which status it ends."""

import asyncio
import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
import uvloop
from aiohttp import web
from prometheus_client import CollectorRegistry

from maxsimd.api import media
from maxsimd.api import serve as life
from maxsimd.api.answer import Answer
from maxsimd.api.config import ServerConfig
from maxsimd.api.http.connections import Connection, ConnectionTable, Listener, as_response
from maxsimd.api.http.sockets import open_sockets, tls_context
from maxsimd.api.process import Stop
from maxsimd.api.state import ServerMetrics
from maxsimd.engine import Engine, EngineConfig
from tests.engines import held_steps
from tests.server.conftest import free_port
from tests.waiting import until

LIGHT = {"query": "q", "documents": ["d"]}


class Serving:
    def __init__(self, url: str, status: asyncio.Task[int], engine: Engine, verify: Any) -> None:
        self.url, self.status, self.engine = url, status, engine
        self.client = httpx.AsyncClient(base_url=url, timeout=600, verify=verify)
        self._is_told = False

    def terminate(self) -> None:
        """Sends SIGTERM once: a second would end this process."""
        if not self._is_told:
            self._is_told = True
            os.kill(os.getpid(), signal.SIGTERM)

    async def is_ready(self) -> bool:
        assert not self.status.done()
        try:
            return (await self.client.get("/ready")).status_code == 200
        except httpx.TransportError:
            return False


@asynccontextmanager
async def serving(model: str | None = None, **options: Any) -> AsyncIterator[Serving]:
    engine = Engine(EngineConfig(model=model, dtype="float32", threads=1, max_batch_tokens=512))
    options = {"host": "127.0.0.1", "port": free_port(), "drain_seconds": 0.0} | options
    config = ServerConfig(**options)
    status = asyncio.create_task(life.run_server(engine, config, time.perf_counter()))
    await asyncio.sleep(0)
    scheme, verify = "http", False
    if config.tls_cert is not None:
        scheme, verify = "https", ssl.create_default_context(cafile=config.tls_cert)
    running = Serving(f"{scheme}://{config.host}:{config.port}", status, engine, verify)
    try:
        async with asyncio.timeout(600):
            while not await running.is_ready():
                await asyncio.sleep(0.05)
        yield running
    finally:
        await running.client.aclose()
        if not status.done():
            running.terminate()
        await asyncio.wait_for(status, 600)


async def test_a_server_listens_until_drained(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    caplog.set_level(logging.INFO, logger="maxsimd.serve")
    stops: list[Stop] = []
    monkeypatch.setattr(life, "Stop", lambda *given: stops.append(Stop(*given)) or stops[0])
    async with serving(host="127.0.0.2", drain_seconds=600.0) as server:
        assert server.url.startswith("http://127.0.0.2:")
        body = {"query": "q", "documents": [f"{i} " + "word " * 240 for i in range(8)]}
        # A connection that stays open, and so gets through to a server that no longer listens.
        async with httpx.AsyncClient(base_url=server.url, timeout=600) as other:
            assert (await other.post("/rerank", json=LIGHT)).status_code == 200
            with pytest.raises(httpx.ConnectError):
                await other.get(server.url.replace("127.0.0.2", "127.0.0.1") + "/health")
            server.terminate()
            await asyncio.wait_for(stops[0].signaled(), 600)
            async with httpx.AsyncClient(base_url=server.url) as late:
                probe = await late.get("/ready")
            assert (probe.status_code, probe.json()) == (503, {"status": "draining"})
            assert probe.headers["Connection"] == "close"
            with held_steps(server.engine):
                heavy = asyncio.create_task(server.client.post("/rerank", json=body))
                queued = server.engine.metrics.registry.get_sample_value
                await until(lambda: queued("maxsimd_queue_tokens") != 0)
                stops[0]._drained.set()
                await asyncio.sleep(0.05)
                refused = await other.post("/rerank", json=LIGHT)
        assert (refused.status_code, refused.headers["Connection"]) == (503, "close")
        async with httpx.AsyncClient() as late:
            with pytest.raises(httpx.ConnectError):
                await late.get(server.url + "/health")
        answer = await heavy
        assert (answer.status_code, len(answer.json()["results"])) == (200, 8)
        assert answer.headers["Connection"] == "close"
        assert await asyncio.wait_for(server.status, 600) == 0
        assert not server.engine.is_healthy
    assert any(message.startswith("all-MiniLM-L6-v2 is ready after ") for message in caplog.messages)
    assert f"{server.url}/" in caplog.messages
    assert caplog.messages[-1] == "stopped"


async def test_a_dead_engine_ends_it(caplog: pytest.LogCaptureFixture, bert_cross_encoder: str) -> None:
    async with serving(bert_cross_encoder, host="0.0.0.0") as server:
        assert "can use it; set --api-key or --api-key-file" in caplog.text
        server.engine._died("of old age", None)
        assert await asyncio.wait_for(server.status, 600) == 1


async def _refusal(caplog: pytest.LogCaptureFixture, model: str | None = None, **options: Any) -> str:
    """The one line of a server that does not start, with status 1."""
    config = ServerConfig(**{"port": free_port()} | options)
    assert await life.run_server(Engine(EngineConfig(model=model)), config, time.perf_counter()) == 1
    (record,) = [record for record in caplog.records if record.name == "maxsimd.serve"]
    assert record.levelno == logging.ERROR
    assert record.exc_info is None
    return record.getMessage()


async def test_a_bad_load_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no folder '/nowhere/at/all'" in await _refusal(caplog, "/nowhere/at/all")
    caplog.clear()
    monkeypatch.setattr(Engine, "start", AsyncMock(side_effect=AttributeError("no such thing")))
    line = await _refusal(caplog)
    assert line == "the model cannot be loaded: AttributeError: no such thing (--log-level debug says where)"


async def test_a_port_in_use_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = await _refusal(caplog, port=port)
    assert line.startswith(f"cannot listen on 127.0.0.1, port {port}: address already in use; choose another")


def test_all_addresses_of_ipv6_take_ipv4_too() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6")
    for host, asked in (("::", "127.0.0.1"), ("::", "::1"), ("::1", "::1")):
        (listening,) = open_sockets(host, 0)
        with listening, socket.create_connection((asked, listening.getsockname()[1])):
            pass


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"host": "no.such.host.invalid"}, "cannot listen on no.such.host.invalid, port"),
        ({"api_key_file": "/"}, "cannot read keys from '/': Is a directory; give a readable file"),
        ({"tls_cert": "/nowhere"}, "cannot read --tls-cert '/nowhere': No such file or directory"),
        ({"tls_cert": __file__}, f"cannot use --tls-cert {__file__!r}: no pem; give a certificate chain"),
        ({"allowed_media_host": ("http://",)}, "--allowed-media-host: 'http://' names no host"),
        ({"allowed_media_dir": "/no/such/folder"}, "--allowed-media-dir /no/such/folder is no folder"),
        ({"max_connections": 10**9}, "--limit max_connections=1000000000 is more than the "),
    ],
)
async def test_a_wrong_set_up_is_one_line(caplog: pytest.LogCaptureFixture, options: Any, line: str) -> None:
    assert (await _refusal(caplog, **options)).startswith(line)


async def test_a_media_folder_needs_proc(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(media, "_OPEN_FILES", Path("/no/proc"))
    assert "needs /no/proc" in await _refusal(caplog, allowed_media_dir="/")


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    files = str(folder / "cert.pem"), str(folder / "key.pem")
    command = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=x -addext subjectAltName=DNS:localhost"
    _openssl(*command.split(), "-out", files[0], "-keyout", files[1])
    return files


async def test_a_certificate_means_https_alone(certificate: tuple[str, str], bert_cross_encoder: str) -> None:
    cert, key = certificate
    options = {"tls_cert": cert, "tls_key": key, "header_seconds": 0.5, "host": "localhost"}
    async with serving(bert_cross_encoder, **options) as server:
        assert (await server.client.post("/rerank", json=LIGHT)).status_code == 200
        async with httpx.AsyncClient() as other:
            with pytest.raises(httpx.TransportError):
                await other.get(server.url.replace("https", "http") + "/health")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        assert await asyncio.wait_for(reader.read(), 600) == b""
        writer.close()


def test_a_client_that_does_not_read_is_noticed_behind_tls_too(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    config = ServerConfig(tls_cert=cert, tls_key=key, transfer_seconds=0.3)
    metrics = ServerMetrics(CollectorRegistry())

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request.protocol, Connection)
        request.protocol.begin(request)
        # More than fits into the system's buffers.
        return as_response(Answer(200, {}, bytes(30_000_000)), request)

    async def ask_and_read_nothing() -> None:
        table = ConnectionTable(config, 10, metrics)
        listener = Listener(web.Server(answer), table, tls_context(config))
        listener.start(open_sockets("127.0.0.1", 0))
        trusting = ssl.create_default_context(cafile=cert)
        _, writer = await asyncio.open_connection("localhost", listener.port, ssl=trusting, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: metrics.cut_connections.labels("slow_reader")._value.get() == 1)
        writer.transport.abort()
        listener.close()

    # As the server runs: other event loops have other buffers.
    uvloop.run(ask_and_read_nothing())


async def test_a_key_that_is_another_certificates_is_one_line(
    caplog: pytest.LogCaptureFixture, certificate: tuple[str, str], tmp_path: Path
) -> None:
    cert, _ = certificate
    other = tmp_path / "other.pem"
    _openssl("genrsa", "-out", str(other), "2048")
    line = await _refusal(caplog, tls_cert=cert, tls_key=str(other))
    assert line.endswith("key values mismatch; give a certificate chain and its own key")
    caplog.clear()
    locked = tmp_path / "locked.pem"
    _openssl("rsa", "-aes256", "-passout", "pass:x", "-in", str(other), "-out", str(locked))
    assert "has a password" in await _refusal(caplog, tls_cert=cert, tls_key=str(locked))
