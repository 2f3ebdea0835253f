"""The scheduler simulated under load: beside plain orders of work, and with batches beside requests.

A step takes as long as its tokens at a fixed rate, and a fixed time more; nothing runs on a device.
"""

import random
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product

import click
import numpy as np

from maxsimd.bench.datasets import docstring_requests
from maxsimd.bench.report import Figures
from maxsimd.scheduler import (
    OLDEST_SHARE,
    OVERDUE_SHARE,
    ResultSlot,
    Scheduler,
    StepLimits,
    Tokens,
    TokenSequence,
)

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


class FirstComeFirstServed:
    """Runs the requests in order, the longest sequence that fits first."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._waiting: dict[int, list[int]] = {}

    def admit(self, request_id: int, lengths: Sequence[int]) -> None:
        self._waiting[request_id] = sorted(lengths)

    def step(self) -> dict[int, int]:
        room = self._budget
        used: dict[int, int] = {}
        for request_id, lengths in self._waiting.items():
            while position := bisect_right(lengths, room):
                room -= lengths[position - 1]
                used[request_id] = used.get(request_id, 0) + lengths.pop(position - 1)
            if not room:
                break
        for request_id in used:
            if not self._waiting[request_id]:
                del self._waiting[request_id]
        return used


class RoundRobin:
    """Deficit round robin by tokens (Shreedhar & Varghese 1995): a turn for each request in rotation, which
    moves on by one request a step; then all that still fits."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._waiting: dict[int, list[int]] = {}
        self._deficits: dict[int, float] = {}
        self._rotation: deque[int] = deque()

    def admit(self, request_id: int, lengths: Sequence[int]) -> None:
        self._waiting[request_id], self._deficits[request_id] = sorted(lengths), 0.0
        self._rotation.append(request_id)

    def step(self) -> dict[int, int]:
        room = self._budget
        used: dict[int, int] = {}
        quantum = self._budget / max(1, len(self._waiting))
        for has_turn in (True, False):
            for request_id in self._rotation:
                lengths, deficit = self._waiting[request_id], self._deficits[request_id]
                if has_turn:
                    deficit = min(deficit + quantum, 2.0 * self._budget)
                while (deficit > 0 or not has_turn) and (position := bisect_right(lengths, room)):
                    length = lengths.pop(position - 1)
                    deficit -= length
                    room -= length
                    used[request_id] = used.get(request_id, 0) + length
                self._deficits[request_id] = deficit
                if not has_turn and not room:
                    break
        self._rotation.rotate(-1)
        for request_id in used:
            if not self._waiting[request_id]:
                del self._waiting[request_id], self._deficits[request_id]
                self._rotation.remove(request_id)
        return used


