"""What requests that someone waits for lose to batches, by the batches' priority: the scheduler, simulated.

Two requests of 10,000 documents always wait, of a tenant of their own; the others come at random times.
"""

import random
from dataclasses import dataclass

import click

from maxsimd.bench.order_of_work import (
    BUDGET,
    NOMINAL,
    SECONDS_PER_STEP,
    TOKENS_PER_SECOND,
    poisson_arrivals,
    summary,
)
from maxsimd.bench.queue_orders import SchedulerOrder
from maxsimd.bench.report import write_json

BATCH_DOCUMENTS = 10_000
_BATCHES_WAITING = 2
# Documents of the other requests, their load, and how many of them come.
CASES = ((1, 0.3, 4000), (20, 0.6, 800), (100, 0.8, 300))
PRIORITIES = (0, 1, 2, 3, 4, 5, 8)


@dataclass(frozen=True, slots=True)
class BesideBatches:
    """Latencies of the requests beside the batches, and the part of the device that the batches had."""

    latency: dict[str, float]
    batch_share: float


def beside_batches(documents: int, load: float, requests: int, priority: int | None) -> BesideBatches:
    """With no `priority` no batches come."""
    arrivals = poisson_arrivals(load, requests, ((1.0, documents),), seed=1)
    draw, order = random.Random(1), SchedulerOrder(BUDGET)
    latencies: list[float | None] = [None] * requests
    # What is left of each request; batches have the ids from `requests` on.
    left: dict[int, int] = {}
    seconds, arrived, batches, of_batches = 0.0, 0, 0, 0
    while arrived < requests or any(request_id < requests for request_id in left):
        while priority is not None and sum(each >= requests for each in left) < _BATCHES_WAITING:
            lengths = [draw.randint(50, 150) for _ in range(BATCH_DOCUMENTS)]
            order.admit(requests + batches, lengths, "batches", priority)
            left[requests + batches] = sum(lengths)
            batches += 1
        if not left:
            seconds = max(seconds, arrivals[arrived].seconds)
        while arrived < requests and arrivals[arrived].seconds <= seconds:
            order.admit(arrived, arrivals[arrived].lengths)
            left[arrived] = sum(arrivals[arrived].lengths)
            arrived += 1
        used = order.step()
        seconds += sum(used.values()) / TOKENS_PER_SECOND + SECONDS_PER_STEP
        for request_id, tokens in used.items():
            left[request_id] -= tokens
            if request_id >= requests:
                of_batches += tokens
            if not left[request_id]:
                del left[request_id]
                if request_id < requests:
                    latencies[request_id] = seconds - arrivals[request_id].seconds
    return BesideBatches(summary(latencies), round(of_batches / seconds / (NOMINAL * TOKENS_PER_SECOND), 3))


def measure_beside_batches(json_file: str | None) -> None:
    """Prints a table, a line for each priority of the batches."""
    click.echo(f"beside batches of {BATCH_DOCUMENTS:,} documents of another tenant: mean and p99 in seconds")
    click.echo(
        f"{'documents':>9}{'load':>6}{'priority of the batches':>25}{'mean':>8}{'p99':>8}{'batches had':>13}"
    )
    rows: list[dict[str, object]] = []
    for documents, load, requests in CASES:
        for priority in (None, *PRIORITIES):
            found = beside_batches(documents, load, requests, priority)
            shown = "no batches" if priority is None else str(priority)
            mean, p99 = found.latency["mean_s"], found.latency["p99_s"]
            click.echo(f"{documents:>9}{load:>6}{shown:>25}{mean:>8.3f}{p99:>8.2f}{found.batch_share:>13.2f}")
            row = {"documents": documents, "load": load, "priority": priority, "latency": found.latency}
            rows.append({**row, "batch_share": found.batch_share})
    if json_file:
        write_json(json_file, {"settings": {"batch_documents": BATCH_DOCUMENTS}, "figures": rows})
