"""What docs/operating/ has for those who run a server, beside what the server has."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from maxsimd.api.config import ServerConfig
from maxsimd.api.handlers.routes import ROUTES
from maxsimd.api.options import variable
from maxsimd.api.state import ServerState
from maxsimd.engine import Engine, EngineConfig

FOLDER = Path(__file__).parents[2] / "docs" / "operating"


def _yaml(name: str) -> list[Any]:
    return [*yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))]


def _metrics() -> set[str]:
    state = ServerState(Engine(EngineConfig()), ServerConfig())
    names = {"process_resident_memory_bytes", "maxsimd_cache_hits_total", "maxsimd_cache_misses_total"}
    for family in state.engine.metrics.registry.collect():
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
        names |= {family.name + ending for ending in endings}
    return names


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    dashboard = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
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
    assert grace > ServerConfig().grace_seconds
    assert deployment["spec"]["template"]["metadata"]["annotations"]["prometheus.io/port"] == "8000"


def test_compose_mounts_files_that_there_are() -> None:
    (compose,) = _yaml("compose.yaml")
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (FOLDER / source).is_file()
    (prometheus,) = _yaml("prometheus.yaml")
    assert prometheus["scrape_configs"][0]["static_configs"][0]["targets"] == ["maxsimd:8000"]
    assert (FOLDER.parents[1] / compose["services"]["maxsimd"]["build"]["dockerfile"]).is_file()


def test_variables_are_those_of_options() -> None:
    for name in ("Containerfile", "kubernetes.yaml", "compose.yaml"):
        text = (FOLDER / name).read_text(encoding="utf-8")
        fields = [*EngineConfig.__dataclass_fields__, *ServerConfig.__dataclass_fields__]
        assert set(re.findall(r"MAXSIMD_\w+", text)) <= set(map(variable, fields))
        flags = set(re.findall(r"\"(--[a-z-]+)\"", text))
        assert flags <= {f"--{field.replace('_', '-')}" for field in ServerConfig.__dataclass_fields__}
