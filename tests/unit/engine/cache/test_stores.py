"""The cache in memory, entries as bytes, and memory and disk together: limits to the byte, orders, counts."""

import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from maxsimd.engine.cache.arriving import About, Arriving
from maxsimd.engine.cache.disk import DiskStore
from maxsimd.engine.cache.entry import CachedEmbedding, Precision, rounded
from maxsimd.engine.cache.memory import MemoryStore
from maxsimd.engine.cache.store import EmbeddingCache
from maxsimd.pooling.ragged import Ragged

MIB = 1024 * 1024
HEADER = struct.Struct("<4sBBIII")
CHECKSUM = struct.Struct("<I")


def entry(seed: int, rows: int = 2, dim: int = 4) -> CachedEmbedding:
    """An embedding of `rows * dim * 4` bytes."""
    values = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))
    return CachedEmbedding(values, None, rows, False)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def same(one: CachedEmbedding | None, other: CachedEmbedding) -> bool:
    return one is not None and torch.equal(one.rows, other.rows)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path / "above" / "cache", 4 * MIB)
    yield store
    store.close()


# Memory


def test_memory_takes_an_entry_of_exactly_its_limit() -> None:
    store = MemoryStore(entry(0).nbytes)
    store.put(key(0), entry(0))
    assert same(store.get(key(0)), entry(0))
    store.put(key(1), entry(1, rows=3))
    assert store.get(key(1)) is None
    assert (len(store), store.nbytes, store.evictions) == (1, entry(0).nbytes, 0)


def test_memory_that_is_exactly_full_evicts_nothing() -> None:
    store = MemoryStore(2 * entry(0).nbytes)
    store.put(key(0), entry(0))
    store.put(key(1), entry(1))
    assert (len(store), store.evictions) == (2, 0)


def test_memory_evicts_as_many_as_a_larger_entry_needs() -> None:
    store = MemoryStore(3 * entry(0).nbytes)
    for number in range(3):
        store.put(key(number), entry(number))
    assert store.get(key(9)) is None
    store.put(key(9), entry(9, rows=4))
    assert store.get(key(9)) is not None
    assert sum(store.get(key(number)) is not None for number in range(3)) == 1
    assert (store.nbytes, store.evictions) == (3 * entry(0).nbytes, 2)


def test_memory_counts_a_replaced_entry_once() -> None:
    store = MemoryStore(1000)
    store.put(key(0), entry(0))
    store.put(key(0), entry(1, rows=5))
    assert same(store.get(key(0)), entry(1, rows=5))
    assert (len(store), store.nbytes) == (1, entry(1, rows=5).nbytes)


def test_memory_drops_one_entry_and_its_bytes() -> None:
    store = MemoryStore(1000)
    store.put(key(0), entry(0))
    store.put(key(1), entry(1, rows=5))
    store.drop(key(1))
    store.drop(key(7))
    assert store.get(key(1)) is None
    assert (len(store), store.nbytes) == (1, entry(0).nbytes)


# Entries as bytes


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_an_entry_comes_back_from_its_bytes_exactly(precision: Precision, truncated: bool) -> None:
    values, scales = rounded(entry(1, rows=3).rows, precision)
    stored = CachedEmbedding(values, scales, 70_000, truncated)
    data = stored.to_bytes(key(1))
    assert len(data) == HEADER.size + CHECKSUM.size + stored.nbytes
    back = CachedEmbedding.from_bytes(key(1), data)
    assert back is not None
    assert torch.equal(back.rows, values)
    assert back.rows.dtype == values.dtype
    assert back.tokens == 70_000
    assert back.truncated is truncated
    assert (back.scales is None) == (scales is None)
    if scales is not None:
        assert back.scales is not None
        assert torch.equal(back.scales, scales)
        assert stored.nbytes == 3 * 4 + 3 * 4


def test_rows_that_do_not_lie_end_to_end_are_stored_in_their_order() -> None:
    rows = entry(1, rows=4, dim=3).rows.t()
    back = CachedEmbedding.from_bytes(key(1), CachedEmbedding(rows, None, 1, False).to_bytes(key(1)))
    assert back is not None
    assert torch.equal(back.rows, rows)


def test_an_embedding_without_rows_comes_back() -> None:
    for precision in ("float32", "int8"):
        empty = CachedEmbedding(*rounded(torch.zeros(0, 4), precision), 3, False)
        back = CachedEmbedding.from_bytes(key(1), empty.to_bytes(key(1)))
        assert back is not None
        assert (back.rows.shape, back.rows.dtype) == ((0, 4), empty.rows.dtype)
        assert (back.scales is None) == (empty.scales is None)


