"""The slab of cached embeddings: what is found in it is what was put there, and scores as on the host."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from maxsimd.engine.cache import CachedEmbedding, EmbeddingCache, Precision
from maxsimd.engine.cache.entry import rounded
from maxsimd.engine.cache.memory import MemoryStore
from maxsimd.engine.cache.segments import Segments
from maxsimd.engine.cache.slab import EmbeddingSlab, Located
from maxsimd.pooling.ragged import Ragged
from tests.unit.engine.cache.slab_checks import cached, check_scores_from_a_slab
from tests.unit.engine.ops.interpreted import run_interpreted

CPU = torch.device("cpu")
# Eight segments of eight rows.
ROWS, SEGMENT, DIM = 64, 8, 4
KEYS = st.binary(min_size=1, max_size=1).map(lambda key: bytes([key[0] % 12]))
LENGTHS = st.integers(0, 10)


def _failing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Fails once it is done."""

    def fails(*arguments: Any) -> Any:
        function(*arguments)
        raise MemoryError

    return fails


class SlabMachine(RuleBasedStateMachine):
    """A slab beside a dictionary of what was last put under each key, which is what the host has."""

    def __init__(self) -> None:
        super().__init__()
        self.host: dict[bytes, CachedEmbedding] = {}
        self.located: tuple[Located, list[CachedEmbedding]] | None = None
        self.count = 0

    @initialize(precision=st.sampled_from(["float32", "bfloat16", "int8"]), as_int8=st.booleans())
    def open(self, precision: Precision, as_int8: bool) -> None:
        self.precision = precision
        dtype = torch.int8 if precision == "int8" and as_int8 else torch.float32
        self.slab = EmbeddingSlab(ROWS, DIM, dtype, CPU)

    def make(self, lengths: list[int]) -> Ragged:
        """Embeddings like no others, in the cache's precision."""
        self.count += 1
        random = torch.Generator().manual_seed(self.count)
        values, scales = rounded(torch.randn(sum(lengths), DIM, generator=random), self.precision)
        return Ragged.from_lengths(values, lengths, scales)

    def note(self, keys: list[bytes], items: Ragged) -> None:
        for i, key in enumerate(keys):
            one = items.item(i)
            self.host[key] = CachedEmbedding(one.values, one.scales, len(one.values), False, key)

    @rule(documents=st.lists(st.tuples(KEYS, LENGTHS), max_size=8), is_repeated=st.booleans())
    def put(self, documents: list[tuple[bytes, int]], is_repeated: bool) -> None:
        """An attempt at a step, and perhaps another one with other numbers."""
        self.located = None
        keys, lengths = [key for key, _ in documents], [length for _, length in documents]
        for _ in range(1 + is_repeated):
            items = self.make(lengths)
            self.slab.put(keys, items)
        self.note(keys, items)

    @rule(documents=st.lists(st.tuples(KEYS, LENGTHS), max_size=8))
    def cache_on_the_host_alone(self, documents: list[tuple[bytes, int]]) -> None:
        """As after a restart. What was in the slab under the key has been dropped with it."""
        for key, length in documents:
            self.slab.drop(key)
            self.note([key], self.make([length]))

    @rule(data=st.data(), given=st.integers(0, 2))
    def locate(self, data: st.DataObject, given: int) -> None:
        there = sorted(self.host)
        keys: list[bytes | None] = (
            list(data.draw(st.lists(st.sampled_from(there), max_size=12))) if there else []
        )
        entries = [self.host[key] for key in keys if key is not None]
        keys += [None] * given
        entries += [cached(i, 2, self.precision, None) for i in range(given)]
        found = self.slab.locate(keys, entries)
        self.located = found, entries
        assert sorted([*found.resident, *found.absent]) == [*range(len(keys))]
        assert all(keys[i] is not None for i in found.resident)
        assert all(
            keys[i] is None or len(entries[i].rows) > SEGMENT or self.is_full(found) for i in found.absent
        )
        self.rows_are_those_of_the_host()

    def is_full(self, found: Located) -> bool:
        """Whether no segment is free of what has just been found. A document may leave a rest of its segment
        that is too small for the next."""
        return len({int(start) // SEGMENT for start in found.spans.starts}) == ROWS // SEGMENT

    @rule(documents=st.lists(st.tuples(KEYS, LENGTHS), min_size=1, max_size=8), after=st.integers(0, 2))
    def fail(self, documents: list[tuple[bytes, int]], after: int) -> None:
        """An attempt that fails before rows are given out, when they are, or when they are written."""
        self.located = None
        items = self.make([length for _, length in documents])
        part = [(self.slab._segments, "reserve"), (self.slab, "_reserve"), (self.slab, "_enter")][after]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*part, _failing(getattr(*part)))
            with pytest.raises(MemoryError):
                self.slab.put([key for key, _ in documents], items)

    @rule(key=KEYS)
    def drop(self, key: bytes) -> None:
        self.slab.drop(key)
        self.host.pop(key, None)

    @rule()
    def clear(self) -> None:
        self.slab.clear()
        self.host.clear()
        assert len(self.slab) == 0

    @invariant()
    def rows_are_those_of_the_host(self) -> None:
        """Also after documents were forgotten: whatever was launched before may still read them."""
        if self.located is None:
            return
        found, entries = self.located
        for span, i in enumerate(found.resident.tolist()):
            entry, item = entries[i], found.spans.item(span)
            exact = Ragged(entry.rows, (0, len(entry.rows)), entry.scales).decoded(torch.float32)
            assert torch.equal(item.decoded(torch.float32).values, exact.values)

    @invariant()
    def no_two_documents_share_a_row(self) -> None:
        bounds = sorted((found >> 31, found & ((1 << 31) - 1)) for found in self.slab._index.values())
        for (start, length), (following, _) in pairwise(bounds):
            assert start + length <= following
            assert start // SEGMENT == (start + max(length, 1) - 1) // SEGMENT


TestSlab = SlabMachine.TestCase
TestSlab.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


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
