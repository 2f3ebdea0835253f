"""The README and the pages in docs/ say what is so."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from maxsimd.api.cli import main
from maxsimd.api.config import ServerConfig
from maxsimd.api.handlers.routes import OPEN_ROUTES, PAGES, ROUTES
from maxsimd.api.key_file import ATTRIBUTES, read_keys
from maxsimd.api.options import variable
from maxsimd.api.state import ServerState
from maxsimd.engine import Engine, EngineConfig
from maxsimd.engine.tenants import TenantMetrics
from tests.clients import page as clients
from tests.clients.catalogue import CLIENTS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# The pages about maxsimd alone, which name no other programs' options.
_OF_OTHERS = {"comparison", "promises", "clients"}
_PAGES = (*(ROOT / "docs").glob("*.md"), ROOT / "SECURITY.md")
_DOCS = {path.stem: path.read_text(encoding="utf-8") for path in _PAGES}
_COMMANDS = re.compile(r"(?:`|```sh\n)(?:\.venv/bin/)?maxsimd ((?:bench )?[a-z][a-z-]*)")


def test_every_command_and_option_that_is_named_exists() -> None:
    helps = dict(_helps(main, []))
    commands = {command for page in (README, *_DOCS.values()) for command in _COMMANDS.findall(page)}
    assert {"serve", "rerank", "bench engine", "bench peers"} <= commands
    assert commands <= helps.keys()
    pages = [page for name, page in _DOCS.items() if name not in _OF_OTHERS]
    named = {option for page in pages for option in re.findall(r"`(--[a-z][\w-]+)", page)}
    assert len(named) > 40
    every = "".join(helps.values())
    assert not {option for option in named if not re.search(rf"{option}[ ,\n]", every)}


def _helps(command: click.Command, names: list[str]) -> Iterator[tuple[str, str]]:
    """A command and those in it, each with what `--help` says of it."""
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


def test_the_page_on_security_names_routes_without_a_key() -> None:
    section = _DOCS["security"].split("## Open routes")[1].split("##")[0]
    assert set(re.findall(r"`(/\w+)`", section)) == OPEN_ROUTES | (PAGES - {"/"})


def test_the_page_on_security_names_every_reason_to_cut() -> None:
    source = "".join((ROOT / "api" / name).read_text() for name in ("connections.py", "listener.py"))
    reasons = set(re.findall(r'(?:_count|cut_connections\.labels)\("(\w+)"\)', source))
    assert len(reasons) == 6
    for reason in reasons:
        assert f"`{reason}`" in _DOCS["security"]


PROMISES = _DOCS["promises"]


def _cases(text: str) -> list[list[str]]:
    """The rows of the tables: the case, and what maxsimd and the others do."""
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if len(row) == 4 and row[0] not in ("| case", "| ---")]


def test_the_page_on_promises_names_real_options_and_tests() -> None:
    """Options of maxsimd's own column; the others belong to other programs."""
    ours = " ".join(row[1] for row in _cases(PROMISES))
    shown = CliRunner().invoke(main, ["serve", "--help"]).output
    names = set(re.findall(r"`(--[\w-]+)`", ours))
    assert len(names) > 20
    assert not [name for name in names if f"{name} " not in shown]
    tests = set(re.findall(r"`(tests/[\w/]+\.py)`", PROMISES))
    assert len(tests) > 20
    assert not [test for test in tests if not (ROOT / test).is_file()]


def test_each_statement_of_the_page_on_promises_has_its_source() -> None:
    above, notes = PROMISES.split("## Notes")
    used = set(re.findall(r"\[\^([\w-]+)\]", above))
    defined = re.findall(r"^\[\^([\w-]+)\]: .*https://", notes, flags=re.MULTILINE)
    assert len(defined) == len(set(defined))
    assert used == set(defined)
    cases = _cases(above)
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
    shown = clients.examples()
    catalogue = {client.name for client in CLIENTS} - {"with_schemathesis"}
    assert {example.client for example in shown} == catalogue | {clients.CURL}
    assert _code(clients.PAGE, r"\w+") == ["maxsimd serve\n", *(example.code for example in shown)]
    of_retrieval = clients.examples(page=clients.RAG)
    assert _code(clients.RAG, "python") == [example.code for example in of_retrieval]
    assert len(of_retrieval) == 2
    for example in of_retrieval:
        assert all(part in example.code for part in (f'"{clients.URL}"', '"embed"', '"rerank"'))


def test_examples_of_clients_use_the_base_urls_of_the_table() -> None:
    text = clients.PAGE.read_text(encoding="utf-8")
    table = text.split("\n## Base URLs\n")[1].split("\n## ")[0]
    pattern = r"^\| \[.+?\]\(#([\w-]+)\).*?\| .*? \| .*? \| (.+?) \| .+ \|$"
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
    state = ServerState(Engine(EngineConfig()), ServerConfig())
    names = {"process_resident_memory_bytes", "maxsimd_cache_hits_total", "maxsimd_cache_misses_total"}
    for family in state.engine.metrics.registry.collect():
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
        names |= {family.name + ending for ending in endings}
    return names


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    dashboard = json.loads((OPERATING / "grafana.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"\b(?:maxsimd|process)_\w+", query)}
    assert len(asked) > 12
    assert asked <= _metrics()


def test_probes_ask_routes_that_there_are() -> None:
    deployment, service = _yaml("kubernetes.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    probes = {"startupProbe": "/ready", "livenessProbe": "/health", "readinessProbe": "/ready"}
    for probe, path in probes.items():
        assert container[probe]["httpGet"] == {"path": path, "port": ServerConfig().port}
        assert "GET" in ROUTES[path]
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    config = ServerConfig()
    assert grace >= config.drain_seconds + config.grace_seconds + 15
    assert _yaml("compose.yaml")[0]["services"]["maxsimd"]["stop_grace_period"] == f"{grace}s"
    assert deployment["spec"]["template"]["metadata"]["annotations"]["prometheus.io/port"] == "8000"


def test_compose_mounts_files_that_there_are() -> None:
    (compose,) = _yaml("compose.yaml")
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (OPERATING / source).is_file()
    (prometheus,) = _yaml("prometheus.yaml")
    assert prometheus["scrape_configs"][0]["static_configs"][0]["targets"] == ["maxsimd:8000"]
    assert (ROOT / compose["services"]["maxsimd"]["build"]["dockerfile"]).is_file()


def test_variables_are_those_of_options() -> None:
    for name in ("Containerfile", "kubernetes.yaml", "compose.yaml"):
        text = (OPERATING / name).read_text(encoding="utf-8")
        fields = [*EngineConfig.__dataclass_fields__, *ServerConfig.__dataclass_fields__]
        assert set(re.findall(r"MAXSIMD_\w+", text)) <= set(map(variable, fields))
        flags = set(re.findall(r"\"(--[a-z-]+)\"", text))
        assert flags <= {f"--{field.replace('_', '-')}" for field in ServerConfig.__dataclass_fields__}
