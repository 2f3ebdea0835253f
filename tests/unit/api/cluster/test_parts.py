"""Parts of an application on Ray Serve, without Ray: configuration, ASGI, scaling, YAML."""

import asyncio
import gzip
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
import yaml
from click.testing import CliRunner

from maxsimd.api.answer import Answer
from maxsimd.api.cli import main
from maxsimd.api.cluster import asgi, cli, session
from maxsimd.api.cluster.asgi import AsgiAdapter
from maxsimd.api.cluster.config import AppConfig
from maxsimd.api.cluster.scaling import OwnSlot, QueuedTokensPolicy
from maxsimd.api.config import SetupError
from maxsimd.api.fleet.fleet_engine import FleetEngine, check_limits
from maxsimd.api.fleet.link import NetAddress
from maxsimd.api.fleet.roster import Listed, Roster
from maxsimd.api.state import ServerState
from maxsimd.engine.tenants import Tenant


def test_a_configuration_survives_or_is_refused() -> None:
    arguments = {"model": "a/b", "replicas": 3, "num_cpus": 2, "served_model_name": ["x", "y"], "dtype": None}
    config = AppConfig.of(arguments)
    assert (config.engine.model, config.cluster.replicas) == ("a/b", 3)
    assert config.server.served_model_name == ("x", "y")
    assert config.engine.threads == 2, "Ray has libraries run on one thread otherwise"
    assert AppConfig.of(config.arguments()) == config
    for arguments, message in (
        ({"nonsense": 1}, "there is no option nonsense"),
        ({"port": 1, "tls_key": "k"}, "port, tls_key: Ray controls this"),
        ({"replicas": 0}, "replicas must be at least 1"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas must be at least"),
        ({"dtype": "float33"}, "dtype"),
        ({"grpc_port": 1}, "grpc_port: Ray's proxies pass only HTTP on"),
    ):
        with pytest.raises(ValueError, match=message):
            AppConfig.of(arguments)


def _wanted(queued: Sequence[float], rates: Sequence[float], busy: Sequence[float], target: int = 2) -> int:
    figures = {"queued_tokens": queued, "tokens_per_second": rates, "busy": busy}
    metrics = {name: dict(enumerate(values)) for name, values in figures.items()}
    context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=target)
    return QueuedTokensPolicy(wanted_seconds=2.0)(context)[0]


def test_as_many_scorers_are_wanted_as_finish_what_waits_in_time() -> None:
    assert _wanted([30_000, 30_000], [10_000, 10_000], [1.0, 1.0]) == 3
    assert _wanted([0, 0, 0], [10_000] * 3, [0.1, 0.1, 0.1]) == 1
    assert _wanted([0, 0, 0], [10_000] * 3, [0.6, 0.6, 0.6]) == 3, "none is to work all of the time"
    assert _wanted([5_000], [0.0], [1.0]) == 2, "no speed has been measured: by how busy it is"
    assert _wanted([], [], [], target=4) == 4, "nothing has been heard"