def _with_header(**changes: Any) -> bytes:
    """An entry of 2 x 4 float32 numbers whose header says something else, and whose checksum is that of the
    header unless it is given."""
    payload = entry(1).to_bytes(key(1))[HEADER.size + CHECKSUM.size :]
    fields = {"magic": b"mxc2", "code": 0, "truncated": 0, "tokens": 2, "rows": 2, "dim": 4}
    header = HEADER.pack(*(fields | {name: changes[name] for name in fields if name in changes}).values())
    checksum = changes.get("checksum", zlib.crc32(key(1) + header + payload))
    return header + CHECKSUM.pack(checksum) + payload


def test_the_header_says_how_the_bytes_are_to_be_read() -> None:
    """Folders outlive versions: another layout needs another magic."""
    assert _with_header() == entry(1).to_bytes(key(1))


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": b"mxc1"},
        {"code": 3},
        {"code": 1},
        {"code": 2},
        {"checksum": 0},
        {"rows": 3},
        {"rows": 1},
        {"dim": 5},
        {"dim": 0},
    ],
    ids=str,
)
def test_bytes_whose_header_does_not_fit_are_refused(changes: dict[str, Any]) -> None:
    assert CachedEmbedding.from_bytes(key(1), _with_header(**changes)) is None


def test_a_size_that_is_not_that_of_the_bytes_is_refused_before_memory_is_taken_for_it() -> None:
    """2^32 rows of 2^32 columns would be more than any machine has; and no columns are no embedding."""
    most = 2**32 - 1
    for changes in ({"rows": most, "dim": most}, {"rows": most, "dim": 1}, {"rows": 1, "dim": most}):
        assert CachedEmbedding.from_bytes(key(1), _with_header(**changes)) is None
    nothing = HEADER.pack(b"mxc2", 0, 0, 2, most, 0)
    checksum = CHECKSUM.pack(zlib.crc32(key(1) + nothing))
    assert CachedEmbedding.from_bytes(key(1), nothing + checksum) is None


def test_every_byte_of_an_entry_and_of_its_key_counts() -> None:
    for precision in ("float32", "int8"):
        data = CachedEmbedding(*rounded(entry(1).rows, precision), 7, True).to_bytes(key(1))
        assert CachedEmbedding.from_bytes(key(1), data) is not None
        for position in range(len(data)):
            changed = data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
            assert CachedEmbedding.from_bytes(key(1), changed) is None, position
            assert CachedEmbedding.from_bytes(key(1), data[:position]) is None, position
        for position in range(32):
            other = key(1)[:position] + bytes([key(1)[position] ^ 1]) + key(1)[position + 1 :]
            assert CachedEmbedding.from_bytes(other, data) is None, position


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("int8", torch.int8)],
)
def test_embeddings_are_rounded_to_the_precision_that_is_asked_for(
    precision: Precision, dtype: torch.dtype
) -> None:
    for given in (torch.float32, torch.bfloat16):
        values, scales = rounded(entry(1).rows.to(given), precision)
        assert values.dtype == dtype
        assert (scales is None) == (precision != "int8")


def test_int8_uses_its_whole_range_in_every_row() -> None:
    rows = torch.tensor([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0], [3.0, 1.0, -2.0]], dtype=torch.bfloat16)
    values, scales = rounded(rows, "int8")
    assert values.tolist() == [[64, -127, 32], [0, 0, 0], [127, 42, -85]]
    assert scales is not None
    torch.testing.assert_close(scales, torch.tensor([1 / 127, 1e-12 / 127, 3 / 127]))


# New embeddings on their way


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_arriving_embeddings_become_entries_of_their_own(precision: Precision) -> None:
    first, second = entry(1, rows=2).rows, entry(2, rows=3).rows
    values, scales = rounded(torch.cat([first, second]), precision)
    arriving = Arriving(
        [About(key(1), 11, False), About(key(2), 12, True)], Ragged(values, (0, 2, 5), scales)
    )
    expected = [rounded(first, precision), rounded(second, precision)]
    assert (len(arriving), arriving.keys) == (2, [key(1), key(2)])
    assert arriving.nbytes == values.nbytes + (0 if scales is None else scales.nbytes)
    entries = [(name, arriving.entry(i)) for i, name in enumerate(arriving.keys)]
    values.zero_()
    if scales is not None:
        scales.zero_()
    assert [(name, found.tokens, found.truncated) for name, found in entries] == [
        (key(1), 11, False),
        (key(2), 12, True),
    ]
    for (_, found), (rows, own_scales) in zip(entries, expected, strict=True):
        assert torch.equal(found.rows, rows)
        assert (found.scales is None) == (own_scales is None)
        assert own_scales is None or found.scales is None or torch.equal(found.scales, own_scales)


