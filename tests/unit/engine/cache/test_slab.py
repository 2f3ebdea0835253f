"""The slab of cached embeddings: what is found in it is what was put there, and scores as on the host."""

import random
from typing import Any, cast

import numpy as np
import pytest
import torch

from maxsimd.engine.cache import CachedEmbedding, EmbeddingCache, Precision
from maxsimd.engine.cache.embeddings import rounded
from maxsimd.engine.cache.slab import EmbeddingSlab, Segments
from maxsimd.engine.cache.store import MemoryStore
from maxsimd.engine.scoring import scorer
from maxsimd.engine.scoring.maxsim import choose_maxsim, choose_maxsim_spans, maxsim_reference
from maxsimd.pooling.dispatch import Pooled
from maxsimd.pooling.ragged import Ragged
from maxsimd.scheduler import CachedBatch, DocumentPayload, ResultSlot, TokenSequence
from tests.unit.engine.ops.interpreted import run_interpreted
from tests.unit.pairs import pairs_of
from tests.unit.scheduler.scheduled_requests import tokens

DIM, ROWS, MOST_ROWS = 16, 160, 18
TASK = "token_embed"
KEYS = [bytes([i]) for i in range(24)]


def unit_rows(seed: int, count: int) -> torch.Tensor:
    rows = torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows, dim=-1)


def cached(seed: int, count: int, precision: Precision, key: bytes | None) -> CachedEmbedding:
    return CachedEmbedding(*rounded(unit_rows(seed, count), precision), count, False, key)


def exact(query: torch.Tensor, document: CachedEmbedding, dtype: torch.dtype) -> float:
    rows = Ragged(document.rows, (0, len(document.rows)), document.scales).decoded(dtype)
    query = query.to(dtype)
    return maxsim_reference(Ragged(query, (0, len(query))), rows, pairs_of([(0, 0)])).item()


class Scored:
    """A document scorer with a slab that holds only some of the documents, beside the host's own copies."""

    def __init__(self, device: str, backend: str, precision: Precision) -> None:
        self.precision = precision
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.device = torch.device(device)
        takes_int8 = backend == "triton" and precision == "int8"
        self.cache = EmbeddingCache(b"", precision, MemoryStore(1 << 20), None)
        self.slab = EmbeddingSlab(ROWS, DIM, torch.int8 if takes_int8 else self.dtype, self.device)
        self.cache.slab = self.slab
        self.scorer = scorer.DocumentScorer(
            "maxsim", choose_maxsim(backend, self.device)[1], self.device, self.dtype, takes_int8=takes_int8,
            maxsim_spans=choose_maxsim_spans(backend), cache=self.cache,
        )  # fmt: skip
        self.query = unit_rows(0, 5).to(self.dtype)
        self.scorer.queries.put(
            TokenSequence.query(1, 7, TASK, tokens(5), 1 << 30), self.query.to(self.device)
        )
        self.host: dict[bytes, CachedEmbedding] = {}

    def run(self, seeds: dict[bytes, tuple[int, int]]) -> None:
        """New documents under these keys, of these seeds and lengths: scored, and put into the slab."""
        embeddings = {key: unit_rows(*how).to(self.dtype) for key, how in seeds.items()}
        documents = [
            TokenSequence.document(100 + i, ResultSlot(7, i), TASK, tokens(3), DocumentPayload(1, key))
            for i, key in enumerate(seeds)
        ]
        items = Ragged.from_items([rows.to(self.device) for rows in embeddings.values()])
        with torch.inference_mode():
            made = self.scorer.score([Pooled(TASK, tuple(documents), items)], [], [])
        [arriving] = made.new_embeddings
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.host |= {key: arriving.entry(i) for i, key in enumerate(seeds)}
        self._compare(made, [*seeds])

    def ask(self, keys: list[bytes], given: int = 0) -> None:
        """Cached documents under these keys, and some that a caller brought."""
        entries = [self.host[key] for key in keys]
        entries += [cached(1000 + i, 3 + i, self.precision, None) for i in range(given)]
        documents = [scorer.CachedDocument(ResultSlot(7, i), entry) for i, entry in enumerate(entries)]
        with torch.inference_mode():
            made = self.scorer.score([], [], [CachedBatch(7, 1, 1, scorer.CachedDocuments.of(documents))])
        self._compare(made, keys, entries)

    def _compare(self, made: scorer.StepOutcome, keys: list[bytes], entries: Any = None) -> None:
        expected = [exact(self.query, entry, self.dtype) for entry in entries or [self.host[k] for k in keys]]
        found = np.full(len(expected), np.nan)
        for output in made.outputs:
            for slot, score in zip(output.slots, output.items.values[:, 0].tolist(), strict=True):
                assert np.isnan(found[slot.index]), "no document is scored twice"
                found[slot.index] = score
        np.testing.assert_allclose(found, expected, atol=1e-3 if self.dtype is torch.float32 else 5e-2)
        assert sum(made.consumers.values()) == len(expected)


