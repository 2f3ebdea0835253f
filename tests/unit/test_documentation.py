"""The README and the pages in docs/ say what is so."""

import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, generate_latest

from maxsimd.api.cli import main
from maxsimd.api.config import ServerConfig
from maxsimd.api.fleet.fleet_engine import FleetEngine
from maxsimd.api.fleet.roster import Roster
from maxsimd.api.handlers.handle import OPEN_ROUTES, PAGES, ROUTES
from maxsimd.api.keys import ATTRIBUTES, read_keys
from maxsimd.api.options import flag_with_collection, variable
from maxsimd.api.state import ServerState
from maxsimd.engine import Engine, EngineConfig
from maxsimd.engine.cache import ScoreCache
from maxsimd.engine.tenants import TenantMetrics
from tests.clients import page as clients
from tests.clients.catalogue import CLIENTS

ROOT = Path(__file__).parents[2]
ROOMS = ("api", "bench", "docs", "engine", "pooling", "scheduler", "tests")
README = (ROOT / "README.md").read_text(encoding="utf-8")
# The pages about maxsimd alone, which name no other programs' options.
_OF_OTHERS = {"comparison", "promises-compared", "clients"}
_PAGES = (*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/internals").glob("*.md"), ROOT / "SECURITY.md")
_DOCS = {path.stem: path.read_text(encoding="utf-8") for path in _PAGES}
_COMMANDS = re.compile(r"(?:`|```sh\n)(?:\.venv/bin/)?maxsimd ((?:bench )?[a-z][a-z-]*)")


def test_every_command_and_option_that_is_named_exists() -> None:
    helps = dict(_helps(main, []))
    commands = {command for page in (README, *_DOCS.values()) for command in _COMMANDS.findall(page)}
    assert {"serve", "rerank", "bench serve", "bench peers"} <= commands
    assert commands <= helps.keys()
    pages = [page for name, page in _DOCS.items() if name not in _OF_OTHERS]
    named = {option for page in pages for option in re.findall(r"`(--[a-z][\w-]+)", page)}
    assert len(named) > 40
    every = "".join(helps.values())
    assert not {option for option in named if not re.search(rf"{option}[ ,\n]", every)}
    fields = [*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig)]
    collected = {flag_with_collection(field.name) for field in fields if field.metadata["within"]}
    in_text = re.compile(r"--(?:limit|debug|model-option) \w+")
    held = {option for page in (README, *pages) for option in in_text.findall(page)}
    assert len(held) > 10
    assert held <= collected


def _helps(command: click.Command, names: list[str]) -> Iterator[tuple[str, str]]:
    """A command and those in it, each with its help on all options."""
    result = CliRunner().invoke(main, [*names, "--help-all"])
    if result.exit_code:
        result = CliRunner().invoke(main, [*names, "--help"])
    assert result.exit_code == 0, names
    yield " ".join(names), result.output
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), name)
            assert found is not None
            yield from _helps(found, [*names, name])


def test_the_change_log_has_the_version_of_the_package() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert version is not None
    assert f"## {version[1]}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_pages_name_open_routes_and_reasons_of_cut_connections() -> None:
    section = _DOCS["security"].split("## Open routes")[1].split("##")[0]
    assert set(re.findall(r"`(/\w+)`", section)) == OPEN_ROUTES | (PAGES - {"/"})
    source = (ROOT / "api" / "http" / "connections.py").read_text()
    reasons = set(re.findall(r'(?:_count|cut_connections\.labels)\("(\w+)"\)', source))
    assert len(reasons) == 6
    for reason in reasons:
        assert f"`{reason}`" in _DOCS["operating"]


