"""The embedding cache: what is kept, for how long, and that nothing wrong ever comes out of it."""

import asyncio
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, InvalidRequestError, Truncation
from maxsimd.engine.cache.disk import DiskStore
from maxsimd.engine.cache.entry import CachedEmbedding, Precision, rounded
from maxsimd.engine.cache.memory import MemoryStore
from maxsimd.engine.cache.store import EmbeddingCache
from maxsimd.pooling.ragged import Ragged
from tests.native_bfloat16 import needs_native_bfloat16

MIB = 1024 * 1024


def embedding(seed: int, tokens: int = 5, dim: int = 16) -> torch.Tensor:
    rows = torch.randn(tokens, dim, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows, dim=-1)


def encode(rows: torch.Tensor, precision: Precision, tokens: int, truncated: bool) -> CachedEmbedding:
    return CachedEmbedding(*rounded(rows, precision), tokens, truncated)


def decoded(entry: CachedEmbedding) -> torch.Tensor:
    return Ragged(entry.rows, (0, len(entry.rows)), entry.scales).decoded(torch.float32).values


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 0), ("bfloat16", 4e-3), ("int8", 8e-3)])
def test_an_entry_survives_the_way_to_bytes_and_back(precision: Precision, tolerance: float) -> None:
    rows = embedding(1)
    entry = encode(rows, precision, tokens=7, truncated=True)
    back = CachedEmbedding.from_bytes(b"key", entry.to_bytes(b"key"))
    assert back is not None
    assert (back.tokens, back.truncated, back.nbytes) == (7, True, entry.nbytes)
    torch.testing.assert_close(decoded(back), decoded(entry))
    torch.testing.assert_close(decoded(back), rows, atol=tolerance, rtol=0)


@given(st.data())
def test_bytes_that_were_changed_or_torn_are_noticed(data: st.DataObject) -> None:
    good = encode(embedding(2), "int8", 5, False).to_bytes(b"key")
    position = data.draw(st.integers(0, len(good) - 1))
    if data.draw(st.booleans()):
        bad = good[:position]
    else:
        changed = bytes([good[position] ^ data.draw(st.integers(1, 255))])
        bad = good[:position] + changed + good[position + 1 :]
    assert CachedEmbedding.from_bytes(b"key", bad) is None


def test_memory_lets_the_least_recently_used_go_for_one_that_is_asked_for_more() -> None:
    size = encode(embedding(0), "float32", 5, False).nbytes
    store = MemoryStore(3 * size)
    for i in range(3):
        store.put(bytes([i]), encode(embedding(i), "float32", 5, False))
    assert store.get(b"\0") is not None
    assert store.get(b"\3") is None
    store.put(b"\3", encode(embedding(3), "float32", 5, False))
    assert store.get(b"\1") is None
    assert store.get(b"\0") is not None
    assert (len(store), store.nbytes, store.evictions) == (3, 3 * size, 1)
    store.put(b"large", encode(embedding(4, tokens=100), "float32", 5, False))
    assert store.get(b"large") is None
    store.clear()
    assert (len(store), store.nbytes) == (0, 0)


def _entry(seed: int) -> CachedEmbedding:
    return encode(embedding(seed, tokens=100, dim=64), "bfloat16", 100, False)


def test_disk_keeps_entries_over_a_restart_and_lets_the_oldest_go(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "cache", 4 * MIB)
    for i in range(400):
        store.put([(i.to_bytes(32, "big"), _entry(i))])
    assert store.evictions > 0
    store.close()
    store = DiskStore(tmp_path / "cache", 4 * MIB)
    assert store.get((0).to_bytes(32, "big")) is None
    newest = store.get((399).to_bytes(32, "big"))
    assert newest is not None
    torch.testing.assert_close(newest.rows, _entry(399).rows)
    assert store.nbytes <= 4 * MIB
    store.clear()
    assert len(store) == 0
    store.close()


def _write_for_ever(folder: Path) -> None:
    store = DiskStore(folder, 8 * MIB)
    i = 0
    while True:
        store.put([((i + k).to_bytes(32, "big"), _entry((i + k) % 1000)) for k in range(5)])
        i += 5


