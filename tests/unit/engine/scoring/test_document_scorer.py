"""The document scorer against plain MaxSim, and the stores of what it holds between steps."""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from maxsimd.engine.cache import CachedEmbedding, EmbeddingCache, Precision
from maxsimd.engine.cache.store import MemoryStore
from maxsimd.engine.ops import cpu as kernels
from maxsimd.engine.scoring import scorer as scorers
from maxsimd.engine.scoring import similarity
from maxsimd.engine.scoring.maxsim import maxsim_apart_avx512, maxsim_avx512, maxsim_reference
from maxsimd.pooling.dispatch import Pooled
from maxsimd.pooling.ragged import Ragged
from maxsimd.scheduler import CachedBatch, DocumentPayload, ResultSlot, TokenSequence, Window
from tests.unit.pairs import Pairs
from tests.unit.scheduler.scheduled_requests import tokens

pytestmark = pytest.mark.fast

DIM = 8
CPU = torch.device("cpu")
SLOT = ResultSlot(0, 0)


def rows(seed: int, count: int = 3) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(count, DIM, generator=random), dim=-1)


def query(sequence_id: int, request_id: int, num_consumers: int) -> TokenSequence:
    return TokenSequence.query(sequence_id, request_id, "token_embed", tokens(2), num_consumers)


def document(number: int, slot: ResultSlot, query_id: int, length: int = 3, **more: Any) -> TokenSequence:
    payload = DocumentPayload(query_id, **more)
    return TokenSequence.document(number, slot, "token_embed", tokens(length), payload)


def pooled(*items: tuple[TokenSequence, torch.Tensor]) -> Pooled:
    sequences = tuple(sequence for sequence, _ in items)
    return Pooled("token_embed", sequences, Ragged.from_items([item for _, item in items]))


def plain(query_rows: torch.Tensor, document_rows: torch.Tensor) -> float:
    return sum(max(float(q @ d) for d in document_rows) for q in query_rows)


@dataclass
class ReadsInt8:
    """A backend that takes int8 rows with scales, and notes what it is given."""

    given: list[Ragged] = field(default_factory=list)

    def __call__(self, queries: Ragged, documents: Ragged, pairs: Pairs) -> torch.Tensor:
        self.given.append(documents)
        return maxsim_reference(queries, documents.decoded(torch.float32), pairs)


class Scorer(scorers.DocumentScorer):
    """One whose steps have new documents alone unless it is said."""

    def score(self, pooled: Any, skipped: Any = (), cached: Any = ()) -> scorers.StepOutcome:
        return super().score(pooled, skipped, cached)


def scorer(cache: EmbeddingCache | None = None) -> Scorer:
    return Scorer("maxsim", maxsim_reference, CPU, torch.float32, cache=cache)


def cache_of(precision: Precision) -> EmbeddingCache:
    return EmbeddingCache(b"", precision, MemoryStore(1 << 20), None)


def entry(item: torch.Tensor, precision: Precision, truncated: bool = False) -> CachedEmbedding:
    items = cache_of(precision).rounded(Ragged(item, (0, len(item))))
    return CachedEmbedding(items.values, items.scales, len(item), truncated)


def scores(made: scorers.StepOutcome) -> dict[ResultSlot, float]:
    """Every slot's score; no slot may be scored twice."""
    found: dict[ResultSlot, float] = {}
    for output in made.outputs:
        assert output.scalar
        assert output.items.lengths == [1] * len(output.slots)
        assert output.items.values.shape == (len(output.slots), 1)
        for slot, item in zip(output.slots, output.items, strict=True):
            assert slot not in found
            found[slot] = item.item()
    return found


def cached_batch(query_id: int, documents: list[tuple[ResultSlot, CachedEmbedding]]) -> CachedBatch:
    columns = scorers.CachedDocuments.of([scorers.CachedDocument(*document) for document in documents])
    return CachedBatch(documents[0][0].request_id, query_id, 1, columns)