def test_the_table_of_what_to_change_is_complete() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = page.split("## What to change")[1].splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith(("| a ", "| an "))]
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.*")]
    files = [path for path in paths if path.suffix in (".py", ".cpp", ".md")]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    assert len(rows) == 8
    for row in rows:
        (example,) = re.findall(r"`(.+?)`", row[1])
        listed = re.findall(r"`([\w./-]+/[\w.-]*|pyproject\.toml)`", " ".join(row[2:]))
        assert all((ROOT / name).exists() for name in listed), row
        spelled = re.sub(r"_|\\-", "[-_]?", re.escape(example))
        named = [name for name, text in texts.items() if re.search(rf"{spelled}\b", text)]
        assert named, example
        missing = [name for name in named if not name.startswith(tuple(listed))]
        assert not missing, (example, missing)


def test_promises_name_real_options_and_tests() -> None:
    options = set(re.findall(r"`(--[\w-]+(?: \w+)?)`", _DOCS["promises"]))
    fields = [*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig)]
    assert len(options) > 20
    assert options <= {flag_with_collection(field.name) for field in fields}
    rows = [line for line in _DOCS["promises"].splitlines() if line.startswith("| ")]
    promises = [row for row in rows if not row.startswith(("| promise", "| ---"))]
    assert len(promises) > 25
    for row in promises:
        tests = re.findall(r"`(tests/[\w/]+\.py)`", row)
        assert tests, row
        assert all((ROOT / test).is_file() for test in tests), row


def test_each_statement_on_other_servers_has_its_source() -> None:
    above, notes = _DOCS["promises-compared"].split("## Notes")
    used = set(re.findall(r"\[\^([\w-]+)\]", above))
    defined = re.findall(r"^\[\^([\w-]+)\]: .*https://", notes, flags=re.MULTILINE)
    assert len(defined) == len(set(defined))
    assert used == set(defined)
    rows = [line.split(" | ") for line in above.splitlines() if line.startswith("| ")]
    cases = [row for row in rows if len(row) == 4 and row[0] not in ("| case", "| ---")]
    assert len(cases) > 20
    for case, _, tei, vllm in cases:
        assert "[^t-" in tei, case
        assert "[^v-" in vllm, case


def test_the_page_on_tenants_names_attributes_and_metrics() -> None:
    page = _DOCS["tenants"]
    section = page.split("## The file of keys")[1].split("## Shares")[0]
    assert re.findall(r"^\| `(\w+)`", section, flags=re.MULTILINE) == list(ATTRIBUTES)
    registry = CollectorRegistry()
    TenantMetrics(registry)
    shown = re.findall(r"^\| `(maxsimd_\w+)_total\{", page, flags=re.MULTILINE)
    assert shown == [family.name for family in registry.collect()]
    (example,) = re.findall(r"```\n(\w+ +name=search.*?)```", page, flags=re.DOTALL)
    assert set(read_keys(example.encode()).tenants) == {"search", "crawler"}