def test_as_many_embeddings_arrive_as_are_described() -> None:
    with pytest.raises(ValueError, match="2 embeddings cannot go by 1 keys"):
        Arriving([About(key(1), 1, False)], Ragged(torch.zeros(2, 4), (0, 1, 2)))


# Both together


def _cache(limit: int = 10_000, disk: Any = None, precision: Precision = "float32") -> EmbeddingCache:
    return EmbeddingCache(b"model", precision, MemoryStore(limit), disk)


def test_a_key_depends_on_the_model_the_text_and_how_it_is_read() -> None:
    cache = _cache()
    other = EmbeddingCache(b"another", "float32", MemoryStore(1), None)
    keys = {
        cache.key("text", "how"),
        cache.key("texts", "how"),
        cache.key("text", "other"),
        cache.key("how", "text"),
        cache.key("wtext", "ho"),
        cache.key("\ud800", "how"),
        other.key("text", "how"),
    }
    assert len(keys) == 7
    assert {len(found) for found in keys} == {32}


def test_keys_stay_the_same_over_versions() -> None:
    """Later versions read the same folder: a key that is made otherwise would waste all its entries."""
    assert _cache().key("a text", "as it is").hex() == (
        "72a481beba34c14082bc2aeb4bae99a2f59fd660415335e7456fcb351c6aacd8"
    )


def test_an_entry_that_is_only_on_disk_is_in_memory_from_then_on(disk: DiskStore) -> None:
    cache = _cache(disk=disk)
    cache.wait_until_warm(10)
    disk.put([(key(1), entry(1))])
    assert (cache.memory_bytes, cache.entries) == (0, 1)
    assert same(cache.get(key(1)), entry(1))
    assert cache.memory_bytes == entry(1).nbytes
    disk.clear()
    assert same(cache.get(key(1)), entry(1))
    assert cache.get(key(2)) is None


def test_entries_go_to_memory_and_disk_and_leave_both(disk: DiskStore) -> None:
    cache = _cache(disk=disk)
    cache.put((key(number), entry(number)) for number in range(3))
    assert (cache.entries, len(disk), cache.memory_bytes) == (3, 3, 3 * entry(0).nbytes)
    assert cache.disk_bytes == disk.nbytes > 0
    cache.drop(key(1))
    assert cache.get(key(1)) is None
    assert (cache.entries, len(disk), cache.memory_bytes) == (2, 2, 2 * entry(0).nbytes)
    cache.clear()
    assert (cache.entries, len(disk), cache.memory_bytes) == (0, 0, 0)
    assert cache.disk_bytes == disk.nbytes


def test_a_cache_without_a_disk_has_what_is_in_memory() -> None:
    cache = _cache(limit=2 * entry(0).nbytes)
    cache.put([(key(number), entry(number)) for number in range(3)])
    assert (cache.entries, cache.evictions, cache.disk_bytes) == (2, 1, 0)
    cache.wait_until_warm(10)
    cache.drop(key(0))
    assert cache.entries == 1, "the third did not take the place of one that was asked for as often"
    cache.clear()
    assert cache.entries == 0
    cache.close()


def test_evictions_from_memory_and_disk_are_counted_together(disk: DiskStore) -> None:
    cache = _cache(limit=3 * entry(0).nbytes, disk=disk)
    cache.put([(key(number), entry(number)) for number in range(5)])
    assert cache.evictions == 2
    disk.evictions = 40
    assert cache.evictions == 42
    assert cache.entries == 5


def test_hits_and_misses_are_counted_apart() -> None:
    cache = _cache()
    assert (cache.hits, cache.misses) == (0, 0)
    cache.count(3, 5)
    cache.count(1, 2)
    assert (cache.hits, cache.misses) == (4, 7)


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_new_embeddings_are_rounded_as_they_would_be_stored(precision: Precision) -> None:
    rows = entry(1, rows=5).rows.requires_grad_()
    found = _cache(precision=precision).rounded(Ragged(rows, (0, 2, 5)))
    values, scales = rounded(rows.detach(), precision)
    assert torch.equal(found.values, values)
    assert not found.values.requires_grad
    assert found.offsets.tolist() == [0, 2, 5]
    assert (found.scales is None) == (precision != "int8")
    assert scales is None or found.scales is None or torch.equal(found.scales, scales)


