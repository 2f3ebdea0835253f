"""Entries as bytes, the writer, memory and disk together, and which entries memory keeps."""

import functools
import itertools
import logging
import math
import random
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from maxsimd.engine.cache import embeddings as cached
from maxsimd.engine.cache import store as stores
from maxsimd.engine.cache.disk import DiskStore
from maxsimd.engine.cache.store import (
    CachedScore,
    EmbeddingCache,
    MemoryStore,
    PairKeys,
    RunFacts,
    ScoreCache,
)
from maxsimd.engine.processors.processor import find_scores
from maxsimd.engine.requests import ScoreRequest
from maxsimd.pooling.ragged import Ragged
from tests.unit.engine.cache.entries import entry, key, same

HEADER = struct.Struct("<4sBBIII")
CHECKSUM = struct.Struct("<I")


# Entries as bytes


@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"),
    [("float32", torch.float32, 0), ("bfloat16", torch.bfloat16, 4e-3), ("int8", torch.int8, 8e-3)],
)
def test_entries_survive_as_bytes(precision: cached.Precision, dtype: torch.dtype, tolerance: float) -> None:
    rows = torch.nn.functional.normalize(entry(1, rows=3).rows, dim=-1)
    for given, truncated in ((rows, False), (rows.bfloat16(), True), (rows[:0], False), (rows.t(), True)):
        values, scales = cached.rounded(given, precision)
        assert (values.dtype, scales is None) == (dtype, precision != "int8")
        decoded = Ragged(values, (0, len(given)), scales).decoded(torch.float32).values
        torch.testing.assert_close(decoded, given.float(), atol=tolerance, rtol=0)
        stored = cached.CachedEmbedding(values, scales, 70_000, truncated)
        assert stored.nbytes == values.nbytes + (0 if scales is None else len(given) * 4)
        data = stored.to_bytes(key(1))
        assert len(data) == HEADER.size + CHECKSUM.size + stored.nbytes
        back = cached.CachedEmbedding.from_bytes(key(1), data)
        assert back is not None
        assert (back.rows.dtype, back.tokens, back.truncated) == (dtype, 70_000, truncated)
        assert torch.equal(back.rows, values)
        assert equal_scales(back.scales, scales)
        assert back.is_finite
    for number in (math.nan, math.inf, -math.inf):
        rows[1, 2] = number
        assert not cached.CachedEmbedding(*cached.rounded(rows, precision), 3, False).is_finite


def equal_scales(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other is None or (one is not None and other is not None and torch.equal(one, other))


def _with_header(**changes: Any) -> bytes:
    """An entry of 2 x 4 float32 numbers with another header, and its checksum unless one is given."""
    payload = entry(1).to_bytes(key(1))[HEADER.size + CHECKSUM.size :]
    fields = {"magic": b"mxc2", "code": 0, "truncated": 0, "tokens": 2, "rows": 2, "dim": 4}
    header = HEADER.pack(*(fields | {name: changes[name] for name in fields if name in changes}).values())
    checksum = changes.get("checksum", zlib.crc32(key(1) + header + payload))
    return header + CHECKSUM.pack(checksum) + payload


def test_bytes_whose_header_does_not_fit_are_refused() -> None:
    """Folders outlive versions: another layout needs another magic. What says to be larger than any memory,
    or to have no columns, is refused before memory is taken for it."""
    assert _with_header() == entry(1).to_bytes(key(1))
    most = 2**32 - 1
    for changes in (
        *({"magic": b"mxc1"}, {"code": 1}, {"code": 2}, {"code": 3}, {"checksum": 0}),
        *({"rows": 3}, {"rows": 1}, {"dim": 5}, {"dim": 0}),
        *({"rows": most, "dim": most}, {"rows": most, "dim": 1}, {"rows": 1, "dim": most}),
    ):
        assert cached.CachedEmbedding.from_bytes(key(1), _with_header(**changes)) is None, changes
    nothing = HEADER.pack(b"mxc2", 0, 0, 2, most, 0)
    checksum = CHECKSUM.pack(zlib.crc32(key(1) + nothing))
    assert cached.CachedEmbedding.from_bytes(key(1), nothing + checksum) is None


def test_every_byte_of_an_entry_and_of_its_key_counts() -> None:
    for precision in ("float32", "int8"):
        data = cached.CachedEmbedding(*cached.rounded(entry(1).rows, precision), 7, True).to_bytes(key(1))
        assert cached.CachedEmbedding.from_bytes(key(1), data) is not None
        for position in range(len(data)):
            changed = data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
            assert cached.CachedEmbedding.from_bytes(key(1), changed) is None, position
            assert cached.CachedEmbedding.from_bytes(key(1), data[:position]) is None, position
        for position in range(32):
            other = key(1)[:position] + bytes([key(1)[position] ^ 1]) + key(1)[position + 1 :]
            assert cached.CachedEmbedding.from_bytes(other, data) is None, position


def test_int8_uses_its_whole_range_in_every_row() -> None:
    rows = torch.tensor([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0], [3.0, 1.0, -2.0]], dtype=torch.bfloat16)
    values, scales = cached.rounded(rows, "int8")
    assert values.tolist() == [[64, -127, 32], [0, 0, 0], [127, 42, -85]]
    assert scales is not None
    torch.testing.assert_close(scales, torch.tensor([1 / 127, 1e-12 / 127, 3 / 127]))