def _code(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_each_block_of_the_pages_on_clients_is_an_example() -> None:
    shown, of_databases = clients.examples(), clients.examples(page=clients.DATABASES)
    catalogue = {client.name for client in CLIENTS} - {"with_schemathesis", "with_search_engines"}
    assert {example.client for example in (*shown, *of_databases)} == catalogue | {clients.CURL}
    assert _code(clients.PAGE, r"\w+") == ["maxsimd serve\n", *(example.code for example in shown)]
    assert _code(clients.DATABASES, "python") == [example.code for example in of_databases]
    of_retrieval = clients.examples(page=clients.RAG)
    assert len(of_retrieval) == 3
    for block, example in zip(_code(clients.RAG, "python"), of_retrieval, strict=True):
        assert example.code.endswith(block)
        assert all(part in example.code for part in (f'"{clients.URL}"', '"embed"', '"rerank"'))


def test_examples_of_clients_use_the_base_urls_of_the_table() -> None:
    text = clients.PAGE.read_text(encoding="utf-8")
    table = text.split("\n## Base URLs\n")[1].split("\n## ")[0]
    pattern = r"^\| \[.+?\]\(#([\w-]+)\).*?\| .*? \| (.+?) \| .+ \|$"
    rows = re.findall(pattern, table, re.MULTILINE)  # the anchor that a row links to, and its URL
    assert len(rows) == table.count("\n| [")
    parts = re.split(r"^#{2,3} (.+)$", text, flags=re.MULTILINE)
    anchors = [re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in parts[1::2]]
    sections = dict(zip(anchors, parts[2::2], strict=True))
    for anchor in {anchor for anchor, _ in rows}:
        shown = [example for example in clients.examples() if example.code in sections[anchor]]
        assert shown, anchor
        urls = {url.strip("`") for other, url in rows if other == anchor and url != "none"}
        code = "".join(example.code for example in shown)
        if anchor == clients.CURL:
            assert all(url + "/v1/" in code for url in urls)
        else:
            assert set(re.findall(rf'"({re.escape(clients.URL)}[^"]*)"', code)) == urls, anchor


OPERATING = ROOT / "docs" / "operating"


def _yaml(name: str) -> list[Any]:
    return [*yaml.safe_load_all((OPERATING / name).read_text(encoding="utf-8"))]


def _metrics() -> set[str]:
    """The samples that a server of several models, with a cache, or of several processes may have."""
    state = ServerState(Engine(EngineConfig()), ServerConfig())
    names = {"process_resident_memory_bytes", "process_start_time_seconds", "maxsimd_model_served"}
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "info": ("_info",)}
    state.engine.metrics.cache = ScoreCache(1)
    registries = (state.engine.metrics.registry, FleetEngine(Roster()).metrics.registry)
    for family in (family for registry in registries for family in registry.collect()):
        names |= {family.name + ending for ending in endings.get(family.type, ("",))}
    return names


def _rules() -> list[dict[str, Any]]:
    (alerts,) = _yaml("alerts.yaml")
    return [rule for group in alerts["groups"] for rule in group["rules"]]


