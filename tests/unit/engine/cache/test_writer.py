"""The cache's writer: what it cannot take in is not cached, and counted."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from maxsimd.engine.cache import About, Arriving, CachedEmbedding
from maxsimd.engine.cache.writer import CacheWriter
from maxsimd.pooling.ragged import Ragged


def arriving(*keys: bytes) -> Arriving:
    """Embeddings of one row of four float32 numbers, 16 bytes each."""
    rows = Ragged(torch.arange(4.0 * len(keys)).view(-1, 4), tuple(range(len(keys) + 1)))
    return Arriving([About(key, 3, False) for key in keys], rows)


class Written:
    """Takes what is written once `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.entries: dict[bytes, CachedEmbedding] = {}

    def write(self, entries: list[tuple[bytes, CachedEmbedding]]) -> None:
        self.go.wait(20)
        self.entries |= dict(entries)


_COPIED_IN_A_THREAD = """
import os, threading, torch
from maxsimd.engine.cache import About, Arriving
from maxsimd.pooling.ragged import Ragged

tall = Ragged(torch.randn(4096, 64), (0, 4096), torch.rand(4096))
arriving = Arriving([About(b"a", 3, False)], tall)

def count_threads():
    return len(os.listdir("/proc/self/task"))

def copy():
    before = count_threads()
    entry = arriving.entry(0)
    after = count_threads()
    assert torch.equal(entry.rows, tall.values) and torch.equal(entry.scales, tall.scales)
    assert entry.rows.data_ptr() != tall.values.data_ptr()
    entry.rows.clone()  # what torch does with the same
    print(after - before, count_threads() - after)

thread = threading.Thread(target=copy)
thread.start()
thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_an_entry_is_copied_by_the_calling_thread_alone() -> None:
    """OpenMP's threads for one more thread would slow down those of the device thread."""
    command = [sys.executable, "-c", _COPIED_IN_A_THREAD]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["0", "1"], done.stderr


def test_staged_embeddings_are_found_and_written() -> None:
    written = Written()
    writer = CacheWriter(written.write, limit=1000)
    writer.stage(arriving(b"a", b"b"))
    found = writer.get(b"b")
    assert found is not None
    assert found.rows.tolist() == [[4, 5, 6, 7]]
    assert (writer.num_staged, writer.flush(0)) == (2, False)
    written.go.set()
    assert writer.flush(20)
    assert (writer.num_staged, writer.get(b"b"), set(written.entries)) == (0, None, {b"a", b"b"})
    writer.close()


def test_what_exceeds_the_limit_is_skipped_and_counted() -> None:
    written = Written()
    writer = CacheWriter(written.write, limit=48)
    writer.stage(arriving(b"a", b"b"))
    writer.stage(arriving(b"c", b"d"))
    writer.stage(arriving(b"e"))
    assert (writer.skipped, writer.num_staged, writer.get(b"c")) == (2, 3, None)
    written.go.set()
    writer.close()
    assert set(written.entries) == {b"a", b"b", b"e"}


def test_a_write_that_fails_harms_no_other() -> None:
    tried: list[list[bytes]] = []

    def write(entries: list[tuple[bytes, CachedEmbedding]]) -> None:
        tried.append([key for key, _ in entries])
        if tried[-1] == [b"a"]:
            raise OSError("no space left")

    writer = CacheWriter(write, limit=1000)
    writer.stage(arriving(b"a"))
    writer.stage(arriving(b"b"))
    assert writer.flush(20)
    writer.close()
    assert (tried, writer.num_staged) == ([[b"a"], [b"b"]], 0)
