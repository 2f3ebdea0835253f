"""Which waiting request goes next: the scheduler simulated under load, beside plain orders of work.

A step takes as long as its tokens at a fixed rate, and a fixed time more; nothing runs on a device.
"""

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from maxsimd.bench.datasets import docstring_requests
from maxsimd.bench.queue_orders import FirstComeFirstServed, Order, RoundRobin, SchedulerOrder
from maxsimd.bench.report import write_json
from maxsimd.scheduler import OLDEST_SHARE

BUDGET = 2048
TOKENS_PER_SECOND = 30_000.0
SECONDS_PER_STEP = 0.002
# The share of the time that goes to tokens in full steps, at which a load of 1 is nominal.
NOMINAL = 0.93
QUEUE_LIMIT = 100_000
LOADS = (0.5, 0.8, 0.95)
CLOSED_LOOP_BUDGET = 16_384
LOADS_BEYOND = (2.0, 5.0, 10.0)
WAIT_SECONDS = 2.0
_TOKENS_A_WORD = 1.4

# Parts of all requests, each with the number of documents in such a request.
Mix = tuple[tuple[float, int], ...]
MIXES: dict[str, Mix] = {
    "50 documents": ((1.0, 50),),
    "90% 20, 10% 500": ((0.9, 20), (0.1, 500)),
    "60% 1, 39% 100, 1% 5000": ((0.6, 1), (0.39, 100), (0.01, 5000)),
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes `seconds` after the start, with the tokens of each of its documents."""

    seconds: float
    lengths: list[int]


def poisson_arrivals(load: float, requests: int, mix: Mix, seed: int) -> list[Arrival]:
    """Requests of documents of 50 to 150 tokens, at random times."""
    draw = random.Random(seed)
    mean_tokens = sum(part * documents * 100 for part, documents in mix)
    rate = load * NOMINAL * TOKENS_PER_SECOND / mean_tokens
    seconds = 0.0
    arrivals = []
    for _ in range(requests):
        seconds += draw.expovariate(rate)
        documents = _draw_documents(draw.random(), mix)
        arrivals.append(Arrival(seconds, [draw.randint(50, 150) for _ in range(documents)]))
    return arrivals


def arrivals_of(sizes: list[list[int]], load: float, requests: int, seed: int) -> list[Arrival]:
    """Requests of which each is one of these, at random times."""
    draw = random.Random(seed)
    rate = load * NOMINAL * TOKENS_PER_SECOND / statistics.mean(map(sum, sizes))
    seconds = 0.0
    arrivals = []
    for _ in range(requests):
        seconds += draw.expovariate(rate)
        arrivals.append(Arrival(seconds, draw.choice(sizes)))
    return arrivals


def _draw_documents(number: float, mix: Mix) -> int:
    total = 0.0
    for part, documents in mix:
        total += part
        if number <= total:
            return documents
    return mix[-1][1]


def simulate(
    arrivals: list[Arrival],
    order: Order,
    is_let_in: Callable[[int, int], bool] = lambda waiting, tokens: True,
) -> list[float | None]:
    """Seconds from each request's arrival to the end of its last step; None for one that is refused, because
    it is not let in with its tokens, beside those that wait."""
    seconds = 0.0
    arrived = waiting = 0
    left: dict[int, int] = {}
    latencies: list[float | None] = [None] * len(arrivals)
    while arrived < len(arrivals) or left:
        if not left:
            seconds = max(seconds, arrivals[arrived].seconds)
        while arrived < len(arrivals) and arrivals[arrived].seconds <= seconds:
            tokens = sum(arrivals[arrived].lengths)
            if is_let_in(waiting, tokens):
                order.admit(arrived, arrivals[arrived].lengths)
                left[arrived] = tokens
                waiting += tokens
            arrived += 1
        used = order.step()
        tokens = sum(used.values())
        waiting -= tokens
        if tokens:
            seconds += tokens / TOKENS_PER_SECOND + SECONDS_PER_STEP
        for request_id, part in used.items():
            left[request_id] -= part
            if not left[request_id]:
                del left[request_id]
                latencies[request_id] = seconds - arrivals[request_id].seconds
    return latencies


def summary(latencies: list[float | None]) -> dict[str, float]:
    """Mean, median and 99th percentile, in seconds."""
    done = sorted(latency for latency in latencies if latency is not None)
    return {
        "mean_s": round(sum(done) / len(done), 4),
        "p50_s": round(done[len(done) // 2], 4),
        "p99_s": round(done[int(len(done) * 0.99)], 4),
    }


def compare_orders(
    requests: int, seeds: int, oldest_share: float, overdue_share: float
) -> Iterator[dict[str, Any]]:
    """One figure for each mix, load and seed: every order's latencies."""
    orders: dict[str, Callable[[], Order]] = {
        "maxsimd": lambda: SchedulerOrder(BUDGET, oldest_share, overdue_share),
        "round robin": lambda: RoundRobin(BUDGET),
        "first come": lambda: FirstComeFirstServed(BUDGET),
    }
    for name, mix in MIXES.items():
        for load in LOADS:
            for seed in range(1, seeds + 1):
                arrivals = poisson_arrivals(load, requests, mix, seed)
                latencies = {order: summary(simulate(arrivals, make())) for order, make in orders.items()}
                yield {"mix": name, "load": load, "seed": seed, "latency": latencies}


def longest_wait_of_bound(
    mix: Mix, requests: int, seed: int, oldest_share: float = OLDEST_SHARE
) -> dict[str, float]:
    """At a load of 1.5, with a limit on the queue: how many requests are refused, and of those admitted the
    longest latency as a part of (queue limit + T) / (share of the oldest * tokens a second), where T is the
    request's tokens."""
    order = SchedulerOrder(BUDGET, oldest_share)
    arrivals = poisson_arrivals(1.5, requests, mix, seed)
    latencies = simulate(arrivals, order, lambda waiting, tokens: waiting + tokens <= QUEUE_LIMIT)
    rate = BUDGET / (BUDGET / TOKENS_PER_SECOND + SECONDS_PER_STEP)
    parts = [
        latency * oldest_share * rate / (QUEUE_LIMIT + sum(arrival.lengths))
        for arrival, latency in zip(arrivals, latencies, strict=True)
        if latency is not None
    ]
    return {"refused": requests - len(parts), "longest_of_bound": round(max(parts), 4)}


def beyond_what_can_be_served(
    load: float, requests: int, seed: int, oldest_share: float, overdue_share: float
) -> dict[str, float]:
    """Latencies of those requests of 20 docstrings that are let in, because little enough is to be run before
    them. Some have less than 2,048 tokens, and go before all others."""
    texts = [request.documents for request in docstring_requests(200, 20, 0)]
    sizes = [[min(256, round(_TOKENS_A_WORD * len(text.split()))) for text in each] for each in texts]
    order = SchedulerOrder(BUDGET, oldest_share, overdue_share)
    most = WAIT_SECONDS * TOKENS_PER_SECOND
    latencies = simulate(
        arrivals_of(sizes, load, requests, seed),
        order,
        lambda waiting, tokens: not waiting or order.scheduler.work_ahead(tokens) <= most,
    )
    return summary(latencies)


def tokens_of_tenants(weights: dict[str, float], steps: int, seed: int) -> dict[str, int]:
    """Tokens that each tenant is given in a number of steps, where all always have requests of all sizes
    waiting."""
    draw = random.Random(seed)
    order = SchedulerOrder(BUDGET, weights=weights)
    tenants = list(weights)
    given = dict.fromkeys(tenants, 0)
    waiting: dict[int, int] = {}
    admitted = 0
    for _ in range(steps):
        for i in range(len(tenants)):
            while sum(request_id % len(tenants) == i for request_id in waiting) < 8:
                request_id = admitted * len(tenants) + i
                lengths = [draw.randint(50, 150) for _ in range(draw.choice((1, 20, 100)))]
                order.admit(request_id, lengths, tenants[i])
                waiting[request_id] = sum(lengths)
                admitted += 1
        for request_id, tokens in order.step().items():
            given[tenants[request_id % len(tenants)]] += tokens
            waiting[request_id] -= tokens
            if not waiting[request_id]:
                del waiting[request_id]
    return given


def closed_loop(order: Order, clients: int, requests: int, budget: int, seed: int) -> dict[str, float]:
    """Latencies where each of some clients sends a pair of 2,048 tokens (give or take a half, query and
    document alike) as soon as it has the answer to its last one, and tokens a second. A step is chosen when
    the one before it begins, as on a GPU, and takes as long as a full one of `budget` tokens."""
    draw = random.Random(seed)
    pairs = [[draw.randint(512, 1536), draw.randint(512, 1536)] for _ in range(requests)]
    sent, left, latencies = dict[int, float](), dict[int, int](), list[float | None]()
    seconds, a_step = 0.0, budget / TOKENS_PER_SECOND

    def send() -> None:
        number = len(sent)
        if number < requests:
            order.admit(number, pairs[number])
            sent[number], left[number] = seconds, sum(pairs[number])

    for _ in range(clients):
        send()
    running = order.step()
    while running:
        following = order.step()
        seconds += a_step
        for number, tokens in running.items():
            left[number] -= tokens
            if not left[number]:
                latencies.append(seconds - sent[number])
                send()
        running = following or order.step()
    return summary(latencies) | {"tokens_per_s": round(sum(map(sum, pairs)) / seconds)}


def measure_order_of_work(
    requests: int, seeds: int, oldest_share: float, overdue_share: float, json_file: str | None
) -> None:
    """Prints a table, latencies far beyond what can be served, the bound for the slowest request, and the
    shares of two tenants."""
    settings = {
        "requests": requests, "budget": BUDGET, "tokens_per_second": TOKENS_PER_SECOND,
        "seconds_per_step": SECONDS_PER_STEP, "queue_limit": QUEUE_LIMIT,
        "oldest_share": oldest_share, "overdue_share": overdue_share, "wait_seconds": WAIT_SECONDS,
    }  # fmt: skip
    click.echo("latency in seconds: mean, median, p99")
    columns = "".join(f"{name:>24}" for name in ("maxsimd", "round robin", "first come"))
    click.echo(f"{'mix':<26}{'load':>5}{'seed':>5}{columns}")
    rows = []
    for row in compare_orders(requests, seeds, oldest_share, overdue_share):
        rows.append(row)
        shown = "".join(
            f"{figures['mean_s']:>10.3f}{figures['p50_s']:>7.2f}{figures['p99_s']:>7.2f}"
            for figures in row["latency"].values()
        )
        click.echo(f"{row['mix']:<26}{row['load']:>5}{row['seed']:>5}{shown}")
    beyond = {
        f"{load:g}": [
            beyond_what_can_be_served(load, int(load * requests), seed, oldest_share, overdue_share)
            for seed in range(1, seeds + 1)
        ]
        for load in LOADS_BEYOND
    }
    for load, latencies in beyond.items():
        shown = "   ".join(f"{each['p50_s']:.2f} {each['p99_s']:.2f}" for each in latencies)
        click.echo(f"20 docstrings at {load} times what can be served, median and p99: {shown}")
    bounds = {name: longest_wait_of_bound(mix, requests, 1, oldest_share) for name, mix in MIXES.items()}
    for name, bound in bounds.items():
        click.echo(
            f"load 1.5, queue limit {QUEUE_LIMIT:,} tokens, {name}: {bound['refused']} refused, "
            f"longest latency {bound['longest_of_bound']:.3f} of the bound"
        )
    closed = {
        name: closed_loop(order, 64, requests, CLOSED_LOOP_BUDGET, 1)
        for name, order in (
            ("maxsimd", SchedulerOrder(CLOSED_LOOP_BUDGET)),
            ("first come", FirstComeFirstServed(CLOSED_LOOP_BUDGET)),
        )
    }
    for name, latency in closed.items():
        of_mean = latency["p99_s"] / latency["mean_s"]
        rate = f"{latency['tokens_per_s']:,} tokens/s"
        click.echo(f"64 clients with one pair each, {name}: p99 {of_mean:.2f} of the mean, {rate}")
    shares = tokens_of_tenants({"a": 1.0, "b": 3.0}, 1000, 1)
    ratio = shares["b"] / shares["a"]
    click.echo(f"two tenants that weigh 1 and 3: the second gets {ratio:.3f} times the tokens of the first")
    if json_file:
        figures = {
            "orders": rows,
            "beyond": beyond,
            "bound": bounds,
            "closed_loop": closed,
            "tenants": np.round(ratio, 4).item(),
        }
        write_json(json_file, {"settings": settings, "figures": figures})
