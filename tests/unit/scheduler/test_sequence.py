"""The nouns of scheduling: sequences, cached batches, chunks, steps and their halves."""

import numpy as np
import pytest

from maxsimd.scheduler import (
    CachedBatch,
    Chunk,
    JoinedTokens,
    ResultSlot,
    Sequence,
    Step,
    Tokens,
)
from tests.unit.scheduler.scheduled_requests import cached, pairs, query, texts, tokens

SLOT = ResultSlot(7, 3)


def test_a_pair_runs_only_what_follows_its_prefix() -> None:
    prefix, pair = pairs(7, 20, [30])
    assert (prefix.is_prefix, prefix.payload.task) == (True, ""), "nothing of a prefix is pooled"
    assert (pair.waits_for, pair.prefix_id, pair.shared_prefix_len) == (0, 0, 20)
    assert (len(pair), pair.num_new_tokens, pair.is_prefix) == (50, 30, False)
    alone = Sequence.pair(1, SLOT, tokens(5))
    assert (alone.waits_for, alone.prefix_id, alone.num_new_tokens) == (None, None, 5)


def test_tokens_are_one_or_more_and_attended_unless_said() -> None:
    with pytest.raises(ValueError, match=r"^a sequence needs at least one token$"):
        Tokens(np.zeros(0, dtype=np.int32))
    assert tokens(5).num_attended == 5
    assert Tokens(np.zeros(5, dtype=np.int32), attended_len=3).num_attended == 3


def test_joined_tokens_are_their_parts_which_are_not_copied() -> None:
    query, document = np.arange(3, dtype=np.int32), np.arange(7, 9, dtype=np.int32)
    own_types = np.array([4, 5, 6], dtype=np.int32)
    joined = JoinedTokens.of((query, document), (own_types, 1))
    assert joined.parts[0] is query
    assert (joined.ids.tolist(), joined.type_ids.tolist()) == ([0, 1, 2, 7, 8], [4, 5, 6, 1, 1])
    assert (len(joined), joined.num_attended, joined.pooled_positions) == (5, 5, None)
    with pytest.raises(ValueError, match=r"^a sequence needs at least one token$"):
        JoinedTokens.of((query[:0],), (0,))


@pytest.mark.parametrize(("price", "documents"), [(0, ("document",)), (1, ())])
def test_a_cached_batch_needs_a_price_and_a_document(price: int, documents: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"^a cached batch needs a price of at least one token and a doc"):
        CachedBatch(0, 0, price, documents)


def test_a_chunk_says_which_part_it_is() -> None:
    for start, stop, expected in (
        (0, 10, (True, True, True)),
        (0, 9, (True, False, False)),
        (1, 10, (False, True, False)),
        (1, 9, (False, False, False)),
    ):
        chunk = Chunk(texts(0, [10])[0], start, stop)
        assert (chunk.is_first, chunk.is_last, chunk.is_whole) == expected
        assert not chunk.is_prefix
        assert not chunk.is_all_after_prefix
    for shared in (1, 20):
        prefix, pair = pairs(0, shared, [30])
        stop = len(pair)
        assert Chunk(prefix, 0, shared).is_prefix
        assert not Chunk(prefix, 0, shared).is_all_after_prefix
        assert Chunk(pair, shared, stop).is_all_after_prefix
        assert not Chunk(pair, shared, stop - 1).is_all_after_prefix
        assert not Chunk(pair, shared + 1, stop).is_all_after_prefix
        assert not Chunk(pair, shared, stop).is_prefix


def step_of(num_chunks: int, num_cached: int) -> Step:
    chunks = tuple(Chunk(text, 0, len(text)) for text in texts(0, [5] * num_chunks))
    return Step(4, chunks, tuple(cached(0, price) for price in range(1, num_cached + 1)))


@pytest.mark.parametrize(("num_chunks", "num_cached"), [(3, 0), (0, 3), (1, 1), (1, 4), (4, 1)])
def test_a_step_splits_into_halves_that_hold_all_of_it(num_chunks: int, num_cached: int) -> None:
    step = step_of(num_chunks, num_cached)
    first, second = step.halves()
    assert (*first.chunks, *second.chunks) == step.chunks
    assert (*first.cached, *second.cached) == step.cached
    assert first.num_parts == step.num_parts // 2 > 0
    assert first.num_parts + second.num_parts == step.num_parts == num_chunks + num_cached
    assert first.step_id == second.step_id == 4
    assert not (first.cached and second.chunks), "a query comes before what is scored against it"


def test_a_step_is_run_in_stages_chunks_first() -> None:
    assert [len(stage.cached) for stage in step_of(0, 4).stages()] == [4]
    step = step_of(2, 5)
    stages = step.stages()
    assert [stage.chunks for stage in stages] == [step.chunks, (), ()]
    assert [stage.cached for stage in stages] == [(), step.cached[:4], step.cached[4:]]
    assert {stage.step_id for stage in stages} == {4}


def test_what_is_run_first_is_delivered_before_the_rest_is_run() -> None:
    chunks = [Chunk(text, 0, 5) for request_id in (1, 2, 1) for text in texts(request_id, [5])]
    step = Step(4, tuple(chunks), (cached(1, 7), cached(2, 8)), first=frozenset({2}))
    stages = step.stages()
    assert [stage.chunks for stage in stages] == [(chunks[1],), (), (chunks[0], chunks[2]), ()]
    assert [stage.cached for stage in stages] == [(), (step.cached[1],), (), (step.cached[0],)]
    assert all(not stage.first for stage in stages)
    made = query(0, 0, 10)
    assert Step(1, (Chunk(made, 0, 4), Chunk(made, 6, 10)), (cached(0, 100),)).num_tokens == 8
