"""Tenants of a real server: shares by weight, rates, batches, and a file of keys that changes meanwhile."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import Server, StartServer
from tests.waiting import wait_for

pytestmark = pytest.mark.one_process

KEYS = """\
light-key name=light
heavy-key name=heavy weight=3
old-search-key name=search requests_per_minute=12
new-search-key name=search
nightly-key name=nightly priority=batch max_request_tokens=60000
operators-key
"""
BODY = {"query": "q", "documents": ["d"]}
# Of a tenant, so that some wait at the server while its client takes an answer and sends the next.
_AT_ONCE = 6


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(KEYS)
    return file


@pytest.fixture(scope="module")
def server(module_starter: StartServer, key_file: Path, bert_cross_encoder: str) -> Server:
    """Small steps, so that tenants are served in turn often."""
    arguments = (
        "--dtype",
        "float32",
        "--max-batch-tokens",
        "512",
        "--max-wait-seconds",
        "600",
        "--cache-mb",
        "0",
    )
    server = module_starter(bert_cross_encoder, *arguments, "--api-key-file", str(key_file), ready=False)
    server.wait_until_ready()
    return server


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _metrics(server: Server) -> dict[str, float]:
    page = httpx.get(server.url + "/metrics", headers=_headers("operators-key"), timeout=30).text
    lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def _post(server: Server, key: str, **options: Any) -> httpx.Response:
    return httpx.post(server.url + "/rerank", json={**BODY, **options}, headers=_headers(key), timeout=60)


async def _shares_while_busy(
    server: Server, senders: tuple[tuple[str, dict[str, Any]], ...], measured: Callable[[], Awaitable[float]]
) -> float:
    """What is measured while each sender, a key with options, always has requests waiting there."""
    documents = [f"{i} " + "word " * 60 for i in range(100)]

    async with httpx.AsyncClient(timeout=120) as client:

        async def send(key: str, options: dict[str, Any]) -> None:
            while True:
                body = {"query": "q", "documents": documents, "return_documents": False, **options}
                response = await client.post(server.url + "/rerank", json=body, headers=_headers(key))
                assert response.status_code == 200, response.text

        sending = [asyncio.create_task(send(*sender)) for sender in senders for _ in range(_AT_ONCE)]
        try:
            value = await measured()
            assert not [task for task in sending if task.done()]
            return value
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)


def _ratio(server: Server, first: str, second: str, enough: int = 20_000) -> Callable[[], Awaitable[float]]:
    """Measures how many times the tokens of the first tenant are run of the second, over `enough` in all."""

    async def tokens() -> tuple[float, float]:
        page = await asyncio.to_thread(_metrics, server)
        one, other = (
            page.get(f'maxsimd_tenant_tokens_total{{tenant="{tenant}"}}', 0.0) for tenant in (first, second)
        )
        return one, other

    async def measured() -> float:
        async with asyncio.timeout(90):
            before = await tokens()
            while any(now <= then for now, then in zip(await tokens(), before, strict=True)):
                await asyncio.sleep(0.05)  # until both are being served
            first_before, second_before = await tokens()
            while True:
                await asyncio.sleep(0.1)
                now = await tokens()
                if sum(now) - first_before - second_before >= enough:
                    return (now[1] - second_before) / (now[0] - first_before)

    return measured


@pytest.mark.exhaustive
def test_tenants_share_a_busy_server_by_their_weights(server: Server) -> None:
    senders = (("light-key", {}), ("heavy-key", {}))
    ratio = asyncio.run(_shares_while_busy(server, senders, _ratio(server, "light", "heavy", 60_000)))
    assert 2.6 < ratio < 3.4, "about 3"


def test_batches_take_what_others_leave_whatever_they_ask_for(server: Server) -> None:
    senders = (("nightly-key", {"priority": "interactive"}), ("light-key", {}))
    ratio = asyncio.run(_shares_while_busy(server, senders, _ratio(server, "nightly", "light")))
    assert ratio > 2.5, "but the oldest request, which is theirs most of the time, gets its part"


def test_a_tenant_has_one_rate_for_all_its_keys(server: Server) -> None:
    keys = ["old-search-key", "new-search-key"]
    answers = [_post(server, keys[0])]
    while answers[-1].status_code == 200:
        assert len(answers) < 500
        answers.append(_post(server, keys[len(answers) % 2]))
    assert len(answers) > 12
    refused = answers[-1]
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "RateLimitError"
    message = refused.json()["error"]["message"]
    assert "the tenant 'search' has used up the 12 requests that it has a minute" in message
    assert "have its requests_per_minute raised" in message
    seconds = int(refused.headers["Retry-After"])
    assert 1 <= seconds <= 5
    time.sleep(seconds)
    assert _post(server, keys[0]).status_code == 200, "the time was long enough"
    metrics = _metrics(server)
    assert metrics['maxsimd_refused_requests_total{reason="rate"}'] == 1
    name = 'maxsimd_tenant_refused_requests_total{reason="rate",tenant="search"}'
    assert metrics[name] == 1
    assert _post(server, "light-key").status_code == 200, "others are not concerned"


def test_a_request_may_be_too_large_for_its_tenant(server: Server) -> None:
    documents = [f"{i} " + "word " * 60 for i in range(1000)]
    refused = _post(server, "nightly-key", documents=documents)
    assert refused.status_code == 413
    assert "have max_request_tokens of the tenant 'nightly' raised" in refused.json()["error"]["message"]


def test_metrics_name_only_tenants_of_the_file(server: Server) -> None:
    assert _post(server, "operators-key").status_code == 200
    labels = {name.split('tenant="')[1].split('"')[0] for name in _metrics(server) if 'tenant="' in name}
    assert labels <= {"light", "heavy", "search", "nightly", "other"}
    assert "other" in labels


def test_a_file_that_changes_counts_at_once(server: Server, key_file: Path) -> None:
    assert _post(server, "new-key").status_code == 401
    key_file.write_text(KEYS.replace("name=heavy weight=3", "name=heavy weight=0.2") + "new-key name=heavy\n")
    wait_for(lambda: _post(server, "new-key").status_code == 200)
    senders = (("light-key", {}), ("new-key", {}))
    ratio = asyncio.run(_shares_while_busy(server, senders, _ratio(server, "heavy", "light")))
    assert ratio > 2, "about 5, but for the part of the oldest"
    key_file.write_text(KEYS + "sk-t0p-s3cret weight=heavy\n")
    wait_for(
        lambda: _post(server, "new-key").status_code != 200 or "keys read before stay in use" in server.log
    )
    assert "line 7: weight must be a number" in server.log
    assert _post(server, "new-key").status_code == 200, "the keys that were read before stay"
    assert "s3cret" not in server.log
