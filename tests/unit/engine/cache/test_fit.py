"""A cache that is too small for what is asked for again says so."""

import logging
from dataclasses import dataclass

import pytest

from maxsimd.engine import Engine, EngineConfig
from maxsimd.engine.cache.fit import FitWatch
from maxsimd.engine.cache.memory import MemoryStore


@dataclass(frozen=True)
class Entry:
    nbytes: int = 1024


class Asking:
    """Keys that are asked for, and put in where they are not there."""

    def __init__(self, entries: int) -> None:
        self.memory: MemoryStore[Entry] = MemoryStore(entries * 1024)
        self.now = 0.0
        self.watch = FitWatch(self.memory, "entries", "buy more", clock=lambda: self.now)

    def ask(self, first: int, last: int) -> None:
        for number in range(first, last):
            key = number.to_bytes(32, "big")
            if self.memory.get(key) is None:
                self.memory.put(key, Entry())
            self.watch.look()


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_loop_over_more_than_fits_is_told_once_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    asking = Asking(500)
    asking.ask(0, 2000)
    assert not _warnings(caplog), "nothing has come again"
    asking.ask(0, 2000)
    (warning,) = _warnings(caplog)
    assert "too small" in warning
    assert warning.endswith("buy more")
    asking.ask(0, 2000)
    assert len(_warnings(caplog)) == 1
    asking.now = 3601.0
    asking.ask(0, 2000)
    assert len(_warnings(caplog)) == 2


def test_what_fits_and_what_comes_once_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    asking = Asking(500)
    for _ in range(10):
        asking.ask(0, 400)
    asking.ask(1000, 6000)
    assert not _warnings(caplog)


async def test_an_engine_says_it(native_multi_vector: str, caplog: pytest.LogCaptureFixture) -> None:
    texts = [f"document {i} " + "word " * 40 for i in range(1200)]
    async with Engine(EngineConfig(model=native_multi_vector, dtype="float32", cache_mb=1)) as engine:
        cache = engine.device_model.cache
        assert cache is not None
        for _ in range(2):
            assert not _warnings(caplog)
            await engine.score("q", texts)
            cache.flush()
    (warning,) = _warnings(caplog)
    assert "(cache_dir)" in warning


async def test_scores_say_it_too(bert_cross_encoder: str, caplog: pytest.LogCaptureFixture) -> None:
    texts = [f"document {i}" for i in range(3000)]
    async with Engine(EngineConfig(model=bert_cross_encoder, dtype="float32", cache_mb=1)) as engine:
        for _ in range(3):
            await engine.score("q", texts)
    (warning,) = _warnings(caplog)
    assert "raise cache_mb" in warning