def test_killing_a_writer_never_leaves_anything_wrong(tmp_path: Path) -> None:
    """Twenty processes are killed while they write; every start after it works, every entry is right."""
    context = multiprocessing.get_context("fork")
    chance = random.Random(0)
    for _ in range(20):
        writer = context.Process(target=_write_for_ever, args=(tmp_path / "cache",), daemon=True)
        writer.start()
        time.sleep(0.1 + chance.random() * 0.1)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        store = DiskStore(tmp_path / "cache", 8 * MIB)
        assert len(store) > 0
        for i in range(0, 3000, 7):
            entry = store.get(i.to_bytes(32, "big"))
            if entry is not None:
                torch.testing.assert_close(entry.rows, _entry(i % 1000).rows)
        store.close()
    assert not [path for path in tmp_path.rglob("*") if "damaged" in path.name]


async def _scores(engine: Engine, documents: list[str], **options: object) -> np.ndarray:
    result = await engine.score("how is a file read", documents, truncation=CUT_LONG, **options)  # type: ignore[arg-type]
    return np.array(result.scores)


@pytest.fixture
def documents(pairs: list[Pair]) -> list[str]:
    return [pair.document for pair in pairs[:60]]


@pytest.mark.parametrize("score_type", ["late-interaction", "bi-encoder"])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_native_bfloat16)])
async def test_a_kept_document_scores_as_one_that_is_encoded(
    documents: list[str], score_type: str, dtype: str
) -> None:
    async with Engine(EngineConfig(score_type=score_type, dtype=dtype)) as engine:
        new = await _scores(engine, documents, cache="bypass")
        first = await _scores(engine, documents)
        again = await engine.score("how is a file read", documents, truncation=CUT_LONG)
        np.testing.assert_allclose(first, new, atol=1e-3)
        np.testing.assert_allclose(again.scores, new, atol=1e-3)
        assert again.usage.cached_documents == len(documents)
        assert again.usage.prompt_tokens - again.usage.cached_tokens < 20
        assert again.truncated > 0, "what was cut once is still told of"


async def test_int8_keeps_the_ranking(documents: list[str]) -> None:
    async with Engine(EngineConfig(dtype="float32", cache_precision="int8")) as engine:
        new = await _scores(engine, documents, cache="bypass")
        await _scores(engine, documents)
        kept = await _scores(engine, documents)
        assert engine.device_model.cache is not None
        assert engine.device_model.cache.hits == len(documents)
    assert kendalltau(new, kept).statistic >= 0.99


async def test_equal_documents_in_a_request_and_in_the_queue_are_encoded_once(documents: list[str]) -> None:
    async with Engine(EngineConfig(dtype="float32", max_batch_tokens=512)) as engine:
        before = engine.metrics.tokens._value.get()
        many = await engine.score("why", documents[:10] * 5, truncation=CUT_LONG)
        np.testing.assert_allclose(many.scores, many.scores[:10] * 5, atol=1e-6)
        once = engine.metrics.tokens._value.get() - before
        await engine.clear_cache()
        before = engine.metrics.tokens._value.get()
        queries = [f"why {i}" for i in range(6)]
        together = await asyncio.gather(
            *(engine.score(query, documents[:10], truncation=CUT_LONG) for query in queries)
        )
        queued = engine.metrics.tokens._value.get() - before
        assert queued <= once + 6 * 10
        for query, result in zip(queries, together, strict=True):
            alone = await engine.score(query, documents[:10], truncation=CUT_LONG, cache="bypass")
            np.testing.assert_allclose(result.scores, alone.scores, atol=1e-4)


async def test_how_a_document_is_read_is_part_of_what_is_kept(documents: list[str]) -> None:
    async with Engine(EngineConfig(dtype="float32")) as engine:
        long = [" ".join(documents[:8])]
        readings = [
            CUT_LONG,
            Truncation(max_tokens=-1, side="left"),
            Truncation(max_tokens=100),
            Truncation(max_tokens=-1, max_document_tokens=50),
            Truncation(max_tokens=-1, windows=True),
            Truncation(max_tokens=-1, windows=True, window_overlap=3),
        ]
        for _ in range(2):
            scores = [(await engine.score("why", long, truncation=reading)).scores[0] for reading in readings]
        assert len({round(score, 5) for score in scores}) == len(readings)
        assert engine.device_model.cache is not None
        assert (engine.device_model.cache.hits, engine.device_model.cache.misses) == (6, 6)
        kept = await engine.score("why", long, truncation=readings[4])
        new = await engine.score("why", long, truncation=readings[4], cache="bypass")
        assert kept.usage.prompt_tokens == new.usage.prompt_tokens