def check_scores_from_a_slab(device: str, backend: str, precision: str) -> None:
    """Random turns of new documents, attempts that are repeated, cached ones, some forgotten, and all."""
    scored = Scored(device, backend, cast("Precision", precision))
    draw = random.Random(3)
    turns = 16 if (device, backend) == ("cpu", "triton") else 40  # interpreting takes long
    for turn in range(turns):
        seeds = {
            key: (draw.randrange(1 << 20), draw.randint(0, MOST_ROWS))
            for key in draw.sample(KEYS, draw.randint(1, 6))
        }
        match draw.randrange(8):
            case 0 | 1:
                scored.run(seeds)
            case 2:
                scored.run(seeds)
                scored.run({key: (seed + 1, count) for key, (seed, count) in seeds.items()})
            case 3 if turn % 2:
                scored.cache.clear()
            case 4:
                for key in seeds:
                    scored.slab.drop(key)
            case _:
                there = [key for key in KEYS if key in scored.host]
                scored.ask(draw.sample(there, draw.randint(0, len(there))), given=1 + turn % 2)
    scored.cache.close()
    assert scored.slab.hits > turns // 2
    assert scored.slab.copied > turns // 2
    assert scored.slab.evictions > turns // 4


def test_the_segment_that_was_not_used_for_longest_goes_first() -> None:
    segments = Segments(64)  # eight segments of eight rows
    for _ in range(8):
        segments.begin_turn()
        segments.reserve(np.array([8]))
    segments.begin_turn()
    segments.touch(np.array([0, 3]))
    starts, emptied = segments.reserve(np.array([5, 5]))
    assert starts.tolist() == [8, 16]
    assert emptied == [1, 2]


def test_forgetting_in_the_cache_is_forgetting_on_the_device() -> None:
    cache = EmbeddingCache(b"", "float32", MemoryStore(1 << 20), None)
    slab = cache.slab = EmbeddingSlab(64, 4, torch.float32, torch.device("cpu"))
    assert slab.nbytes == 64 * 4 * 4
    slab.put([b"a", b"b"], Ragged(torch.ones(3, 4), (0, 1, 3)))
    assert len(slab) == 2
    cache.drop(b"a")
    assert len(slab) == 1
    entries = [CachedEmbedding(torch.ones(2, 4), None, 2, False, key) for key in (b"b", b"c")]
    slab.locate([b"b", b"c"], entries)
    assert (len(slab), slab.hits, slab.copied) == (2, 1, 1)
    cache.clear()
    assert len(slab) == 0
    cache.close()


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_documents_in_a_slab_score_as_their_embeddings(backend: str, precision: str) -> None:
    check_scores_from_a_slab("cpu", backend, precision)


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.exhaustive), "int8"])
def test_they_do_by_the_triton_kernel_when_interpreted(precision: str) -> None:
    pytest.importorskip("triton")
    run_interpreted(check_scores_from_a_slab, "cpu", "triton", precision)
