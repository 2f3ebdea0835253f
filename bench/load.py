"""Sends requests at a given concurrency or rate and takes the time of each."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from tqdm import tqdm

from maxsimd.bench.datasets import Request
from maxsimd.bench.report import Outcome

# Sends one request and returns the scores by document index, and the tokens that were run.
Send = Callable[[Request], Awaitable[tuple[dict[int, float], int]]]


async def drive(
    send: Send, requests: Sequence[Request], concurrency: int, rate: float | None, seed: int
) -> tuple[float, list[Outcome]]:
    """Sends all requests, `concurrency` at a time, or at `rate` a second with random (Poisson) arrivals.

    Returns the seconds it took and the outcomes in the order of the requests."""
    gate = asyncio.Semaphore(concurrency)
    draw = random.Random(seed)
    with tqdm(total=len(requests), unit="req", leave=False) as bar:

        async def one(request: Request) -> Outcome:
            async with gate:
                outcome = await _time(send, request)
            bar.update()
            return outcome

        started = time.perf_counter()
        tasks = []
        for request in requests:
            tasks.append(asyncio.create_task(one(request)))
            if rate is not None:
                await asyncio.sleep(draw.expovariate(rate))
        outcomes = await asyncio.gather(*tasks)
    return time.perf_counter() - started, list(outcomes)


def p99(values: Sequence[float]) -> float:
    """The value that 99% of them do not exceed."""
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


async def _time(send: Send, request: Request) -> Outcome:
    started = time.perf_counter()
    try:
        scores, tokens = await send(request)
    except Exception as error:
        return Outcome(time.perf_counter() - started, len(request.documents), 0, error=f"{error}")
    seconds = time.perf_counter() - started
    return Outcome(seconds, len(request.documents), tokens, _rank(request, scores))


def _rank(request: Request, scores: dict[int, float]) -> int | None:
    """The place of the known answer; a tie counts against it."""
    if request.answer is None:
        return None
    own = scores[request.answer]
    return 1 + sum(score >= own for i, score in scores.items() if i != request.answer)