class _Disk:
    """Stands in for a disk whose newest entries come as the test says."""

    def __init__(self, newest: Iterator[tuple[bytes, CachedEmbedding | None]]) -> None:
        self.newest = lambda: newest
        self.evictions = 0
        self.closed = False

    def __len__(self) -> int:
        return 0

    def get(self, name: bytes) -> None:
        return None

    def clear(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def test_a_start_fills_memory_with_the_newest_to_the_byte() -> None:
    newest = ((key(number), entry(number)) for number in (9, 8, 7, 6))
    memory = MemoryStore(3 * entry(0).nbytes)
    cache = EmbeddingCache(b"", "float32", memory, _Disk(newest))  # type: ignore[arg-type]
    cache.wait_until_warm(10)
    assert [memory.get(key(number)) is not None for number in (9, 8, 7, 6)] == [True, True, True, False]
    memory = MemoryStore(3 * entry(0).nbytes)
    newest = ((key(number), entry(number)) for number in (9, 8, 7, 6))
    EmbeddingCache(b"", "float32", memory, _Disk(newest)).wait_until_warm(10)  # type: ignore[arg-type]
    assert memory.get(key(1)) is None
    assert memory.get(key(1)) is None
    memory.put(key(1), entry(1))
    assert memory.get(key(1)) is not None, "what was asked for twice takes the place of what was read once"
    assert len(memory) == 3


def test_a_start_reads_no_more_than_memory_takes() -> None:
    read: list[int] = []

    def newest() -> Iterator[tuple[bytes, CachedEmbedding]]:
        for number in range(20):
            read.append(number)
            yield key(number), entry(number)

    cache = _cache(limit=3 * entry(0).nbytes, disk=_Disk(newest()))
    cache.wait_until_warm(10)
    assert read == [0, 1, 2, 3]
    assert cache.evictions == 0


def test_a_start_leaves_what_is_newer_in_memory() -> None:
    go = threading.Event()

    def newest() -> Iterator[tuple[bytes, CachedEmbedding]]:
        go.wait(10)
        yield key(1), entry(1)

    cache = _cache(disk=_Disk(newest()))
    cache._memory.put(key(1), entry(100))
    go.set()
    cache.wait_until_warm(10)
    assert same(cache.get(key(1)), entry(100))


def test_a_start_waits_for_a_slow_disk_only_for_so_long() -> None:
    go = threading.Event()

    def newest() -> Iterator[tuple[bytes, CachedEmbedding]]:
        go.wait(10)
        yield key(1), entry(1)

    disk = _Disk(newest())
    cache = _cache(disk=disk)
    [reader] = [thread for thread in threading.enumerate() if thread.name == "maxsimd-cache"]
    assert reader.daemon
    begun = time.monotonic()
    cache.wait_until_warm(0.05)
    assert 0.04 < time.monotonic() - begun < 5
    assert reader.is_alive()
    go.set()
    cache.close()
    assert not reader.is_alive()
    assert disk.closed


def test_a_start_passes_over_what_is_damaged_and_can_be_ended_there() -> None:
    def newest() -> Iterator[tuple[bytes, CachedEmbedding | None]]:
        yield key(2), None
        yield key(1), entry(1)
        while True:
            yield key(0), None
            time.sleep(0.001)

    cache = _cache(disk=_Disk(newest()))
    cache.close()
    assert cache._warming is not None
    assert not cache._warming.is_alive()
    memory = MemoryStore(10_000)
    found = iter([(key(2), None), (key(1), entry(1))])
    EmbeddingCache(b"", "float32", memory, _Disk(found)).wait_until_warm(10)  # type: ignore[arg-type]
    assert [memory.get(key(number)) is not None for number in (1, 2)] == [True, False]


@pytest.mark.parametrize("end", ["clear", "close"])
def test_what_is_being_read_at_a_start_does_not_outlive_a_clear_or_a_close(end: str) -> None:
    def newest() -> Iterator[tuple[bytes, CachedEmbedding]]:
        number = 0
        while True:
            yield key(number), entry(number, rows=1)
            number += 1
            time.sleep(0.001)

    cache = _cache(limit=1 << 40, disk=_Disk(newest()))
    time.sleep(0.02)
    getattr(cache, end)()
    assert cache._warming is not None
    assert not cache._warming.is_alive()
    assert cache.memory_bytes == 0