def _queries() -> list[str]:
    dashboard = json.loads((OPERATING / "grafana.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    return [query.replace("$__rate_interval", "5m").replace("$job", ".*") for query in queries]


def test_dashboard_and_alerts_fit_the_metrics() -> None:
    queries = (*_queries(), *(rule["expr"] for rule in _rules()))
    asked = {name for query in queries for name in re.findall(r"\b(?:maxsimd|process)_\w+", query)}
    assert len(asked) > 30
    assert asked <= _metrics()
    probes = "|".join(("/health", "/ready", "/ping", "/metrics"))
    assert all("GET" in ROUTES[path] for path in probes.split("|"))
    of_http = [query for query in _queries() if "maxsimd_http_request" in query]
    assert len(of_http) > 4
    of_http += [rule["expr"] for rule in _rules() if rule["alert"] == "MaxsimdRequestsRefused"]
    assert all(f'route!~"{probes}"' in query for query in of_http)


_PROMTOOL = shutil.which("promtool")
# Samples of a server in Prometheus's notation, a minute apart: no alert fires for these,
_WELL = {
    "maxsimd_ready{}": "1x30", "maxsimd_build_info{}": "1x30", 'maxsimd_model_served{model="m"}': "1x30",
    'maxsimd_http_requests_total{route="/ready",status="200"}': "0+100000x30",
    'maxsimd_http_requests_total{route="/rerank",status="200"}': "0+1000x30",
    'maxsimd_refused_requests_total{reason="queue"}': "0x30", "maxsimd_queue_tokens{}": "1000x30",
    "maxsimd_tokens_total{}": "0+60000x30",
    'maxsimd_request_seconds_bucket{part="queue",le="5.0"}': "0+1000x30",
    'maxsimd_request_seconds_bucket{part="queue",le="10.0"}': "0+1000x30",
    'maxsimd_request_seconds_bucket{part="queue",le="+Inf"}': "0+1000x30",
    'maxsimd_event_loop_lag_seconds_bucket{le="0.1"}': "0+1000x30",
    'maxsimd_event_loop_lag_seconds_bucket{le="0.25"}': "0+1000x30",
    'maxsimd_event_loop_lag_seconds_bucket{le="+Inf"}': "0+1000x30",
    "maxsimd_engine_restarts_total{}": "1x30", "maxsimd_replicas_silent{}": "0x30",
    "process_start_time_seconds{}": "1x30", "maxsimd_log_dropped_total{}": "1x30",
}  # fmt: skip
# and one fires with each of these in place of the same above.
_ILL = {
    "MaxsimdNotReady": {"maxsimd_ready{}": "0x30"},
    "MaxsimdModelNotServed": {'maxsimd_model_served{model="m"}': "0x30"},
    "MaxsimdRequestsRefused": {'maxsimd_refused_requests_total{reason="queue"}': "0+20x30"},
    "MaxsimdErrors": {'maxsimd_http_requests_total{route="/rerank",status="500"}': "_x25 1x4"},
    "MaxsimdQueueLong": {"maxsimd_queue_tokens{}": "20000x30"},
    "MaxsimdWaitHigh": {'maxsimd_request_seconds_bucket{part="queue",le="5.0"}': "0+900x30"},
    "MaxsimdEventLoopLag": {'maxsimd_event_loop_lag_seconds_bucket{le="0.1"}': "0+900x30"},
    "MaxsimdEngineRestarts": {"maxsimd_engine_restarts_total{}": "0x25 1x5"},
    "MaxsimdReplicaSilent": {"maxsimd_replicas_silent{}": "1x30"},
    "MaxsimdProcessRestarts": {"process_start_time_seconds{}": "1x10 2x10 3x10"},
    "MaxsimdLogLinesDropped": {"maxsimd_log_dropped_total{}": "0x25 1x5"},
}


def _alerts_for(name: str | None) -> dict[str, Any]:
    """A case for promtool: these samples make this alert fire, and no other."""
    common = '{job="maxsimd",instance="one:8000",'
    samples = _WELL | (_ILL[name] if name else {})
    series = [{"series": each.replace("{", common), "values": values} for each, values in samples.items()]
    firing = [{"labels": f'{{alertname="{name}"}}', "value": 1}] if name else []
    query = 'count by (alertname) (ALERTS{alertstate="firing"})'
    asked = {"eval_time": "29m", "expr": query, "exp_samples": firing}
    return {"interval": "1m", "input_series": series, "promql_expr_test": [asked]}


def _promtool(*arguments: str, page: str = "") -> None:
    done = subprocess.run([_PROMTOOL or "", *arguments], input=page, capture_output=True, text=True)
    # It prints what it would change of metrics, which it takes.
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


@pytest.mark.skipif(_PROMTOOL is None, reason="promtool is not installed (Debian's package prometheus)")
def test_promtool_accepts_rules_queries_and_metrics(tmp_path: Path) -> None:
    _promtool("check", "config", str(OPERATING / "prometheus.yaml"))
    state = ServerState(Engine(EngineConfig()), ServerConfig())
    _promtool("check", "metrics", page=generate_latest(state.engine.metrics.registry).decode())
    rules = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(_queries())]
    rules_file = tmp_path / "queries.yaml"
    rules_file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    _promtool("check", "rules", str(rules_file))
    cases = tmp_path / "cases.yaml"
    tests = [_alerts_for(name) for name in (None, *(rule["alert"] for rule in _rules()))]
    cases.write_text(yaml.safe_dump({"rule_files": [str(OPERATING / "alerts.yaml")], "tests": tests}))
    _promtool("test", "rules", str(cases))


KUBERNETES = OPERATING / "kubernetes"
_KUBECTL = shutil.which("kubectl")


def test_the_deployment_fits_the_server() -> None:
    deployment, service, claim, budget = _yaml("kubernetes/base/maxsimd.yaml")
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    probes = {"startupProbe": "/ready", "livenessProbe": "/health", "readinessProbe": "/ready"}
    for probe, path in probes.items():
        assert container[probe]["httpGet"] == {"path": path, "port": ServerConfig().port}
        assert "GET" in ROUTES[path]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]
    grace, config = pod["spec"]["terminationGracePeriodSeconds"], ServerConfig()
    assert grace >= config.drain_seconds + config.grace_seconds + 15
    assert _yaml("compose.yaml")[0]["services"]["maxsimd"]["stop_grace_period"] == f"{grace}s"
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == "8000"
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert {*mounted.values()} == volumes.keys()
    # The server writes to the folders that the image names, and to no others.
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    image = (OPERATING / "Containerfile").read_text(encoding="utf-8")
    assert mounted.keys() == {*re.findall(r"\b(?:HF_HOME|HOME)=(\S+)", image), "/tmp"}
    assert f"USER {pod['spec']['securityContext']['runAsUser']}" in image


