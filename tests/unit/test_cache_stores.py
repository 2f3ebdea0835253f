"""The cache's stores, each by itself: limits to the byte, orders, counts, and what is damaged or closed."""

import logging
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
import torch

from maxsimd.engine.cache.arriving import About, Arriving
from maxsimd.engine.cache.disk import DiskStore
from maxsimd.engine.cache.entry import CachedEmbedding, Precision, rounded
from maxsimd.engine.cache.memory import MemoryStore
from maxsimd.engine.cache.store import EmbeddingCache
from maxsimd.pooling.ragged import Ragged

MIB = 1024 * 1024
HEADER = struct.Struct("<4sBBIIII")


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
    store.put(key(9), entry(9, rows=4))
    assert [store.get(key(number)) is not None for number in (0, 1, 2, 9)] == [False, False, True, True]
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
    data = stored.to_bytes()
    assert len(data) == HEADER.size + stored.nbytes
    back = CachedEmbedding.from_bytes(data)
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
    back = CachedEmbedding.from_bytes(CachedEmbedding(rows, None, 1, False).to_bytes())
    assert back is not None
    assert torch.equal(back.rows, rows)


def _with_header(**changes: Any) -> bytes:
    """An entry of 2 x 4 float32 numbers whose header says something else."""
    payload = entry(1).to_bytes()[HEADER.size :]
    header = {"magic": b"mxc1", "code": 0, "truncated": 0, "tokens": 2, "rows": 2, "dim": 4}
    header |= {"checksum": zlib.crc32(payload)} | changes
    return HEADER.pack(*header.values()) + payload


def test_the_header_says_how_the_bytes_are_to_be_read() -> None:
    """Folders outlive versions: another layout needs another magic."""
    assert _with_header() == entry(1).to_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": b"mxc2"},
        {"code": 3},
        {"code": 1},
        {"code": 2},
        {"checksum": 0},
        {"rows": 3},
        {"rows": 1},
        {"dim": 5},
    ],
    ids=str,
)
def test_bytes_whose_header_does_not_fit_are_refused(changes: dict[str, Any]) -> None:
    assert CachedEmbedding.from_bytes(_with_header(**changes)) is None


def test_bytes_shorter_than_a_header_are_refused() -> None:
    data = entry(1).to_bytes()
    assert CachedEmbedding.from_bytes(data[: HEADER.size - 1]) is None
    assert CachedEmbedding.from_bytes(b"") is None


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


# Disk


def _numbers(store: DiskStore) -> list[int]:
    return [int.from_bytes(name, "big") for name, _ in store.newest()]


def test_disk_returns_the_newest_first_over_a_restart(tmp_path: Path) -> None:
    for start in (0, 3):
        store = DiskStore(tmp_path, 4 * MIB)
        store.put([(key(start), entry(start)), (key(start + 1), entry(start + 1))])
        store.put([(key(start + 2), entry(start + 2))])
        store.close()
    store = DiskStore(tmp_path, 4 * MIB)
    assert _numbers(store) == [5, 4, 3, 2, 1, 0]
    assert all(same(found, entry(int.from_bytes(name, "big"))) for name, found in store.newest())
    store.close()


def test_disk_takes_what_is_put_again_as_new(disk: DiskStore) -> None:
    for number in (0, 1, 2, 0):
        disk.put([(key(number), entry(number + 10 * (number == 0 and len(disk) == 3)))])
    assert _numbers(disk) == [0, 2, 1]
    assert len(disk) == 3
    assert same(disk.get(key(0)), entry(10))


def test_disk_drops_one_entry(disk: DiskStore) -> None:
    disk.put([(key(number), entry(number)) for number in range(3)])
    disk.drop(key(1))
    disk.drop(key(7))
    assert disk.get(key(1)) is None
    assert _numbers(disk) == [2, 0]
    assert len(disk) == 2
    assert _order(disk) == 2


def _order(disk: DiskStore) -> int:
    with disk._env.begin() as transaction:
        return int(transaction.stat(disk._order)["entries"])


def test_disk_that_is_cleared_is_empty_and_goes_on(disk: DiskStore) -> None:
    disk.put([(key(number), entry(number, rows=1000)) for number in range(3)])
    disk.clear()
    assert (len(disk), disk.nbytes, _order(disk), _numbers(disk)) == (0, 0, 0, [])
    disk.put([(key(5), entry(5))])
    assert same(disk.get(key(5)), entry(5))


@pytest.mark.parametrize(("count", "rows"), [(600, 1), (20, 2000)])
def test_disk_counts_all_pages_of_both_tables(disk: DiskStore, count: int, rows: int) -> None:
    disk.put([(key(number), entry(number, rows)) for number in range(count)])
    with disk._env.begin() as transaction:
        stats = [transaction.stat(table) for table in (disk._entries, disk._order)]
    pages = sum(number for stat in stats for name, number in stat.items() if name.endswith("pages"))
    assert sum(stat["branch_pages"] for stat in stats) > 0 or rows > 1
    assert sum(stat["overflow_pages"] for stat in stats) > 0 or rows == 1
    assert disk.nbytes == pages * disk._env.stat()["psize"]
    assert isinstance(disk.nbytes, int)