# New embeddings on their way


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_arriving_embeddings_become_entries_of_their_own(precision: cached.Precision) -> None:
    first, second = entry(1, rows=2).rows, entry(2, rows=3).rows
    values, scales = cached.rounded(torch.cat([first, second]), precision)
    arriving = cached.PendingEmbeddings(
        [cached.EmbeddingFacts(key(1), 11, False), cached.EmbeddingFacts(key(2), 12, True)],
        Ragged(values, (0, 2, 5), scales),
    )
    expected = [cached.rounded(first, precision), cached.rounded(second, precision)]
    assert (len(arriving), arriving.keys) == (2, [key(1), key(2)])
    assert arriving.nbytes == values.nbytes + (0 if scales is None else scales.nbytes)
    entries = [(name, arriving.entry(i)) for i, name in enumerate(arriving.keys)]
    values.zero_()
    if scales is not None:
        scales.zero_()
    facts = [(name, found.tokens, found.truncated) for name, found in entries]
    assert facts == [(key(1), 11, False), (key(2), 12, True)]
    for (_, found), (rows, own_scales) in zip(entries, expected, strict=True):
        assert torch.equal(found.rows, rows)
        assert equal_scales(found.scales, own_scales)


# The writer: what it cannot take in is not cached, and counted


def staged(*keys: bytes) -> cached.PendingEmbeddings:
    """Embeddings of one row of four float32 numbers, 16 bytes each."""
    rows = Ragged(torch.arange(4.0 * len(keys)).view(-1, 4), tuple(range(len(keys) + 1)))
    return cached.PendingEmbeddings([cached.EmbeddingFacts(key, 3, False) for key in keys], rows)


class Written:
    def __init__(self) -> None:
        self.go = threading.Event()
        self.entries: dict[bytes, cached.CachedEmbedding] = {}

    def write(self, entries: list[tuple[bytes, cached.CachedEmbedding]]) -> None:
        self.go.wait(1200)
        self.entries |= dict(entries)


def test_staged_embeddings_are_found_and_written_up_to_a_limit() -> None:
    written = Written()
    writer = cached.CacheWriter(written.write, limit=48)
    writer.stage(staged(b"a", b"b"))
    found = writer.get(b"b")
    assert found is not None
    assert found.rows.tolist() == [[4, 5, 6, 7]]
    assert (writer.num_staged, writer.flush(0)) == (2, False)
    writer.stage(staged(b"c", b"d"))
    writer.stage(staged(b"e"))
    assert (writer.skipped, writer.num_staged, writer.get(b"c")) == (2, 3, None)
    written.go.set()
    assert writer.flush(20)
    assert (writer.num_staged, writer.get(b"b"), set(written.entries)) == (0, None, {b"a", b"b", b"e"})
    writer.stage(staged(b"f"))
    writer.close()
    assert b"f" in written.entries
    tried: list[list[bytes]] = []

    def write(entries: list[tuple[bytes, cached.CachedEmbedding]]) -> None:
        tried.append([key for key, _ in entries])
        if tried[-1] == [b"a"]:
            raise OSError("no space left")

    writer = cached.CacheWriter(write, limit=1000)
    writer.stage(staged(b"a"))
    writer.stage(staged(b"b"))
    assert writer.flush(20)
    writer.close()
    assert (tried, writer.num_staged) == ([[b"a"], [b"b"]], 0)


# Both together


def _cache(limit: int = 10_000, disk: Any = None, precision: cached.Precision = "float32") -> EmbeddingCache:
    return EmbeddingCache(b"model", precision, MemoryStore(limit), disk)


