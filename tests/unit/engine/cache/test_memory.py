"""The cache in memory: its limit, which entries stay when there is no room for all, and what is said."""

import functools
import logging
import random
from collections.abc import Sequence

import pytest
import torch

from maxsimd.engine.cache.entry import CachedEmbedding
from maxsimd.engine.cache.frequency import FrequencySketch
from maxsimd.engine.cache.memory import MemoryStore
from maxsimd.engine.cache.scores import CachedScore, ScoreCache
from maxsimd.engine.cache.store import EmbeddingCache
from tests.unit.engine.cache.entries import key


@functools.cache
def entry(rows: int) -> CachedEmbedding:
    """An embedding of 64 bytes a row."""
    return CachedEmbedding(torch.zeros(rows, 16), None, rows, False)


SIZE = entry(4).nbytes


def hits(store: MemoryStore, asked: Sequence[int]) -> int:
    """How many of these are there when they are asked for, each being put in where it is not."""
    found = 0
    for number in asked:
        if store.get(key(number)) is not None:
            found += 1
        else:
            store.put(key(number), entry(4))
    return found


def filled(rows: list[int], limit: int) -> MemoryStore[CachedEmbedding]:
    """A store of that many rows, after entries of so many each were put in."""
    store: MemoryStore[CachedEmbedding] = MemoryStore(limit * entry(1).nbytes)
    for number, each in enumerate(rows):
        store.put(key(number), entry(each))
    return store


def inside(store: MemoryStore[CachedEmbedding]) -> list[int]:
    return [number for number in range(10) if store.get(key(number)) is not None]


def test_memory_takes_entries_up_to_its_limit_exactly() -> None:
    store = filled([2, 3], limit=2)
    assert inside(store) == [0]
    assert (len(store), store.nbytes, store.evictions) == (1, entry(2).nbytes, 0)
    full = filled([2, 2], limit=4)
    assert (len(full), full.nbytes, full.evictions) == (2, full.limit, 0)


def test_memory_evicts_as_many_as_what_is_asked_for_more_needs() -> None:
    for rows, evicted in ((4, 2), (2, 1)):
        store = filled([2, 2, 2], limit=6)
        assert store.get(key(0)) is not None
        assert store.get(key(9)) is None
        store.put(key(9), entry(rows))
        assert 9 in inside(store)
        assert len(inside(store)) == 4 - evicted
        assert (store.nbytes, store.evictions) == (store.limit, evicted)
    assert inside(store)[0] == 0, "what was asked for stays"
    store.clear()
    assert (len(store), store.nbytes) == (0, 0)


def test_memory_counts_replaced_and_dropped_entries() -> None:
    store = filled([2, 2], limit=50)
    store.put(key(0), entry(5))
    found = store.get(key(0))
    assert found is not None
    assert len(found.rows) == 5
    assert (len(store), store.nbytes) == (2, entry(7).nbytes)
    store.drop(key(0))
    store.drop(key(7))
    assert store.get(key(0)) is None
    assert (len(store), store.nbytes) == (1, entry(2).nbytes)


@pytest.mark.parametrize(("room", "times"), [(100, 1.1), (100, 4), (300, 2)])
def test_a_loop_over_more_than_fits_hits_nearly_what_is_possible(room: int, times: float) -> None:
    asked = list(range(int(times * room))) * 3
    # At most as many as there is room for are hit in each pass but the first.
    assert hits(MemoryStore(room * SIZE), asked) >= 0.8 * 2 * room


def test_a_scan_between_requests_takes_little_from_them() -> None:
    room, draw = 250, random.Random(1)
    hot = list(range(200))
    store = MemoryStore(room * SIZE)
    hits(store, draw.choices(hot, k=2000))
    asked_for = found = 0
    for start in range(10_000, 10_000 + 10 * room, 50):
        hits(store, range(start, start + 50))
        found += hits(store, draw.choices(hot, k=10))
        asked_for += 10
    assert found >= 0.9 * asked_for


def test_what_is_asked_for_now_replaces_what_was_before() -> None:
    room, draw = 200, random.Random(2)
    store = MemoryStore(room * SIZE)
    hits(store, draw.choices(range(150), k=1500))
    for _ in range(6):
        hits(store, draw.choices(range(1000, 1150), k=1500))
    assert hits(store, range(1000, 1150)) >= 140