class SchedulerOrder:
    """The real `Scheduler`, given texts."""

    def __init__(
        self,
        budget: int,
        oldest_share: float = OLDEST_SHARE,
        overdue_share: float = OVERDUE_SHARE,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        limits = StepLimits(budget, budget, chunked=False)
        self.scheduler = Scheduler(
            limits, weights=weights, oldest_share=oldest_share, overdue_share=overdue_share
        )
        self._tokens: dict[int, Tokens] = {}
        self._num_sequences = 0

    def admit(self, request_id: int, lengths: Sequence[int], tenant: str = "", priority: int = 0) -> None:
        slot = ResultSlot(request_id, 0)
        sequences = []
        for length in lengths:
            if length not in self._tokens:
                self._tokens[length] = Tokens(np.zeros(length, dtype=np.int32))
            sequences.append(TokenSequence.text(self._num_sequences, slot, "", self._tokens[length]))
            self._num_sequences += 1
        self.scheduler.admit(request_id, sequences, (), priority, tenant)

    def step(self) -> dict[int, int]:
        used: dict[int, int] = {}
        step = self.scheduler.schedule()
        for chunk in step.chunks if step is not None else ():
            request_id = chunk.sequence.request_id
            used[request_id] = used.get(request_id, 0) + len(chunk)
        return used


Order = FirstComeFirstServed | RoundRobin | SchedulerOrder


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes `seconds` after the start, with the tokens of each of its documents."""

    seconds: float
    lengths: list[int]


def poisson_arrivals(load: float, requests: int, mix: Mix, seed: int) -> list[Arrival]:
    """Requests of documents of 50 to 150 tokens, at random times."""
    parts, sizes = zip(*mix, strict=True)

    def lengths(draw: random.Random) -> list[int]:
        (documents,) = draw.choices(sizes, parts)
        return [draw.randint(50, 150) for _ in range(documents)]

    mean_tokens = sum(part * documents * 100 for part, documents in mix)
    return _arrivals(load, requests, mean_tokens, lengths, seed)


def _arrivals(
    load: float, requests: int, mean_tokens: float, lengths: Callable[[random.Random], list[int]], seed: int
) -> list[Arrival]:
    draw = random.Random(seed)
    rate = load * NOMINAL * TOKENS_PER_SECOND / mean_tokens
    seconds = 0.0
    arrivals = []
    for _ in range(requests):
        seconds += draw.expovariate(rate)
        arrivals.append(Arrival(seconds, lengths(draw)))
    return arrivals


def simulate(
    arrivals: list[Arrival],
    order: Order,
    is_let_in: Callable[[int, int], bool] = lambda waiting, tokens: True,
    beside: Callable[[Mapping[int, int], float], bool] = lambda used, seconds: False,
) -> list[float | None]:
    """Seconds from each request's arrival to the end of its last step; None if it is refused. `is_let_in` is
    given the tokens that wait and the request's. `beside` is given the tokens of each step and the time; it
    may admit other requests, and says whether some wait."""
    seconds = 0.0
    arrived = waiting = 0
    left: dict[int, int] = {}
    latencies: list[float | None] = [None] * len(arrivals)
    others_wait = beside({}, seconds)
    while arrived < len(arrivals) or left:
        if not left and not others_wait:
            seconds = max(seconds, arrivals[arrived].seconds)
        while arrived < len(arrivals) and arrivals[arrived].seconds <= seconds:
            tokens = sum(arrivals[arrived].lengths)
            if is_let_in(waiting, tokens):
                order.admit(arrived, arrivals[arrived].lengths)
                left[arrived] = tokens
                waiting += tokens
            arrived += 1
        used = order.step()
        if tokens := sum(used.values()):
            seconds += tokens / TOKENS_PER_SECOND + SECONDS_PER_STEP
        for request_id in used.keys() & left:
            waiting -= used[request_id]
            left[request_id] -= used[request_id]
            if not left[request_id]:
                del left[request_id]
                latencies[request_id] = seconds - arrivals[request_id].seconds
        others_wait = beside(used, seconds)
    return latencies


def summary(latencies: list[float | None]) -> dict[str, float]:
    """Mean, median and 99th percentile, in seconds."""
    done = sorted(latency for latency in latencies if latency is not None)
    return {
        "mean_s": round(sum(done) / len(done), 4),
        "p50_s": round(done[len(done) // 2], 4),
        "p99_s": round(done[int(len(done) * 0.99)], 4),
    }


def longest_wait_of_bound(
    mix: Mix, requests: int, seed: int, oldest_share: float = OLDEST_SHARE
) -> dict[str, float]:
    """The refused requests at a load of 1.5 with a limit on the queue, and the longest latency of others as a
    part of (queue limit + T) / (share of the oldest * tokens a second), for a request of T tokens."""
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
    """Latencies of the requests of 20 docstrings that are let in, for a short wait. Some have less than 2,048
    tokens, and go before all others."""
    texts = [request.documents for request in docstring_requests(200, 20, 0)]
    sizes = [[min(256, round(_TOKENS_A_WORD * len(text.split()))) for text in each] for each in texts]
    order = SchedulerOrder(BUDGET, oldest_share, overdue_share)
    most = WAIT_SECONDS * TOKENS_PER_SECOND
    latencies = simulate(
        _arrivals(load, requests, statistics.mean(map(sum, sizes)), lambda draw: draw.choice(sizes), seed),
        order,
        lambda waiting, tokens: not waiting or order.scheduler.work_ahead(tokens) <= most,
    )
    return summary(latencies)


def tokens_of_tenants(weights: dict[str, float], steps: int, seed: int) -> dict[str, int]:
    """Tokens that each tenant gets in some steps while all have requests of all sizes waiting."""
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
    """Latencies and tokens a second of clients that each send a pair of 1,024 to 3,072 tokens, then the next
    when it is answered. A step is chosen when the one before begins, as on a GPU, and takes as long as a full
    step of `budget` tokens."""
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


def measure_order_of_work(requests: int, seeds: int, oldest_share: float, overdue_share: float) -> Figures:
    """Every order's latencies, which are printed as they come; those far beyond what can be served; the bound
    for the slowest request; clients that wait for their answers; and the shares of two tenants."""
    makers: dict[str, Callable[[], Order]] = {
        "maxsimd": lambda: SchedulerOrder(BUDGET, oldest_share, overdue_share),
        "round robin": lambda: RoundRobin(BUDGET),
        "first come": lambda: FirstComeFirstServed(BUDGET),
    }
    click.echo("latency in seconds: mean, median, p99")
    columns = "".join(f"{name:>24}" for name in makers)
    click.echo(f"{'mix':<26}{'load':>5}{'seed':>5}{columns}")
    rows = []
    for (name, mix), load, seed in product(MIXES.items(), LOADS, range(1, seeds + 1)):
        arrivals = poisson_arrivals(load, requests, mix, seed)
        latencies = {order: summary(simulate(arrivals, make())) for order, make in makers.items()}
        rows.append({"mix": name, "load": load, "seed": seed, "latency": latencies})
        shown = "".join(
            f"{figures['mean_s']:>10.3f}{figures['p50_s']:>7.2f}{figures['p99_s']:>7.2f}"
            for figures in latencies.values()
        )
        click.echo(f"{name:<26}{load:>5}{seed:>5}{shown}")
    beyond = {
        f"load_{load:g},_seed_{seed}": beyond_what_can_be_served(
            load, int(load * requests), seed, oldest_share, overdue_share
        )
        for load, seed in product(LOADS_BEYOND, range(1, seeds + 1))
    }
    orders = {"maxsimd": SchedulerOrder, "first come": FirstComeFirstServed}
    shares = tokens_of_tenants({"a": 1.0, "b": 3.0}, 1000, 1)
    return {
        "orders": rows,
        "beyond": beyond,
        "bound": {name: longest_wait_of_bound(mix, requests, 1, oldest_share) for name, mix in MIXES.items()},
        "closed_loop": {
            name: closed_loop(order(CLOSED_LOOP_BUDGET), 64, requests, CLOSED_LOOP_BUDGET, 1)
            for name, order in orders.items()
        },
        "tokens_of_a_tenant_of_weight_3_over_one_of_1": round(shares["b"] / shares["a"], 4),
    }


BATCH_DOCUMENTS = 10_000
_BATCHES_WAITING = 2
# Documents of the other requests, their load and their number.
CASES = ((1, 0.3, 4000), (20, 0.6, 800), (100, 0.8, 300))
PRIORITIES = (0, 1, 2, 3, 4, 5, 8)


def beside_batches(documents: int, load: float, requests: int, priority: int | None) -> dict[str, float]:
    """Latencies of requests that come at random, and the batches' share of the device: two batches of another
    tenant always wait, unless `priority` is None."""
    arrivals = poisson_arrivals(load, requests, ((1.0, documents),), seed=1)
    draw, order = random.Random(1), SchedulerOrder(BUDGET)
    # The tokens left of each batch; batches have the ids from `requests` on.
    batches: dict[int, int] = {}
    admitted, of_batches, seconds = count(requests), 0, 0.0

    def run_batches(used: Mapping[int, int], now: float) -> bool:
        nonlocal of_batches, seconds
        seconds = now
        for number in used.keys() & batches:
            of_batches += used[number]
            batches[number] -= used[number]
            if not batches[number]:
                del batches[number]
        while priority is not None and len(batches) < _BATCHES_WAITING:
            lengths = [draw.randint(50, 150) for _ in range(BATCH_DOCUMENTS)]
            number = next(admitted)
            order.admit(number, lengths, "batches", priority)
            batches[number] = sum(lengths)
        return bool(batches)

    latencies = simulate(arrivals, order, beside=run_batches)
    share = of_batches / seconds / (NOMINAL * TOKENS_PER_SECOND)
    return summary(latencies) | {"batch_share": round(share, 3)}


def measure_beside_batches() -> Figures:
    """The figures of every case, without batches and by their priority."""
    return {
        f"{documents} documents, load {load}": {
            "no batches" if priority is None else f"priority {priority}": beside_batches(
                documents, load, requests, priority
            )
            for priority in (None, *PRIORITIES)
        }
        for documents, load, requests in CASES
    }