def test_an_entry_is_found_while_it_is_written() -> None:
    class Late(MemoryStore[cached.CachedEmbedding]):
        def get(self, key: bytes) -> None:
            """As before the entry is written, which it is afterwards."""
            assert cache.flush(60)

    cache = EmbeddingCache(b"model", "float32", Late(10_000), None)
    cache.stage(staged(b"a"))
    assert cache.get(b"a") is not None
    cache.close()


def test_a_key_depends_on_the_model_the_text_and_how_it_is_read() -> None:
    cache = _cache()
    other = EmbeddingCache(b"another", "float32", MemoryStore(1), None)
    keys = {
        cache.key("text", "how"), cache.key("texts", "how"), cache.key("text", "other"),
        cache.key("how", "text"), cache.key("wtext", "ho"), cache.key("\ud800", "how"),
        other.key("text", "how"),
    }  # fmt: skip
    assert len(keys) == 7
    assert {len(found) for found in keys} == {32}
    # Later versions read the same folder: a key that is made otherwise would waste all its entries.
    digest = "0448e570da55657f873218ebe03eba8a1a0170d535e9916f56806eb8abfa64eb"
    assert cache.key("a text", "as it is").hex() == digest


def test_entries_go_to_memory_and_disk_and_leave_both(disk: DiskStore) -> None:
    cache = _cache(disk=disk)
    cache.wait_until_warm(10)
    disk.put([(key(1), entry(1))])
    assert (cache.memory_bytes, cache.entries) == (0, 1)
    for _ in range(2):  # from the disk, and then from memory
        assert same(cache.get(key(1)), entry(1))
        assert cache.memory_bytes == entry(1).nbytes
        disk.clear()
    assert cache.get(key(2)) is None
    cache.put((key(number), entry(number)) for number in range(3))
    assert (cache.entries, len(disk), cache.memory_bytes) == (3, 3, 3 * entry(0).nbytes)
    assert cache.disk_bytes == disk.nbytes > 0
    cache.drop(key(1))
    assert cache.get(key(1)) is None
    assert (cache.entries, len(disk), cache.memory_bytes) == (2, 2, 2 * entry(0).nbytes)
    disk.evictions = 40
    assert cache.evictions == 40, "those from disk count too"
    cache.clear()
    assert (cache.entries, len(disk), cache.memory_bytes) == (0, 0, 0)
    assert cache.disk_bytes == disk.nbytes


def test_a_cache_without_a_disk_has_what_is_in_memory() -> None:
    cache = _cache(limit=2 * entry(0).nbytes)
    cache.put([(key(number), entry(number)) for number in range(3)])
    assert (cache.entries, cache.evictions, cache.disk_bytes) == (2, 1, 0)
    cache.count(3, 5)
    cache.count(1, 2)
    assert (cache.hits, cache.misses) == (4, 7)
    cache.wait_until_warm(10)
    cache.drop(key(0))
    assert cache.entries == 1, "the third did not take the place of one that was asked for as often"
    cache.clear()
    assert cache.entries == 0
    cache.close()


class _Disk:
    """Stands in for a disk whose newest entries come as the test says."""

    def __init__(self, newest: Iterator[tuple[bytes, cached.CachedEmbedding | None]]) -> None:
        self.newest = lambda: newest
        self.evictions = 0
        self.closed = False

    def __len__(self) -> int:
        return 0

    def get(self, name: bytes) -> None:
        return None

    def clear(self) -> None: ...

    def drop(self, name: bytes) -> None: ...

    def close(self) -> None:
        self.closed = True


def test_an_entry_that_is_forgotten_while_it_is_read_does_not_come_back() -> None:
    disk: Any = _Disk(iter(()))
    cache = _cache(disk=disk)
    for forget in (cache.clear, lambda: cache.drop(key(1))):
        disk.get = lambda name, forget=forget: forget() or entry(1)
        assert same(cache.get(key(1)), entry(1))
        assert cache.memory_bytes == 0


def _started(
    newest: Iterator[tuple[bytes, cached.CachedEmbedding | None]], entries: int
) -> tuple[EmbeddingCache, MemoryStore[cached.CachedEmbedding]]:
    memory: MemoryStore[cached.CachedEmbedding] = MemoryStore(entries * entry(0).nbytes)
    disk: Any = _Disk(newest)
    return EmbeddingCache(b"", "float32", memory, disk), memory


def _counting(read: list[int]) -> Iterator[tuple[bytes, cached.CachedEmbedding | None]]:
    """Entries without end, the newest of them damaged; `read` has those that were read."""
    yield key(100), None
    for number in itertools.count():
        read.append(number)
        yield key(number), entry(number)
        time.sleep(0.001)