def test_entries_of_any_size_never_take_more_than_the_limit() -> None:
    draw = random.Random(0)
    store = MemoryStore(40 * SIZE)
    sizes = {number: draw.choice([1, 2, 4, 8, 40, 159, 160, 161]) for number in range(200)}
    for _ in range(3000):
        number = min(199, int(draw.expovariate(1 / 40)))
        if draw.random() < 0.05:
            store.drop(key(number))
        elif store.get(key(number)) is None:
            store.put(key(number), entry(sizes[number]))
        assert store.nbytes <= store.limit
    inside = {n: entry(sizes[n]).nbytes for n in range(200) if store.get(key(n)) is not None}
    assert (len(store), store.nbytes) == (len(inside), sum(inside.values()))


def test_a_count_is_never_too_low_and_seldom_too_high() -> None:
    sketch, draw = FrequencySketch(4096), random.Random(0)
    asked = [min(999, int(draw.expovariate(1 / 100))) for _ in range(5000)]
    for number in asked:
        sketch.count(key(number), 100_000)
    exact = [asked.count(number) for number in range(1000)]
    estimates = [sketch.estimate(key(number)) for number in range(1000)]
    assert all(one >= min(255, other) for one, other in zip(estimates, exact, strict=True))
    assert sum(one > other for one, other in zip(estimates, exact, strict=True)) < 20


@pytest.mark.parametrize("limit", [0, SIZE - 1, 10 * SIZE, 100 * SIZE, 300 * SIZE])
def test_a_resized_store_holds_what_then_fits(limit: int) -> None:
    store: MemoryStore[CachedEmbedding] = MemoryStore(100 * SIZE)
    draw = random.Random(0)
    for number in range(200):
        store.put(key(number), entry(draw.randint(1, 4)))
    often = [number for number in range(200) if store.peek(key(number)) is not None][:5]
    for number in often * 20:
        store.get(key(number))
    before = store.nbytes
    store.resize(limit)
    assert store.nbytes <= limit
    assert store.nbytes >= min(before, limit) - 2 * SIZE
    assert limit < 10 * SIZE or all(store.peek(key(number)) is not None for number in often)
    for number in range(1000, 1400):
        store.put(key(number), entry(4))
    assert store.nbytes <= limit
    assert store.nbytes >= min(before, limit) - 2 * SIZE


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_caches_of_embeddings_and_of_scores_say_what_to_change(caplog: pytest.LogCaptureFixture) -> None:
    embeddings = EmbeddingCache(b"", "float32", MemoryStore(500 * SIZE), None)
    scores = ScoreCache(500 * 512)
    for cache, advice in ((embeddings, "(cache_dir)"), (scores, "raise cache_mb")):
        for _ in range(2):
            assert not warnings(caplog)
            for number in range(1500):
                if isinstance(cache, ScoreCache):
                    if cache.find([key(number)]) == [None]:
                        cache.put([(key(number), CachedScore(0.0, 1, 0, False, 1))])
                elif cache.get(key(number)) is None:
                    cache.put([(key(number), entry(4))])
        (warning,) = warnings(caplog)
        assert "too small" in warning
        assert advice in warning
        caplog.clear()
    embeddings.close()


def test_the_key_of_a_score_depends_on_each_text() -> None:
    keys = {
        ScoreCache.key(*texts)
        for texts in (("a", "bc", ""), ("ab", "c", ""), ("", "abc", ""), ("a", "b", "c"))
    }
    assert len(keys) == 4


def test_scores_take_no_more_than_their_limit() -> None:
    cache = ScoreCache(10 * 512)
    cache.put((bytes([i]) * 32, CachedScore(float(i), 1, 0, False, 1)) for i in range(30))
    assert (cache.entries, cache.memory_bytes, cache.evictions) == (10, 5120, 20)
    assert sum(entry is not None for entry in cache.find([bytes([i]) * 32 for i in range(30)])) == 10
    assert (cache.hits, cache.misses) == (10, 20)