def test_disk_evicts_the_oldest_one_of_a_few(disk: DiskStore) -> None:
    size = MIB // (4 * 4)
    for number in range(4):
        disk.put([(key(number), entry(number, rows=size - 1000))])
    assert (len(disk), disk.evictions) == (4, 0)
    disk.put([(key(4), entry(4, rows=size - 1000))])
    assert _numbers(disk) == [4, 3, 2, 1]
    assert (disk.evictions, _order(disk)) == (1, 4)


def test_disk_evicts_the_oldest_tenth_of_many(disk: DiskStore) -> None:
    rows, number = 6000, 0  # 24 pages each: 42 of them fit
    while disk.evictions == 0:
        disk.put([(key(number), entry(number, rows=rows))])
        number += 1
    assert number == 43
    assert disk.evictions == 4
    assert _numbers(disk) == list(range(42, 3, -1))


def test_disk_that_is_exactly_full_evicts_nothing(disk: DiskStore, tmp_path: Path) -> None:
    entries = [(key(number), entry(number, rows=1000)) for number in range(20)]
    disk.put(entries)
    other = DiskStore(tmp_path / "other", disk.nbytes)
    other.put(entries)
    assert (len(other), other.evictions) == (20, 0)
    other.put([(key(20), entry(20, rows=1000))])
    assert other.evictions > 0
    other.close()


def test_disk_fills_its_limit_and_stays_within_it(disk: DiskStore) -> None:
    for number in range(60):
        disk.put([(key(number), entry(number, rows=MIB // 8 // 16))])
        assert disk.nbytes <= 4 * MIB
    assert disk.nbytes > 3 * MIB


def test_a_folder_has_the_tables_that_other_versions_look_for(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 4 * MIB)
    store.put([(key(3), entry(3))])
    store.close()
    with lmdb.open(str(tmp_path), max_dbs=2) as environment:
        tables = {name: environment.open_db(name, create=False) for name in (b"entries", b"order")}
        with environment.begin() as transaction:
            [(name, stored)] = transaction.cursor(tables[b"entries"])
            [(sequence, ordered)] = transaction.cursor(tables[b"order"])
    assert name == ordered == key(3)
    assert stored == sequence + entry(3).to_bytes()


def test_disk_has_room_to_write_beside_its_entries_and_does_not_sync(disk: DiskStore) -> None:
    information, flags = disk._env.info(), disk._env.flags()
    assert information["map_size"] == 2 * 4 * MIB + 64 * MIB
    assert information["max_readers"] == 512
    assert (flags["sync"], flags["metasync"]) == (False, False)


def test_disk_leaves_out_what_is_damaged_and_goes_on(
    disk: DiskStore, caplog: pytest.LogCaptureFixture
) -> None:
    disk.put([(key(number), entry(number)) for number in range(4)])
    with disk._env.begin(write=True) as transaction:
        damaged = bytearray(transaction.get(key(2), db=disk._entries))
        damaged[-1] ^= 1
        transaction.put(key(2), bytes(damaged), db=disk._entries)
        transaction.delete(key(1), db=disk._entries)
    assert _numbers(disk) == [3, 0]
    with caplog.at_level(logging.WARNING):
        assert disk.get(key(2)) is None
    assert "damaged" in caplog.text
    assert len(disk) == 2


def test_disk_that_cannot_be_used_is_as_if_it_were_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(tmp_path, 4 * MIB)
    store.put([(key(0), entry(0))])
    store.close()
    with caplog.at_level(logging.WARNING):
        assert store.get(key(0)) is None
        assert list(store.newest()) == []
        store.put([(key(1), entry(1))])
    assert caplog.text.count("cannot be read") == 2
    assert caplog.text.count("cannot be written") == 1


def test_a_database_that_is_none_lies_beside_the_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "data.mdb").write_bytes(b"something else entirely" * 1000)
    before = time.time_ns()
    store = DiskStore(folder, 4 * MIB)
    assert len(store) == 0
    assert store.evictions == 0
    store.close()
    [aside] = [path for path in tmp_path.iterdir() if path != folder]
    assert (aside / "data.mdb").read_bytes().startswith(b"something else")
    prefix, _, moment = aside.name.rpartition("-")
    assert prefix == "cache.damaged"
    assert before <= int(moment) <= time.time_ns()


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
    assert (cache.entries, len(disk), cache.memory_bytes, cache.disk_bytes) == (0, 0, 0, 0)


def test_a_cache_without_a_disk_has_what_is_in_memory() -> None:
    cache = _cache(limit=2 * entry(0).nbytes)
    cache.put([(key(number), entry(number)) for number in range(3)])
    assert (cache.entries, cache.evictions, cache.disk_bytes) == (2, 1, 0)
    cache.wait_until_warm(10)
    cache.drop(key(2))
    assert cache.entries == 1
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
    assert found.offsets == (0, 2, 5)
    assert (found.scales is None) == (precision != "int8")
    assert scales is None or found.scales is None or torch.equal(found.scales, scales)


class _Disk:
    """Stands in for a disk whose newest entries come as the test says."""

    def __init__(self, newest: Iterator[tuple[bytes, CachedEmbedding]]) -> None:
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
    memory.put(key(1), entry(1))
    assert memory.get(key(7)) is None, "the oldest of those that were read goes first"
    assert memory.get(key(9)) is not None


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