def near(query_rows: torch.Tensor, *parts: torch.Tensor) -> Any:
    return pytest.approx(plain(query_rows, torch.cat(parts)), abs=1e-5)


def test_what_nobody_waits_for_is_neither_scored_nor_stored() -> None:
    ours = scorer()
    slot = ResultSlot(7, 1)
    text = TokenSequence.text(5, ResultSlot(9, 0), "token_embed", tokens(3))
    step = [(text, rows(5)), (query(4, 9, 0), rows(4)), (query(1, 7, 2), rows(1)), (text, rows(6))]
    made = ours.score([pooled(*step, (document(2, slot, 1, cache_key=b"k"), rows(2)))])
    assert scores(made) == {slot: near(rows(1), rows(2))}
    assert made.new_embeddings == [], "there is no cache"
    assert (len(ours.queries), ours.score([pooled((text, rows(5)))]).outputs) == (1, [])
    # The query stays for a document of a later step.
    ours.commit(made.releases)
    slot = ResultSlot(7, 0)
    made = ours.score([pooled((document(3, slot, 1), rows(3)))])
    assert scores(made) == {slot: near(rows(1), rows(3))}
    assert len(ours.queries) == 1, "nothing is released before the commit"
    ours.commit(made.releases)
    assert len(ours.queries) == 0
    ours = scorer()
    for request in (7, 8):
        window = document(10 * request, ResultSlot(request, 0), request, window=Window(request, 2))
        ours.score([pooled((query(request, request, 2), rows(1)), (window, rows(2)))])
    ours.drop_request(7)
    assert (len(ours.queries), len(ours.windows)) == (1, 1)
    made = ours.score([pooled((document(81, ResultSlot(8, 0), 8, window=Window(8, 2)), rows(3)))])
    assert scores(made) == {ResultSlot(8, 0): near(rows(1), rows(2), rows(3))}


def test_a_document_is_scored_when_its_last_window_has_come() -> None:
    cache = cache_of("float32")
    ours = scorer(cache)
    slot, whole_slot = ResultSlot(7, 0), ResultSlot(7, 1)
    windows = [
        document(10 + i, slot, 1, cache_key=b"k", truncated=True, window=Window(10, 3), length=5 - i)
        for i in range(3)
    ]
    items = [rows(10 + i, i + 1) for i in range(3)]
    made = ours.score([pooled((query(1, 7, 4), rows(1)), (windows[2], items[2]))])
    assert (made.outputs, dict(made.releases.queries), len(ours.windows)) == ([], {}, 1)
    ours.commit(made.releases)
    rest = [(windows[1], items[1]), (document(20, whole_slot, 1), rows(20)), (windows[0], items[0])]
    made = ours.score([pooled(*rest)])
    assert scores(made) == {whole_slot: near(rows(1), rows(20)), slot: near(rows(1), *items)}
    cached = made.new_embeddings[0].entry(0)
    assert torch.equal(cached.rows, torch.cat(items))
    assert (cached.tokens, cached.truncated) == (5 + 4 + 3, True)
    assert (dict(made.releases.queries), made.releases.documents) == ({1: 4}, {10})
    assert (len(ours.queries), len(ours.windows)) == (1, 1)
    ours.commit(made.releases)
    assert (len(ours.queries), len(ours.windows)) == (0, 0)
    cache.close()


