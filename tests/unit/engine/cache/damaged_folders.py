"""Lets a cache meet every damage at every moment, and reports what came of it.

Run by test_damaged_caches.py in a process of its own, which may die of it."""

import json
import logging
import stat
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from maxsimd.engine.cache import CachedEmbedding, EmbeddingCache, guarded
from maxsimd.engine.cache.disk import DiskStore
from maxsimd.engine.cache.memory import MemoryStore
from tests.damage import DAMAGES, undo
from tests.unit.engine.cache.entries import MIB, key

MOMENTS = ("at start", "while serving", "in a clear")
SIZES = (3, 300, 1300, 4000)
NUMBER = 60  # of entries


class Log(logging.Handler):
    """What was logged since it was asked last."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


@cache
def entry(number: int) -> CachedEmbedding:
    rows = torch.randn(SIZES[number % 4], 16, generator=torch.Generator().manual_seed(number))
    return CachedEmbedding(rows, None, number, number % 3 == 0)


def open_cache(folder: Path) -> EmbeddingCache:
    """Without memory, so that all is read from disk."""
    return EmbeddingCache(b"", "float32", MemoryStore(0), DiskStore(folder, 64 * MIB))


def read(store: EmbeddingCache, numbers: range) -> tuple[int, int]:
    """How many entries are found, and how many of those are wrong."""
    found = [(number, store.get(key(number))) for number in numbers]
    return sum(got is not None for _, got in found), sum(
        not (
            torch.equal(got.rows, entry(number).rows)
            and (got.tokens, got.truncated) == (entry(number).tokens, entry(number).truncated)
        )
        for number, got in found
        if got is not None
    )


def works(store: EmbeddingCache) -> bool:
    """Whether the disk takes and returns something new, soon."""
    deadline = time.monotonic() + 5 * guarded.PAUSE_SECONDS
    while time.monotonic() < deadline:
        store.put([(key(10_000), entry(10_000))])
        if read(store, range(10_000, 10_001)) == (1, 0):
            return True
        time.sleep(guarded.PAUSE_SECONDS / 5)
    return False


def foreign(folder: Path) -> dict[str, bytes | None]:
    """What lies in a folder that is not ours: what it is, and what is in it."""
    found: dict[str, bytes | None] = {}
    for path in folder.rglob("*"):
        try:
            data = path.read_bytes() if stat.S_ISREG(path.lstat().st_mode) else None
        except FileNotFoundError:  # a journal of ours, which comes and goes
            continue
        if data is None or path.suffix == ".mdb" or b"of a user" in data:
            found[str(path)] = data
    return found


def run(folder: Path, damage: str, moment: str, log: Log) -> dict[str, object]:
    numbers = range(NUMBER)
    store = open_cache(folder)
    store.put([(key(number), entry(number)) for number in numbers])
    stored, _ = read(store, numbers)
    if moment == "at start":
        store.close()
    log.take()
    DAMAGES[damage](folder)
    before = foreign(folder)
    if moment == "at start":
        store = open_cache(folder)
        store.wait_until_warm(60)
    elif moment == "in a clear":
        store.clear()
    found, wrong = read(store, numbers)
    store.put([(key(number), entry(number)) for number in range(100, 120)])
    store.drop(key(0))
    _, wrong_later = read(store, range(100, 120))
    outcome = {
        "stored": stored,
        "found": found,
        "wrong": wrong + wrong_later,
        "works": works(store),
        "log": log.take(),
        "files": sorted(path.name for path in folder.iterdir()),
        "mapped": list(mapped(folder)),
        "touched": foreign(folder) != before,
    }
    store.close()
    return outcome


def mapped(folder: Path) -> Iterator[str]:
    """Files below a folder that are mapped into memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            yield line


def main() -> None:
    root = Path(sys.argv[1])
    log = Log()
    logging.getLogger("maxsimd").addHandler(log)
    guarded.PAUSE_SECONDS = 0.02
    for moment in MOMENTS:
        for damage in DAMAGES:
            folder = root / f"{moment} {damage}"
            print(json.dumps({"cell": (damage, moment)}), flush=True)
            outcome = run(folder, damage, moment, log)
            print(json.dumps(outcome), flush=True)
            undo(folder)


if __name__ == "__main__":
    main()
