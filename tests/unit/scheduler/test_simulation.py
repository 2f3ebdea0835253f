"""The scheduler under load, as `maxsimd bench order-of-work` simulates it, on fewer requests."""

import pytest

from maxsimd.bench import order_of_work
from maxsimd.bench.order_of_work import BUDGET, MIXES, beside_batches, closed_loop, simulate, summary
from maxsimd.engine.requests import priority_number
from tests.exhaustive import exhaustive


@pytest.mark.parametrize("mix", [next(iter(MIXES)), *exhaustive(*list(MIXES)[1:])])
def test_latency_is_below_round_robins_and_in_bounds(mix: str) -> None:
    arrivals = order_of_work.poisson_arrivals(0.95, 400, MIXES[mix], seed=1)
    ours = summary(simulate(arrivals, order_of_work.SchedulerOrder(BUDGET)))
    round_robin = summary(simulate(arrivals, order_of_work.RoundRobin(BUDGET)))
    first_come = summary(simulate(arrivals, order_of_work.FirstComeFirstServed(BUDGET)))
    assert ours["mean_s"] <= 0.9 * round_robin["mean_s"]
    assert ours["mean_s"] <= 1.07 * first_come["mean_s"]
    assert ours["p99_s"] <= round_robin["p99_s"]
    bound = order_of_work.longest_wait_of_bound(MIXES[mix], 400, seed=1)
    assert bound["longest_of_bound"] <= 1
    assert bound["refused"] > 0


def test_clients_and_batches_wait_as_they_should() -> None:
    ours = closed_loop(order_of_work.SchedulerOrder(16_384), 64, 600, 16_384, seed=1)
    in_turn = closed_loop(order_of_work.FirstComeFirstServed(16_384), 64, 600, 16_384, seed=1)
    assert ours["p99_s"] <= 1.25 * ours["mean_s"]
    assert ours["tokens_per_s"] >= 0.99 * in_turn["tokens_per_s"]
    batch = beside_batches(100, 0.6, 60, priority_number("batch"))
    assert batch["mean_s"] <= 1.5 * beside_batches(100, 0.6, 60, None)["mean_s"]
    assert batch["mean_s"] < 0.4 * beside_batches(100, 0.6, 60, 0)["mean_s"]
    assert batch["batch_share"] > 0.3, "what is left is theirs"