@pytest.mark.parametrize("kind", ["new", "duplicate", "hit", "cached"])
def test_a_query_no_longer_stored_fails_its_request_alone(kind: str) -> None:
    cache = cache_of("float32")
    ours = scorer(cache)
    good, source = ResultSlot(7, 0), ResultSlot(7, 1)
    step = [(query(1, 7, 2), rows(1)), (document(5, source, 1, cache_key=b"k"), rows(5))]
    skipped: list[scorers.SkippedSequence] = []
    cached: list[CachedBatch] = []
    item = entry(rows(5), "float32")
    for slot, query_id in ((ResultSlot(8, 0), 99), (good, 1)):
        again = document(3 + slot.index, slot, query_id, cache_key=b"k" if kind == "duplicate" else None)
        match kind:
            case "new":
                step.append((again, rows(5)))
            case "duplicate":
                skipped.append(scorers.SkippedSequence(again))
            case "hit":
                skipped.append(scorers.SkippedSequence(again, item))
            case _:
                cached.append(cached_batch(query_id, [(slot, item)]))
    made = ours.score([pooled(*step)], skipped, cached)
    assert made.failures == [scorers.RequestFailure(8, "the query's embedding is no longer stored")]
    expected = near(rows(1), rows(5))
    assert (scores(made), dict(made.releases.queries)) == ({source: expected, good: expected}, {1: 2})
    cache.close()