def _rendered(folder: str) -> dict[str, Any]:
    command = [_KUBECTL or "", "kustomize", str(KUBERNETES / folder)]
    rendered = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {found["kind"]: found for found in yaml.safe_load_all(rendered)}


@pytest.mark.skipif(_KUBECTL is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", ["base", "overlays/gpu", "overlays/production"])
def test_kustomize_renders_manifests(folder: str) -> None:
    objects = _rendered(folder)
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    gpus = container["resources"]["limits"].get("nvidia.com/gpu")
    expected = ("1", "maxsimd:cuda") if "gpu" in folder else (None, "maxsimd:latest")
    assert (gpus, container["image"]) == expected
    if "production" in folder:
        (metric,) = objects["HorizontalPodAutoscaler"]["spec"]["metrics"]
        assert metric["pods"]["metric"]["name"] in _metrics()
        # Applying it again leaves the number of pods to the autoscaler, and nobody scrapes twice.
        assert "replicas" not in objects["Deployment"]["spec"]
        assert "annotations" not in objects["Deployment"]["spec"]["template"]["metadata"]
        monitor = objects.pop("ServiceMonitor")
        assert monitor["spec"]["selector"]["matchLabels"] == objects["Service"]["metadata"]["labels"]


@pytest.mark.skipif(_KUBECTL is None, reason="kubectl is not installed")
def test_rendered_manifests_fit_their_schemas() -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for folder in ("base", "overlays/gpu", "overlays/production"):
        # The schemas are those of Kubernetes, not of the Prometheus operator.
        for kind, found in _rendered(folder).items():
            if kind != "ServiceMonitor":
                schemas.validate(found, schemas.latest_version(), strict=True)


def test_compose_mounts_files_that_there_are() -> None:
    (compose,) = _yaml("compose.yaml")
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (OPERATING / source).is_file()
    server = compose["services"]["maxsimd"]
    # The image's folders, as volumes.
    assert (server["read_only"], server["volumes"]) == (True, ["models:/models", "cache:/cache"])
    (prometheus,) = _yaml("prometheus.yaml")
    assert prometheus["scrape_configs"][0]["static_configs"][0]["targets"] == ["maxsimd:8000"]
    assert (ROOT / server["build"]["dockerfile"]).is_file()


def test_variables_are_those_of_options() -> None:
    for path in (*KUBERNETES.rglob("*.yaml"), OPERATING / "Containerfile", OPERATING / "compose.yaml"):
        text = path.read_text(encoding="utf-8")
        fields = [*EngineConfig.__dataclass_fields__, *ServerConfig.__dataclass_fields__]
        assert set(re.findall(r"MAXSIMD_\w+", text)) <= set(map(variable, fields))
        flags = set(re.findall(r"\"(--[a-z-]+)\"", text))
        assert flags <= {f"--{field.replace('_', '-')}" for field in fields}
