"""Requests for the scheduler's tests, and marks of those that take long."""

import numpy as np

from maxsimd.scheduler import CachedBatch, DocumentPayload, ResultSlot, Scheduler, Step, Tokens, TokenSequence
from maxsimd.scheduler.sequence import ImageJob, PlacedImage

WORDS = np.zeros(100_000, dtype=np.int32)


def tokens(length: int) -> Tokens:
    return Tokens(WORDS[:length])


def texts(request_id: int, lengths: list[int], first_id: int = 0) -> list[TokenSequence]:
    return [
        TokenSequence.text(first_id + i, ResultSlot(request_id, i), "embed", tokens(length))
        for i, length in enumerate(lengths)
    ]


def document(request_id: int, sequence_id: int, size: int, query_id: int, scoring: int = 0) -> TokenSequence:
    slot, payload = ResultSlot(request_id, sequence_id), DocumentPayload(query_id)
    return TokenSequence.document(sequence_id, slot, "embed", tokens(size), payload, scoring)


def query(request_id: int, sequence_id: int, length: int, num_consumers: int = 1) -> TokenSequence:
    return TokenSequence.query(sequence_id, request_id, "embed", tokens(length), num_consumers)


def cached(request_id: int, price: int, query_id: int = -1) -> CachedBatch:
    """One cached document; unless a query is given, of one that was scheduled long ago."""
    return CachedBatch(request_id, query_id, price, ("document",))


def two_stage(
    request_id: int, queries: list[int], lengths: list[int], prices: list[int], first_id: int = 0
) -> tuple[list[TokenSequence], list[CachedBatch]]:
    """Queries of the given lengths, with documents and cached batches that go round them."""
    count = len(queries)
    consumers = [len(lengths[i::count]) + len(prices[i::count]) for i in range(count)]
    sequences = [query(request_id, first_id + i, n, max(1, consumers[i])) for i, n in enumerate(queries)]
    for i, length in enumerate(lengths):
        sequences.append(document(request_id, first_id + count + i, length, first_id + i % count))
    return sequences, [cached(request_id, price, first_id + i % count) for i, price in enumerate(prices)]


def pairs(request_id: int, shared: int, lengths: list[int], first_id: int = 0) -> list[TokenSequence]:
    """A prefix, and pairs with `lengths` tokens of their own behind it."""
    prefix = TokenSequence.prefix(first_id, request_id, tokens(shared), len(lengths))
    return [prefix] + [
        TokenSequence.pair(first_id + 1 + i, ResultSlot(request_id, i), tokens(shared + length), prefix)
        for i, length in enumerate(lengths)
    ]


# Price and features of a picture.
Picture = tuple[int, int]


def pages(
    request_id: int, first_id: int, documents: list[list[Picture]], query_length: int, words: int = 3
) -> tuple[list[TokenSequence], list[ImageJob]]:
    """A query and documents, each with pictures and some words behind them."""
    sequences, images = [query(request_id, first_id, query_length, max(1, len(documents)))], []
    next_id = first_id + 1
    for index, pictures in enumerate(documents):
        slot, placed, length = ResultSlot(request_id, index), [], 0
        for i, (price, features) in enumerate(pictures):
            placed.append(PlacedImage(next_id, np.arange(length, length + features), None, b""))
            together = sum(features for _, features in pictures) if i == 0 else 0
            images.append(ImageJob(next_id, request_id, price, together, None, slot))
            next_id, length = next_id + 1, length + features
        tokens = Tokens(WORDS[: length + words], images=tuple(placed))
        sequences.append(TokenSequence.document(next_id, slot, "embed", tokens, DocumentPayload(first_id)))
        next_id += 1
    return sequences, images


def scheduled(scheduler: Scheduler) -> Step:
    step = scheduler.schedule()
    assert step is not None
    return step


def run_dry(scheduler: Scheduler, most: int = 100_000) -> list[Step]:
    steps = []
    while (step := scheduler.schedule()) is not None:
        assert step.num_parts > 0
        steps.append(step)
        assert len(steps) < most, "the scheduler does not come to an end"
    return steps


def cost(step: Step) -> int:
    return step.num_tokens + sum(batch.price for batch in step.cached)


def tokens_by_request(step: Step | None) -> dict[int, int]:
    """The tokens that each request is given in a step, cached batches at their price."""
    given: dict[int, int] = {}
    for chunk in step.chunks if step is not None else ():
        request_id = chunk.sequence.request_id
        given[request_id] = given.get(request_id, 0) + len(chunk)
    for batch in step.cached if step is not None else ():
        given[batch.request_id] = given.get(batch.request_id, 0) + batch.price
    return given
