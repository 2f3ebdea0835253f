"""Tenants of a real server: shares by weight, rates, and a file of keys that changes meanwhile."""

import asyncio
import time
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
schlüssel name=light
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
    return module_starter(
        *(bert_cross_encoder, "--dtype", "float32", "--cache-mb", "0", "--api-key-file", str(key_file)),
        *("--max-batch-tokens", "512", "--max-wait-seconds", "600"),
    )


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _metrics(server: Server) -> dict[str, float]:
    page = httpx.get(server.url + "/metrics", headers=_headers("operators-key"), timeout=30).text
    lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def _post(server: Server, key: str, **options: Any) -> httpx.Response:
    return httpx.post(server.url + "/rerank", json={**BODY, **options}, headers=_headers(key), timeout=60)


async def _ratio(server: Server, first: str, second: str, keys: dict[str, str]) -> float:
    """How many times the tokens of the first tenant are run of the second, while each has requests."""
    documents = [f"{i} " + "word " * 60 for i in range(100)]
    body = {"query": "q", "documents": documents, "return_documents": False}

    async def tokens() -> list[float]:
        page = await asyncio.to_thread(_metrics, server)
        return [page.get(f'maxsimd_tenant_tokens_total{{tenant="{each}"}}', 0.0) for each in (first, second)]

    async with httpx.AsyncClient(timeout=120) as client:

        async def send(key: str) -> None:
            while True:
                answer = await client.post(server.url + "/rerank", json=body, headers=_headers(key))
                assert answer.status_code == 200, answer.text

        senders = (keys[first], keys[second])
        sending = [asyncio.create_task(send(key)) for key in senders for _ in range(_AT_ONCE)]
        try:
            async with asyncio.timeout(90):
                before = await tokens()
                while any(now <= then for now, then in zip(await tokens(), before, strict=True)):
                    await asyncio.sleep(0.05)  # until both are being served
                before = now = await tokens()
                while sum(now) - sum(before) < 20_000:
                    await asyncio.sleep(0.1)
                    now = await tokens()
            assert not [task for task in sending if task.done()]
            return (now[1] - before[1]) / (now[0] - before[0])
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)


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
    name = 'maxsimd_tenant_refused_requests_total{reason="rate",tenant="search"}'
    assert _metrics(server)[name] == 1
    assert _post(server, "operators-key").status_code == 200, "others are not concerned"
    labels = {name.split('tenant="')[1].split('"')[0] for name in _metrics(server) if 'tenant="' in name}
    assert "other" in labels
    assert labels <= {"light", "heavy", "search", "nightly", "other"}


def test_keys_are_compared_byte_by_byte(server: Server) -> None:
    for key, status in ((b"schl\xc3\xbcssel", 204), (b"schl\xfcssel", 401), (b"schl", 401)):
        asked = httpx.delete(server.url + "/cache", headers=[(b"Authorization", b"Bearer " + key)])
        assert asked.status_code == status, key


def test_a_file_that_changes_counts_at_once(server: Server, key_file: Path) -> None:
    assert _post(server, "new-key").status_code == 401
    key_file.write_text(KEYS.replace("name=heavy weight=3", "name=heavy weight=0.2") + "new-key name=heavy\n")
    wait_for(lambda: _post(server, "new-key").status_code == 200)
    keys = {"heavy": "new-key", "light": "light-key"}
    ratio = asyncio.run(_ratio(server, "heavy", "light", keys))
    assert ratio > 2, "about 5, but for the part of the oldest"
    key_file.write_text(KEYS + "sk-t0p-s3cret weight=heavy\n")
    wait_for(
        lambda: _post(server, "new-key").status_code != 200 or "keys read before stay in use" in server.log
    )
    assert "line 8: weight must be a number" in server.log
    assert _post(server, "new-key").status_code == 200, "the keys that were read before stay"
    assert "s3cret" not in server.log
