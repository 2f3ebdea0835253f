"""Under which key a document is found and cached, by how the request reads it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from maxsimd.engine.cache import EmbeddingCache
from maxsimd.engine.checkpoint import RoleRules
from maxsimd.engine.preprocess import Prepared
from maxsimd.engine.preprocess.long_inputs import LongInputs
from maxsimd.engine.requests import CUT_LONG, REFUSE_LONG, CacheMode, Truncation
from maxsimd.scheduler import Role
from tests.unit.engine.preprocess.preprocessing import (
    embedding,
    empty_cache,
    model,
    preprocessor,
    request_ids,
    score_request,
    words,
)

LONG = words(30)
LONGEST = 20
WINDOWS = Truncation(max_tokens=-1, windows=True)


@pytest.fixture
def cache() -> Iterator[EmbeddingCache]:
    made = empty_cache()
    yield made
    made.close()


def score(
    cache: EmbeddingCache | None,
    document: str,
    truncation: Truncation = REFUSE_LONG,
    mode: CacheMode = "use",
    own_length: int | None = None,
    task: str = "token_embed",
) -> Prepared:
    rules = RoleRules(max_tokens=own_length)
    made = preprocessor(model(max_tokens=LONGEST, document=rules, score_task=task), overlap=1, cache=cache)
    return made.score(score_request(["w1"], [document], truncation, cache=mode), request_ids())


def plain(cache: EmbeddingCache, document: str) -> bytes:
    return cache.key(document, "as it is")


def as_requested(cache: EmbeddingCache, document: str, truncation: Truncation) -> bytes:
    return cache.key(document, LongInputs(truncation, LONGEST, 1).signature)


def key_of(prepared: Prepared) -> bytes | None:
    """The key under which the request's document will be cached."""
    (key,) = {
        sequence.payload.document.cache_key
        for sequence in prepared.sequences
        if sequence.payload.role is Role.DOCUMENT and sequence.payload.document
    }
    return key


def hit(prepared: Prepared) -> bool:
    return bool(prepared.cached)


def test_the_key_says_how_a_document_is_read(cache: EmbeddingCache) -> None:
    """Plain is what any request reads alike: it fits, or is cut to the checkpoint's own length as usual. One
    of exactly that length, here 10 tokens with two special ones, may be a longer one that was cut."""
    left = Truncation(max_tokens=9, side="left")
    usual = (Truncation(), CUT_LONG, Truncation(max_tokens=10))
    for document, own_length, plainly, otherwise in (
        ("w2", None, (Truncation(), CUT_LONG, WINDOWS, left), (Truncation(max_document_tokens=5),)),
        (LONG, None, (), (CUT_LONG, left, WINDOWS)),
        (words(7), 10, (*usual, Truncation(side="left"), WINDOWS), ()),
        (words(8), 10, usual, (Truncation(side="left"), WINDOWS)),
        (words(9), 10, usual, (Truncation(side="left"), WINDOWS)),
    ):
        for each in plainly:
            assert key_of(score(cache, document, each, own_length=own_length)) == plain(cache, document)
        for each in otherwise:
            expected = as_requested(cache, document, each)
            assert key_of(score(cache, document, each, own_length=own_length)) == expected


def test_windows_of_a_bi_encoder_are_not_cached(cache: EmbeddingCache) -> None:
    assert key_of(score(cache, LONG, WINDOWS, task="embed")) is None
    assert key_of(score(cache, LONG, CUT_LONG, task="embed")) == as_requested(cache, LONG, CUT_LONG)


def test_hits_and_misses_are_counted_once_a_different_document(cache: EmbeddingCache) -> None:
    cache.put([(plain(cache, "w2"), embedding()), (plain(cache, "w3"), embedding())])
    bypassed = score(cache, "w2", mode="bypass")
    assert (hit(bypassed), key_of(bypassed), cache.hits, cache.misses) == (False, None, 0, 0)
    made = preprocessor(model(), cache=cache)
    made.score(score_request(["w1"], ["w2", "w3", "w4", "w2"]), request_ids())
    assert (cache.hits, cache.misses) == (2, 1)


def test_a_refresh_drops_both_entries_and_caches_anew(cache: EmbeddingCache) -> None:
    keys = [plain(cache, "w2"), as_requested(cache, "w2", CUT_LONG)]
    cache.put([(key, embedding()) for key in [*keys, plain(cache, "w3")]])
    refreshed = score(cache, "w2", CUT_LONG, mode="refresh")
    assert not hit(refreshed)
    assert key_of(refreshed) == keys[0]
    assert [cache.get(key) for key in keys] == [None, None]
    assert cache.get(plain(cache, "w3")) is not None
    assert (cache.hits, cache.misses) == (0, 0)


def test_a_plain_entry_is_found_by_whoever_reads_it_alike(cache: EmbeddingCache) -> None:
    cache.put([(plain(cache, "w2"), embedding(tokens=10)), (plain(cache, "w3"), embedding(tokens=9))])
    for found in (Truncation(), CUT_LONG, Truncation(max_tokens=10), WINDOWS):
        assert hit(score(cache, "w2", found))
    # Longer than the request allows, or limited by it: read otherwise.
    for missed in (Truncation(max_tokens=9), Truncation(max_document_tokens=100)):
        assert not hit(score(cache, "w2", missed))
    # Of the checkpoint's own length, it may have been cut at its end.
    for usual in (Truncation(), CUT_LONG, Truncation(max_tokens=10)):
        assert hit(score(cache, "w2", usual, own_length=10))
    for otherwise in (Truncation(side="left"), WINDOWS):
        assert not hit(score(cache, "w2", otherwise, own_length=10))
        assert hit(score(cache, "w3", otherwise, own_length=10))


def test_an_entry_as_requested_is_found_by_the_same_alone(cache: EmbeddingCache) -> None:
    for truncation in (
        CUT_LONG,
        Truncation(max_tokens=9),
        Truncation(max_tokens=9, side="left"),
        Truncation(max_tokens=9, windows=True),
        Truncation(max_tokens=9, windows=True, window_overlap=2),
        Truncation(max_tokens=9, max_document_tokens=6),
        Truncation(max_tokens=9, max_document_tokens=5),
        Truncation(max_document_tokens=6),
    ):
        assert not hit(score(cache, LONG, truncation))
        cache.put([(as_requested(cache, LONG, truncation), embedding())])
        assert hit(score(cache, LONG, truncation))
    # What concerns queries alone changes nothing, nor an overlap without windows, nor the engine's own.
    for same in (replace(CUT_LONG, max_query_tokens=3), replace(CUT_LONG, window_overlap=5)):
        assert hit(score(cache, LONG, same))
    cache.put([(as_requested(cache, LONG, WINDOWS), embedding())])
    assert hit(score(cache, LONG, replace(WINDOWS, window_overlap=1)))


def test_the_words_of_keys_stay_as_caches_on_disk_have_them() -> None:
    truncation = Truncation(max_tokens=9, side="left", max_document_tokens=5)
    assert LongInputs(truncation, LONGEST, 1).signature == "('as asked', 9, (True, 'left', 5), False)"
    windows = Truncation(windows=True, window_overlap=2)
    expected = "('as asked', 20, (False, 'right', None), ('at most half', 2))"
    assert LongInputs(windows, LONGEST, 1).signature == expected
