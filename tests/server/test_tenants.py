"""Tenants of a real server: one rate for all their keys, in metrics of their own."""

import time

import httpx
import pytest

from tests.server.conftest import Server, StartServer

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


@pytest.fixture(scope="module")
def server(
    module_starter: StartServer, tmp_path_factory: pytest.TempPathFactory, bert_cross_encoder: str
) -> Server:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(KEYS)
    return module_starter(bert_cross_encoder, "--dtype", "float32", "--api-key-file", str(file))


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _metrics(server: Server) -> dict[str, float]:
    page = httpx.get(server.url + "/metrics", headers=_headers("operators-key"), timeout=30).text
    lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def _post(server: Server, key: str) -> httpx.Response:
    body = {"query": "q", "documents": ["d"]}
    return httpx.post(server.url + "/rerank", json=body, headers=_headers(key), timeout=60)


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
