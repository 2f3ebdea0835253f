"""Fleets that are simulated with the code that plans for real ones."""

import pytest

from maxsimd.bench.fleet_simulation import FleetShape, moved_by_one_more, simulate


def test_owners_keep_more_and_answer_sooner() -> None:
    by_owner = simulate(FleetShape(8, collection=6_000), 600)
    anywhere = simulate(FleetShape(8, collection=6_000, by_owner=False), 600)
    assert 1 - by_owner["hits"] <= (1 - anywhere["hits"]) / 2
    assert by_owner["p99_ms"] < anywhere["p99_ms"]
    assert by_owner["max_over_mean_load"] <= 1.3


@pytest.mark.parametrize("members", [1, 10, 100, 1_000])
def test_a_member_more_moves_its_share(members: int) -> None:
    assert moved_by_one_more(members) <= 1.2


def test_a_simulation_is_the_same_each_time() -> None:
    shape = FleetShape(3, collection=500, cache=100, documents=10)
    assert simulate(shape, 50) == simulate(shape, 50)