@pytest.mark.parametrize(
    ("precision", "dtype", "takes_int8"),
    [
        ("float32", torch.float32, True), ("bfloat16", torch.float32, False),
        ("bfloat16", torch.bfloat16, True), ("int8", torch.float32, True), ("int8", torch.bfloat16, False),
    ],
)  # fmt: skip
def test_all_documents_score_as_maxsim(precision: Precision, dtype: torch.dtype, takes_int8: bool) -> None:
    """New, duplicate and cached ones of two requests: those of one key and query to the same bits."""
    draw, cache = random.Random(0), cache_of(precision)
    queries = {1: rows(1, 2), 2: rows(2, 4), 3: rows(3, 1)}
    keys = [None, b"one", None, b"three", b"four", None]
    for _ in range(5):
        maxsim = ReadsInt8()
        ours = Scorer("maxsim", maxsim, CPU, dtype, takes_int8=takes_int8, cache=cache)
        items = [rows(10 + i, draw.randint(1, 9)) for i in range(6)]
        asked: dict[ResultSlot, tuple[int, int]] = {}

        def ask(item: int, query_id: int, asked: Any = asked) -> TokenSequence:
            slot = ResultSlot(7 + query_id // 2, len(asked))
            asked[slot] = query_id, item
            options: Any = {"cache_key": keys[item], "truncated": item % 2 == 0, "length": 20 + item}
            return document(100 + slot.index, slot, query_id, **options)

        step = [(ask(i, draw.choice((1, 2, 3))), item) for i, item in enumerate(items)]
        step += [(query(i, 7 + i // 2, 9), each) for i, each in queries.items()]
        draw.shuffle(step)
        again = [(i, draw.choice((1, 2, 3))) for i in draw.choices((1, 3, 4), k=4)]
        made = ours.score([pooled(*step)], [scorers.SkippedSequence(ask(*each)) for each in again])
        assert (made.failures, made.releases.documents) == ([], frozenset())
        assert dict(made.releases.queries) == Counter(query_id for query_id, _ in asked.values())
        [arriving] = made.new_embeddings
        staged = {name: arriving.entry(i) for i, name in enumerate(arriving.keys)}
        assert len(maxsim.given) == 3, "one batch for all requests: without a key, with one, and again"
        hits = [scorers.SkippedSequence(ask(i, i % 3 + 1), staged[keys[i]]) for i in (3, 4)]
        batches = [
            cached_batch(i, [(ask(item, i).payload.slot, staged[keys[item]]) for item in (1, 4, 3)])
            for i in (1, 3)
        ]
        later = ours.score([], hits, batches)
        assert later.new_embeddings == [], "what is cached is not cached again"
        found, bits = scores(made) | scores(later), defaultdict(set)
        for slot, (query_id, item) in asked.items():
            exact = items[item]
            if keys[item] is not None:
                kept, rounded = staged[keys[item]], entry(exact, precision)
                assert torch.equal(kept.rows, rounded.rows)
                assert (kept.tokens, kept.truncated) == (20 + item, item % 2 == 0)
                exact = Ragged(kept.rows, (0, len(kept.rows)), kept.scales).decoded(torch.float32).values
            tolerance = 1e-5 if dtype is torch.float32 else 5e-2
            assert found[slot] == pytest.approx(plain(queries[query_id], exact), abs=tolerance)
            bits[query_id, item].add(found[slot])
        assert {len(each) for each in bits.values()} == {1}
        for i, given in enumerate(maxsim.given):
            is_int8 = takes_int8 and precision == "int8" and i > 0
            assert given.values.dtype is (torch.int8 if is_int8 else dtype)
            assert (given.scales is None) != is_int8
    cache.close()


@pytest.mark.skipif(not kernels.is_available(), reason="this processor cannot run the kernel")
def test_documents_score_alike_where_they_lie() -> None:
    for precision, dtype, similarity_name in (
        ("float32", torch.float32, "maxsim"), ("float32", torch.bfloat16, "cosine"),
        ("bfloat16", torch.float32, "meanmaxsim"), ("int8", torch.float32, "cosine"),
        ("int8", torch.bfloat16, "meanmaxsim"),
    ):  # fmt: skip
        cache = cache_of(precision)
        found = []
        for apart in (None, maxsim_apart_avx512):
            ours = Scorer(similarity_name, maxsim_avx512, CPU, dtype, maxsim_apart=apart, cache=cache)
            slots = [ResultSlot(7, i) for i in range(4)]
            length = 1 if similarity_name == "cosine" else 9
            new = (document(2, slots[0], 1, cache_key=b"k"), rows(10, length))
            was_new = ours.score([pooled((query(1, 7, 4), rows(1, length)), new)])
            cached = was_new.new_embeddings[0].entry(0)
            hits = [scorers.SkippedSequence(document(3, slots[1], 1, cache_key=b"k"), cached)]
            # The second asks for a query that is no longer there.
            batches = [cached_batch(1, [(slots[2], cached)]), cached_batch(99, [(slots[3], cached)])]
            made = ours.score([], hits, batches)
            assert ([failure.request_id for failure in made.failures], made.consumers) == ([7], {1: 2})
            found.append(scores(was_new) | scores(made))
        assert (found[0], list(found[0]), len(set(found[0].values()))) == (found[1], slots[:3], 1)
        cache.close()


@pytest.mark.parametrize(("similarity", "factor"), [("cosine", 1), ("dot", 6)])
def test_int8_is_decoded_for_similarities_that_are_not_of_tokens(similarity: str, factor: int) -> None:
    ours = Scorer(similarity, ReadsInt8(), CPU, torch.float32, takes_int8=True)
    entries = [(ResultSlot(7, i), entry(3 * rows(10 + i, 1), "int8")) for i in range(2)]
    made = ours.score([pooled((query(1, 7, 2), 2 * rows(1, 1)))], [], [cached_batch(1, entries)])
    expected = [factor * plain(rows(1, 1), rows(10 + i, 1)) for i in range(2)]
    assert list(scores(made).values()) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("later_first", [False, True])
def test_windows_in_two_halves_leave_nothing(later_first: bool) -> None:
    """A step is tried again in halves, and the half that completes the document may be the first."""
    ours = scorer()
    slot = ResultSlot(7, 0)
    windows = [document(10 + i, slot, 1, window=Window(10, 2)) for i in range(2)]
    asked = pooled((query(1, 7, 2), rows(1)))
    halves = [pooled((windows[i], rows(10 + i))) for i in range(2)]
    expected = {slot: near(rows(1), rows(10), rows(11))}
    ours.score([asked, *halves])
    ours.forget({1, 10, 11})
    first = ours.score([asked, halves[0]])
    second = ours.score([halves[1]])
    assert (scores(first), scores(second)) == ({}, expected)
    for made in (second, first) if later_first else (first, second):
        ours.commit(made.releases)
    assert (len(ours.queries), len(ours.windows)) == (0, 0)


class Sizes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        tensors = made if isinstance(made, tuple | list) else (made,)
        self.largest = max(self.largest, *(each.numel() for each in tensors))
        return made


def test_matches_are_found_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    query, windows = rows(1, 300), (150, 0, 50)
    found = similarity.best_matches(query, rows(2, 200), windows)
    monkeypatch.setattr(similarity, "_AT_ONCE", 1000)
    with Sizes() as sizes:
        tiled = similarity.best_matches(query, rows(2, 200), windows)
    assert sizes.largest <= 300 * DIM
    assert tiled[:, :, 0].equal(found[:, :, 0])
    assert torch.allclose(tiled, found, atol=1e-5)


def test_a_query_is_a_copy_and_goes_with_its_last_consumer() -> None:
    store = scorers.QueryStore()
    step = torch.ones(6, 4)
    store.put(query(1, 0, 3), step[2:4])
    store.put(query(2, 0, 1), torch.ones(2, 4))
    step.zero_()
    store.release(1)
    store.release(1)
    store.release(3)
    assert len(store) == 2
    assert torch.equal(store.get(1), torch.ones(2, 4))
    store.release(1)
    assert len(store) == 1
    with pytest.raises(KeyError):
        store.get(1)
    store.release(2, consumers=5)
    assert len(store) == 0
    # Put again, it has all its consumers and its latest embedding.
    store.put(query(1, 0, 2), torch.zeros(2, 4))
    store.release(1)
    store.put(query(1, 0, 2), torch.ones(2, 4))
    store.release(1)
    assert torch.equal(store.get(1), torch.ones(2, 4))


def test_a_window_is_a_copy_counts_once_and_must_come_again_when_forgotten() -> None:
    store = scorers.WindowStore()
    first, second, step = Window(1, 2), Window(5, 2), torch.full((2, 4), 5.0)
    for _ in range(2):
        assert store.put(document(5, SLOT, 0, length=7), second, step) is None
    step.zero_()
    for number in (1, 2):
        store.put(document(number, SLOT, 0), first, torch.ones(1, 4))
    store.put(document(6, SLOT, 0), second, torch.ones(1, 4))
    store.forget({1, 2, 6, 99})
    assert len(store) == 1, "of the first document nothing is left"
    assert store.tokens(5) == 7
    whole = store.put(document(6, SLOT, 0, length=4), second, torch.full((2, 4), 6.0))
    assert whole is not None
    assert (whole[:, 0].tolist(), store.tokens(5)) == ([5, 5, 6, 6], 11)
    assert store.put(document(1, SLOT, 0), first, torch.ones(1, 4)) is None


@pytest.mark.parametrize("is_pinned", [True, False])
def test_scalars_and_matrices_are_both_copied(monkeypatch: pytest.MonkeyPatch, is_pinned: bool) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: is_pinned)
    matrices = Ragged.from_lengths(torch.arange(12.0).reshape(4, 3), [3, 1])
    scores = Ragged(torch.tensor([[0.5], [-2.0]]), (0, 1, 2))
    wide = Ragged.from_lengths(torch.arange(100.0, 110.0).reshape(2, 5), [0, 2])
    all_items = [matrices, scores, wide, scores]
    outputs = [
        scorers.Output((ResultSlot(i, 0), ResultSlot(i, 1)), items, scalar=items is scores)
        for i, items in enumerate(all_items)
    ]
    host = torch.cat([items.values.reshape(-1) for items in all_items])
    results = scorers.StepOutcome(outputs, host=host).results()
    assert [slot for slot, _ in results] == [slot for output in outputs for slot in output.slots]
    for (_, value), wanted in zip(results, [*matrices, 0.5, -2.0, *wide, 0.5, -2.0], strict=True):
        assert isinstance(value, float if isinstance(wanted, float) else np.ndarray)
        np.testing.assert_array_equal(value, wanted)
        if isinstance(value, np.ndarray) and value.size:
            assert np.shares_memory(value, host.numpy()) is not is_pinned
            assert (value.base is None) is is_pinned, "nor does one hold the others"