def test_a_start_fills_memory_with_the_newest_to_the_byte() -> None:
    read: list[int] = []
    cache, memory = _started(_counting(read), entries=3)
    cache.wait_until_warm(10)
    assert read == [0, 1, 2, 3]
    assert cache.evictions == 0
    assert [memory.peek(key(number)) is not None for number in (0, 1, 2, 3, 100)] == [True] * 3 + [False] * 2
    assert [memory.get(key(3)) for _ in range(2)] == [None, None]
    memory.put(key(3), entry(3))
    assert memory.get(key(3)) is not None, "what was asked for twice takes the place of what was read once"
    assert len(memory) == 3


def test_a_start_waits_for_a_slow_disk_only_for_so_long() -> None:
    go = threading.Event()

    def newest() -> Iterator[tuple[bytes, cached.CachedEmbedding]]:
        go.wait(1200)
        yield key(1), entry(1)

    disk: Any = _Disk(newest())
    cache = _cache(disk=disk)
    [reader] = [thread for thread in threading.enumerate() if thread.name == "maxsimd-cache"]
    assert reader.daemon
    begun = time.monotonic()
    cache.wait_until_warm(0.05)
    assert 0.04 < time.monotonic() - begun < 60
    assert reader.is_alive()
    go.set()
    cache.close()
    assert not reader.is_alive()
    assert disk.closed


@pytest.mark.parametrize("end", ["clear", "close"])
def test_reading_at_a_start_ends_with_a_clear_or_a_close(end: str) -> None:
    def damaged() -> Iterator[tuple[bytes, cached.CachedEmbedding | None]]:
        while True:
            yield key(0), None
            time.sleep(0.001)

    for newest in (_counting([]), damaged()):
        cache, memory = _started(newest, entries=1 << 40)
        time.sleep(0.02)
        getattr(cache, end)()
        assert "maxsimd-cache" not in {thread.name for thread in threading.enumerate()}
        assert memory.nbytes == 0


@functools.cache
def zeros(rows: int) -> cached.CachedEmbedding:
    """An embedding of 64 bytes a row."""
    return cached.CachedEmbedding(torch.zeros(rows, 16), None, rows, False)


SIZE = zeros(4).nbytes


def hits(store: MemoryStore, asked: Sequence[int]) -> int:
    """How many of these are there when they are asked for, each being put in where it is not."""
    found = 0
    for number in asked:
        if store.get(key(number)) is not None:
            found += 1
        else:
            store.put(key(number), zeros(4))
    return found


def filled(rows: list[int], limit: int) -> MemoryStore[cached.CachedEmbedding]:
    store: MemoryStore[cached.CachedEmbedding] = MemoryStore(limit * zeros(1).nbytes)
    for number, each in enumerate(rows):
        store.put(key(number), zeros(each))
    return store


def inside(store: MemoryStore[cached.CachedEmbedding]) -> list[int]:
    return [number for number in range(10) if store.get(key(number)) is not None]


def test_memory_takes_entries_up_to_its_limit_and_evicts() -> None:
    store = filled([2, 3], limit=2)
    assert inside(store) == [0]
    assert (len(store), store.nbytes, store.evictions) == (1, zeros(2).nbytes, 0)
    full = filled([2, 2], limit=4)
    assert (len(full), full.nbytes, full.evictions) == (2, full.limit, 0)
    for rows, evicted in ((4, 2), (2, 1)):
        store = filled([2, 2, 2], limit=6)
        assert store.get(key(0)) is not None
        assert store.get(key(9)) is None
        store.put(key(9), zeros(rows))
        assert 9 in inside(store)
        assert len(inside(store)) == 4 - evicted
        assert (store.nbytes, store.evictions) == (store.limit, evicted)
    assert inside(store)[0] == 0, "what was asked for stays"
    store.clear()
    assert (len(store), store.nbytes) == (0, 0)


@pytest.mark.parametrize(("room", "times"), [(100, 1.1), (100, 4), (300, 2)])
def test_a_loop_over_more_than_fits_hits_nearly_what_is_possible(room: int, times: float) -> None:
    asked = list(range(int(times * room))) * 3
    # At most as many as there is room for are hit in each pass but the first.
    assert hits(MemoryStore(room * SIZE), asked) >= 0.8 * 2 * room


def test_requests_outlast_scans_and_replace_what_was() -> None:
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
    room, draw = 200, random.Random(2)
    store = MemoryStore(room * SIZE)
    hits(store, draw.choices(range(150), k=1500))
    for _ in range(6):
        hits(store, draw.choices(range(1000, 1150), k=1500))
    assert hits(store, range(1000, 1150)) >= 140