async def test_refresh_encodes_again_and_bypass_keeps_nothing(documents: list[str]) -> None:
    async with Engine(EngineConfig(dtype="float32")) as engine:
        cache = engine.device_model.cache
        assert cache is not None
        await _scores(engine, documents[:5], cache="bypass")
        assert cache.entries == 0
        await _scores(engine, documents[:5])
        ran = engine.metrics.tokens._value.get()
        await _scores(engine, documents[:5], cache="refresh")
        assert engine.metrics.tokens._value.get() - ran > 100
        assert cache.flush(60)
        assert cache.entries == 5


async def test_a_folder_serves_the_next_start_of_the_same_model_only(
    tmp_path: Path, documents: list[str], stanford_colbert: str, stanford_colbert_attending: str
) -> None:
    folder = str(tmp_path / "cache")

    async def hits(model: str, **settings: object) -> int:
        config = EngineConfig(model=model, dtype="float32", cache_dir=folder, **settings)  # type: ignore[arg-type]
        async with Engine(config) as engine:
            kept = await _scores(engine, documents[:8])
            np.testing.assert_allclose(kept, await _scores(engine, documents[:8], cache="bypass"), atol=1e-3)
            assert engine.device_model.cache is not None
            return engine.device_model.cache.hits

    assert await hits(stanford_colbert) == 0
    assert await hits(stanford_colbert) == 8
    assert await hits(stanford_colbert, document_prompt="other: ") == 0
    assert await hits(stanford_colbert, dimensions=16) == 0
    assert await hits(stanford_colbert, doc_token_pooling=2) == 0
    assert await hits(stanford_colbert, max_model_len=100) == 0
    # The same documents' embeddings: query expansion is a matter of queries.
    assert await hits(stanford_colbert_attending) == 8


async def test_cancelling_leaves_nothing_behind(documents: list[str]) -> None:
    async with Engine(EngineConfig(dtype="float32")) as engine:
        await _scores(engine, documents)
        tasks = [asyncio.create_task(_scores(engine, [*documents, f"new {i}"])) for i in range(8)]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(await _scores(engine, documents)) == len(documents)


async def test_a_document_that_fits_is_kept_whatever_is_asked_for_those_that_do_not(
    documents: list[str],
) -> None:
    short = [document[:200] for document in documents[:10]]
    async with Engine(EngineConfig(dtype="float32")) as engine:
        await engine.score("why", short)
        for truncation in (CUT_LONG, Truncation(max_tokens=-1, windows=True), Truncation(max_tokens=200)):
            again = await engine.score("why", short, truncation=truncation)
            assert again.usage.cached_documents == 10
        shorter = await engine.score("why", short, truncation=Truncation(max_tokens=12))
        assert shorter.usage.cached_documents < 10
        assert shorter.truncated > 0


async def test_an_error_names_the_document_by_its_place_in_the_request() -> None:
    async with Engine(EngineConfig(dtype="float32")) as engine:
        with pytest.raises(InvalidRequestError, match=r"documents\[3\]"):
            await engine.score("why", ["a", "a", "a", "word " * 500], truncation="error")


def test_what_was_kept_last_is_in_memory_again_after_a_restart(tmp_path: Path) -> None:
    entries = [(bytes([i]) * 32, encode(embedding(i), "float32", 5, False)) for i in range(6)]
    first = EmbeddingCache(b"", "float32", MemoryStore(1 << 20), DiskStore(tmp_path, 1 << 24))
    first.put(entries)
    first.close()
    # Room for three of them.
    memory = MemoryStore(3 * entries[0][1].nbytes)
    again = EmbeddingCache(b"", "float32", memory, DiskStore(tmp_path, 1 << 24))
    again.wait_until_warm(60)
    assert [memory.get(key) is not None for key, _ in entries] == [False] * 3 + [True] * 3
    assert torch.equal(memory.get(entries[-1][0]).rows, entries[-1][1].rows)  # type: ignore[union-attr]
    assert memory.evictions == 0
    again.clear()
    assert again.get(entries[-1][0]) is None
    again.close()