class _Asked:
    """Takes the place of the handlers, and notes what they were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.body = "", b""
        self.headers: dict[str, str] = {}
        monkeypatch.setattr(asgi, "handle", self._handle)

    async def _handle(self, state: Any, method: str, path: str, headers: Any, body: Any, sink: Any) -> Answer:
        self.path, self.headers = path, headers
        self.body = b"".join([chunk async for chunk in body])
        return Answer(200, {"X-Request-Id": "ours", "Content-Type": "text/plain"}, b"four")

    async def ask(self, messages: Sequence[dict[str, Any]], **scope: Any) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        receive, send = AsyncMock(side_effect=messages), AsyncMock(side_effect=sent.append)
        whole = {"type": "http", "method": "POST", "path": "/", "headers": [], **scope}
        await AsgiAdapter(cast("ServerState", None))(whole, receive, send)
        return sent


_NO_BODY = [{"type": "http.request", "body": b""}]


async def test_requests_of_asgi_reach_the_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _Asked(monkeypatch)
    for raw, root, path in (
        *((b"/rerank", "", "/rerank"), (b"/app/rerank?a=b", "/app", "/rerank")),
        (b"/app/v1/models/a%2Fb%20c", "/app", "/v1/models/a%2Fb c"),
        *((b"/application", "/app", "/application"), (b"/app", "/app", "/")),
    ):
        await asked.ask(_NO_BODY, raw_path=raw, root_path=root)
        assert asked.path == path
    packed = gzip.compress(b"some words")
    pieces = [_NO_BODY[0] | {"body": packed[:9], "more_body": True}, _NO_BODY[0] | {"body": packed[9:]}]
    headers = [(b"Content-Encoding", b"gzip"), (b"X-Twice", b"first"), (b"x-twice", b"second")]
    start, body = await asked.ask(pieces, headers=headers)
    assert (asked.body, asked.headers["x-twice"]) == (b"some words", "first")
    assert (start["status"], body["body"]) == (200, b"four")
    assert dict(start["headers"]) == {b"content-type": b"text/plain", b"content-length": b"4"}
    start, body = await _Asked(monkeypatch).ask(_NO_BODY, method="HEAD")
    assert (dict(start["headers"])[b"content-length"], body["body"]) == (b"4", b"")
    with pytest.raises(asyncio.CancelledError):
        await _Asked(monkeypatch).ask([{"type": "http.disconnect"}])


def test_the_yaml_has_what_the_application_is_built_from() -> None:
    def printed(*options: str) -> Any:
        result = CliRunner().invoke(main, ["cluster", "config", "a/b", "--replicas", "2", *options])
        return yaml.safe_load(result.output)

    def numbers(of: Any) -> dict[str, int]:
        return {each["name"]: each["num_replicas"] for each in of["applications"][0]["deployments"]}

    most = ("--max-replicas", "5")
    plain, service = printed(*most), printed(*most, "--kuberay", "--image", "i")
    assert AppConfig.of(plain["applications"][0]["args"]).cluster.max_replicas == 5
    assert (service["kind"], yaml.safe_load(service["spec"]["serveConfigV2"])) == ("RayService", plain)
    workers = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (2, 5)
    # How many replicas there are can be changed beside the arguments, unless Serve chooses.
    assert numbers(printed("--fronts", "2")) == {"Front": 2, "Scorer": 2}
    assert "Scorer" not in numbers(plain)


def test_a_scorer_stays_with_its_slot_where_ranks_change() -> None:
    here, there = (NetAddress("127.0.0.1", port, "00") for port in (1, 2))
    slot = OwnSlot()
    slot.set_listed([Listed(1, there)])
    slot.choose(1, here)
    assert slot.number == 0, "the other has the slot of its rank"
    slot.set_listed([Listed(1, there)])
    slot.set_listed([Listed(7, here), Listed(1, there)])
    assert slot.number == 0, "what is listed of itself is old"
    slot.set_listed([Listed(0, there), Listed(0, here)])
    other = OwnSlot()
    other.choose(0, there)
    other.set_listed([Listed(0, there), Listed(0, here)])
    assert {slot.number, other.number} == {0, 1}, "of two that have one slot by chance one changes"


async def test_limits_of_tenants_need_a_single_scorer(caplog: pytest.LogCaptureFixture) -> None:
    roster = Roster(most=1)
    engine = FleetEngine(roster)
    limited, unlimited = {"a": Tenant(weight=2, requests_per_minute=5)}, {"a": Tenant(weight=2)}
    check_limits(limited, 1)
    with pytest.raises(SetupError, match="'a' has limits"):
        check_limits(limited, 2)
    engine.set_tenants(limited)
    listed = [Listed(slot, NetAddress("127.0.0.1", slot + 1, "00")) for slot in range(2)]
    given = []
    for count in (1, 2, 2, 1):
        engine.set_listed(listed[:count])
        given.append(roster.tenants)
    assert given == [limited, unlimited, unlimited, limited]
    assert "'a' has limits" in caplog.text
    await engine.stop()


def test_keys_of_the_environment_are_asked_for_and_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "require_ray", lambda: None)  # importing it takes seconds
    written = CliRunner().invoke(main, ["cluster", "config", "a/b", "--api-key", "secret"])
    assert (written.exit_code, "give --api-key-file" in written.output) == (2, True), written.output
    assert "secret" not in written.output
    configs: list[AppConfig] = []
    monkeypatch.setattr(session, "run", lambda config, *others: configs.append(config))
    result = CliRunner().invoke(main, ["cluster", "serve"], env={"MAXSIMD_API_KEY": "one, two"})
    assert result.exit_code == 0, result.output
    assert configs[0].server.api_key == ("one", "two")