def test_entries_of_any_size_never_take_more_than_the_limit() -> None:
    draw = random.Random(0)
    store = MemoryStore(40 * SIZE)
    for _ in range(3000):
        number = min(199, int(draw.expovariate(1 / 40)))
        size = draw.choice([1, 2, 4, 8, 40, 159, 160, 161])
        if draw.random() < 0.05:
            store.drop(key(number))
            assert store.peek(key(number)) is None
        elif store.get(key(number)) is None:
            store.put(key(number), zeros(size))
        elif draw.random() < 0.05:
            store.put(key(number), zeros(2))
            assert store.peek(key(number)) is zeros(2)
        assert store.nbytes <= store.limit
        inside = [found.nbytes for n in range(200) if (found := store.peek(key(n))) is not None]
        assert (len(store), store.nbytes) == (len(inside), sum(inside))


def test_a_count_is_never_too_low_and_seldom_too_high() -> None:
    sketch, draw = stores.FrequencySketch(4096), random.Random(0)
    asked = [min(999, int(draw.expovariate(1 / 100))) for _ in range(5000)]
    for number in asked:
        sketch.count(key(number), 100_000)
    exact = [asked.count(number) for number in range(1000)]
    estimates = [sketch.estimate(key(number)) for number in range(1000)]
    assert all(one >= min(255, other) for one, other in zip(estimates, exact, strict=True))
    assert sum(one > other for one, other in zip(estimates, exact, strict=True)) < 20


@pytest.mark.parametrize("limit", [0, SIZE - 1, 10 * SIZE, 100 * SIZE, 300 * SIZE])
def test_a_resized_store_holds_what_then_fits(limit: int) -> None:
    store: MemoryStore[cached.CachedEmbedding] = MemoryStore(100 * SIZE)
    draw = random.Random(0)
    for number in range(200):
        store.put(key(number), zeros(draw.randint(1, 4)))
    often = [number for number in range(200) if store.peek(key(number)) is not None][:5]
    for number in often * 20:
        store.get(key(number))
    before = store.nbytes
    store.resize(limit)
    assert store.nbytes <= limit
    assert store.nbytes >= min(before, limit) - 2 * SIZE
    assert limit < 10 * SIZE or all(store.peek(key(number)) is not None for number in often)
    for number in range(1000, 1400):
        store.put(key(number), zeros(4))
    assert store.nbytes <= limit
    assert store.nbytes >= min(before, limit) - 2 * SIZE


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_caches_of_embeddings_and_of_scores_say_what_to_change(caplog: pytest.LogCaptureFixture) -> None:
    embeddings = EmbeddingCache(b"", "float32", MemoryStore(500 * SIZE), None)
    for cache, advice in ((embeddings, "(cache_dir)"), (ScoreCache(500 * 512), "raise cache_mb")):
        for _ in range(2):
            assert not warnings(caplog)
            for number in range(1500):
                if isinstance(cache, ScoreCache):
                    if cache.find([key(number)]) == [None]:
                        cache.put([(key(number), CachedScore(0.0, RunFacts(1, 0, False, 1)))])
                elif cache.get(key(number)) is None:
                    cache.put([(key(number), zeros(4))])
        (warning,) = warnings(caplog)
        assert "too small" in warning
        assert advice in warning
        caplog.clear()
    embeddings.close()


def test_a_long_query_is_read_once_for_the_keys_of_its_documents() -> None:
    class Counted(str):
        reads = 0

        def encode(self, *how: str) -> bytes:
            Counted.reads += 1
            return super().encode(*how)

    request = ScoreRequest(queries=(Counted("a query"),), documents=("a", "b", "b"))
    keys = find_scores(ScoreCache(10 * 512), request, together=False).keys
    assert (len({*keys}), Counted.reads) == (2, 1)


def test_scores_have_keys_of_their_texts_and_a_limit() -> None:
    texts = (("a", "bc", ""), ("ab", "c", ""), ("", "abc", ""), ("a", "b", "c"))
    assert len({PairKeys(query, how).key(document) for query, document, how in texts}) == 4
    cache = ScoreCache(10 * 512)
    cache.put((bytes([i]) * 32, CachedScore(float(i), RunFacts(1, 0, False, 1))) for i in range(30))
    assert (cache.entries, cache.memory_bytes, cache.evictions) == (10, 5120, 20)
    assert sum(entry is not None for entry in cache.find([bytes([i]) * 32 for i in range(30)])) == 10
    assert (cache.hits, cache.misses) == (10, 20)
