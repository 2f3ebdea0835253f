"""The slab of cached embeddings: what is found in it is what was put there, and scores as on the host."""

import numpy as np
import pytest
import torch

from maxsimd.engine.cache import CachedEmbedding, EmbeddingCache
from maxsimd.engine.cache.memory import MemoryStore
from maxsimd.engine.cache.segments import Segments
from maxsimd.engine.cache.slab import EmbeddingSlab
from maxsimd.pooling.ragged import Ragged
from tests.unit.engine.cache.slab_checks import check_scores_from_a_slab
from tests.unit.engine.ops.interpreted import run_interpreted

CPU = torch.device("cpu")
# Eight segments of eight rows.
ROWS, SEGMENT, DIM = 64, 8, 4


def test_the_segment_that_was_not_used_for_longest_goes_first() -> None:
    segments = Segments(ROWS)
    for _ in range(8):
        segments.begin_turn()
        segments.reserve(np.array([SEGMENT]))
    segments.begin_turn()
    segments.touch(np.array([0, 3]))
    starts, emptied = segments.reserve(np.array([5, 5]))
    assert starts.tolist() == [8, 16]
    assert emptied == [1, 2]


def test_forgetting_in_the_cache_is_forgetting_on_the_device() -> None:
    cache = EmbeddingCache(b"", "float32", MemoryStore(1 << 20), None)
    assert (cache.device_entries, cache.device_bytes, cache.device_hits, cache.device_copies) == (0, 0, 0, 0)
    cache.slab = EmbeddingSlab(ROWS, DIM, torch.float32, CPU)
    assert cache.device_bytes == ROWS * DIM * 4
    cache.slab.put([b"a", b"b"], Ragged(torch.ones(3, DIM), (0, 1, 3)))
    assert cache.device_entries == 2
    cache.drop(b"a")
    assert cache.device_entries == 1
    entries = [CachedEmbedding(torch.ones(2, DIM), None, 2, False, key) for key in (b"b", b"c")]
    cache.slab.locate([b"b", b"c"], entries)
    assert (cache.device_entries, cache.device_hits, cache.device_copies) == (2, 1, 1)
    cache.clear()
    assert cache.device_entries == 0
    cache.close()


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_documents_in_a_slab_score_as_their_embeddings(backend: str, precision: str) -> None:
    check_scores_from_a_slab("cpu", backend, precision)


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.exhaustive), "int8"])
def test_they_do_by_the_triton_kernel_when_interpreted(precision: str) -> None:
    pytest.importorskip("triton")
    run_interpreted(check_scores_from_a_slab, "cpu", "triton", precision)
