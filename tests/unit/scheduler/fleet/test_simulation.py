"""Fleets that are simulated with the code that plans for real ones."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from maxsimd.bench import fleet
from maxsimd.bench.cli import bench_fleet
from maxsimd.bench.fleet import FleetShape, Routing, simulate


@pytest.fixture(scope="module")
def healthy() -> dict[str, float]:
    return simulate(FleetShape(8, collection=2_000), 200)


@pytest.mark.exhaustive
@pytest.mark.parametrize("routing", [Routing.RANDOM, Routing.ANYWHERE, Routing.LIGHTER_OF_TWO])
def test_owners_keep_more_and_answer_sooner(healthy: dict[str, float], routing: Routing) -> None:
    other = simulate(FleetShape(8, collection=2_000, routing=routing), 200)
    assert 1 - healthy["hits"] <= (1 - other["hits"]) / 2
    assert healthy["p99_ms"] < other["p99_ms"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("members", [9, 12, 20])
def test_the_busiest_engine_does_little_more_than_the_mean(members: int) -> None:
    figures = simulate(FleetShape(members, collection=6_000), 50 * members)
    assert figures["max_over_mean_load"] <= 1.3
    assert figures["failed"] == 0


@pytest.mark.exhaustive
def test_ten_engines_are_no_slower_than_eight() -> None:
    eight, ten = (simulate(FleetShape(members), 1_000) for members in (8, 10))
    assert ten["p99_ms"] <= 1.2 * eight["p99_ms"]
    assert ten["hits"] >= eight["hits"] - 0.01


def test_a_death_costs_no_request(healthy: dict[str, float]) -> None:
    figures = simulate(FleetShape(8, collection=2_000, busy=0.8, dies=True), 200)
    assert figures["failed"] == 0
    assert figures["tried_again"] > 0
    assert figures["hits"] > healthy["hits"] - 0.1


@pytest.mark.exhaustive
def test_the_command_prints_writes_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "LEAST_REQUESTS", 20)
    written, drawn = tmp_path / "fleet.json", tmp_path / "fleet.svg"
    words = f"--members 2 --requests 1 --json {written} --plot {drawn}".split()
    assert "2 engines, by owner" in CliRunner().invoke(bench_fleet, words, catch_exceptions=False).output
    figures = json.loads(written.read_text(encoding="utf-8"))
    assert [row["documents"] for row in figures["fleets"]] == ["by owner", "anywhere"]
    assert "<svg" in drawn.read_text(encoding="utf-8")
