"""How steps are filled: queries first, cuts, cached batches, reduced budgets, and small requests."""

import numpy as np
import pytest

from maxsimd.scheduler import Chunk, JoinedTokens, Scheduler, Step, StepLimits, Tokens
from maxsimd.scheduler.scheduler import STEPS_BESIDE_SMALL
from tests.unit.scheduler import scheduled_requests as made
from tests.unit.scheduler.scheduled_requests import cached, cost, document, query, run_dry, scheduled, texts

# Sequence id, start and stop of each chunk.
Spans = list[tuple[int, int, int]]


def spans(step: Step | None) -> Spans:
    assert step is not None
    return [(chunk.sequence.sequence_id, chunk.start, chunk.stop) for chunk in step.chunks]


def prices(step: Step | None) -> list[int]:
    assert step is not None
    return [batch.price for batch in step.cached]


def bidirectional(tokens: int, sequences: int = 1000) -> Scheduler:
    return Scheduler(StepLimits(tokens, sequences, chunked=False))


def causal(tokens: int) -> Scheduler:
    return Scheduler(StepLimits(tokens, 100, chunked=True))


def test_what_never_fits_is_refused() -> None:
    for budget, sequences, beside_small, message in (
        (0, 1, None, r"^a step must hold at least one token and one sequence$"),
        (1, 0, None, r"^a step must hold at least one token and one sequence$"),
        (100, 10, 0, "beside_small must be from 1 to 100, not 0"),
        (100, 10, 101, "beside_small must be from 1 to 100, not 101"),
    ):
        with pytest.raises(ValueError, match=message):
            StepLimits(budget, sequences, chunked=True, beside_small=beside_small)
    scheduler = bidirectional(100)
    with pytest.raises(ValueError, match=r"^101 tokens do not fit a step of 100$"):
        scheduler.admit(0, texts(0, [5, 101]), [cached(0, 5)])
    assert scheduler.waiting_sequences == len(scheduler._requests) == scheduler.waiting_cached == 0
    scheduler.admit(0, texts(0, [100]))
    causal(100).admit(0, texts(0, [101]))


def test_a_step_holds_at_most_the_allowed_number_of_sequences() -> None:
    scheduler = bidirectional(100, sequences=3)
    scheduler.admit(0, texts(0, [1] * 7), [cached(0, 1)] * 4)
    steps = run_dry(scheduler)
    assert [len(step.chunks) for step in steps] == [3, 3, 1]
    assert [len(step.cached) for step in steps] == [4, 0, 0], "cached batches are none"


def test_documents_follow_their_query() -> None:
    scheduler = bidirectional(100)
    sequences, batches = made.two_stage(0, [10], [20, 30], [5])
    scheduler.admit(0, sequences, batches)
    step = scheduler.schedule()
    assert (spans(step), prices(step)) == ([(0, 0, 10), (2, 0, 30), (1, 0, 20)], [5])
    scheduler.admit(1, [document(1, 11, 50, 10), query(1, 10, 50)])
    assert [sequence_id for sequence_id, _, _ in spans(scheduler.schedule())] == [10, 11], "in any order"
    scheduler.admit(2, [query(2, 12, 50, num_consumers=0)])
    assert spans(scheduler.schedule()) == [(12, 0, 50)], "it may have none"
    # Another query is started only when nothing that is ready fits.
    sequences, batches = made.two_stage(3, [10, 10], [30, 30, 30, 30], [20, 20], 20)
    scheduler.admit(3, sequences, batches)
    step = scheduler.schedule()
    assert ([sequence_id for sequence_id, _, _ in spans(step)], prices(step)) == ([20, 22, 24, 21], [20])
    scheduler = causal(10)
    scheduler.admit(0, [query(0, 0, 25, 3), document(0, 1, 2, 0)], [cached(0, 2, query_id=0)])
    scheduler.schedule()
    assert scheduler._partial is not None
    assert spans(scheduler.schedule()) == [(0, 10, 20)]
    step = scheduler.schedule()
    assert (spans(step), prices(step)) == ([(0, 20, 25), (1, 0, 2)], [2])


def test_pairs_are_run_and_cut_behind_their_prefix() -> None:
    scheduler = causal(100)
    scheduler.admit(0, made.pairs(0, 20, [30, 40]))
    assert scheduler.waiting_tokens == 90
    assert spans(scheduler.schedule()) == [(0, 0, 20), (2, 20, 60), (1, 20, 50)]
    scheduler = causal(50)
    scheduler.admit(0, made.pairs(0, 20, [70]))
    assert [spans(step) for step in run_dry(scheduler)] == [[(0, 0, 20), (1, 20, 50)], [(1, 50, 90)]]


def test_a_sequence_is_cut_to_fill_the_step_and_continued() -> None:
    scheduler = causal(10)
    scheduler.admit(0, texts(0, [8, 7]))
    assert spans(scheduler.schedule()) == [(0, 0, 8), (1, 0, 2)]
    assert (scheduler.waiting_tokens, scheduler.waiting_sequences, bool(scheduler._partial)) == (5, 1, True)
    assert spans(scheduler.schedule()) == [(1, 2, 7)]
    assert (scheduler.waiting_tokens, scheduler.waiting_sequences, bool(scheduler._partial)) == (0, 0, False)
    scheduler.admit(1, texts(1, [11, 30, 12]))
    assert spans(scheduler.schedule()) == [(1, 0, 10)], "the longest is the one that is cut"
    # Given its part as the oldest, its turn and the gap, as one chunk; but others have room beside it.
    scheduler = causal(100)
    scheduler.admit(0, texts(0, [10_000]))
    assert spans(scheduler.schedule()) == [(0, 0, 100)]
    scheduler.admit(1, texts(1, [30], 1))
    assert spans(scheduler.schedule()) == [(1, 0, 30), (0, 100, 170)]


@pytest.mark.parametrize(("size", "expected"), [(201, [(0, 100, 200)]), (101, [(0, 100, 101), (100, 0, 99)])])
def test_a_cut_sequence_goes_on_past_many_that_must_be_cut(size: int, expected: Spans) -> None:
    scheduler = Scheduler(StepLimits(100, 1000, chunked=True), oldest_share=0.01)
    scheduler.admit(0, texts(0, [size] * 6))
    scheduler.schedule()
    for number in range(100, 200):
        scheduler.admit(number, texts(number, [150], number))
    assert spans(scheduler.schedule()) == expected


def one_that_waits_to_be_cut(sequences: int = 1000, weights: dict[str, float] | None = None) -> Scheduler:
    """Request 1, the oldest, must be cut; but of request 2, which was cut before it, 50 tokens are left."""
    scheduler = Scheduler(StepLimits(100, sequences, chunked=True), oldest_share=0.5, weights=weights)
    scheduler.admit(0, texts(0, [100]), tenant="a")
    scheduler.admit(1, texts(1, [4000], 1), tenant="a")
    scheduler.admit(2, texts(2, [250], 2), tenant="b")
    assert [spans(scheduler.schedule()) for _ in range(3)] == [[(0, 0, 100)], [(2, 0, 100)], [(2, 100, 200)]]
    return scheduler


def test_the_end_of_a_cut_sequence_leaves_room_to_the_oldest() -> None:
    scheduler = one_that_waits_to_be_cut(sequences=2)
    assert [spans(scheduler.schedule()) for _ in range(2)] == [[(2, 200, 250), (1, 0, 50)], [(1, 50, 150)]]
    scheduler = one_that_waits_to_be_cut(sequences=1)
    assert [spans(scheduler.schedule()) for _ in range(2)] == [[(2, 200, 250)], [(1, 0, 100)]]
    # The oldest takes the next cut past many others.
    scheduler = one_that_waits_to_be_cut(weights={"b": 100.0})
    for number in range(100, 200):
        scheduler.admit(number, texts(number, [150], number), tenant="b")
    assert spans(scheduler.schedule()) == [(2, 200, 250), (1, 0, 50)]
    scheduler = one_that_waits_to_be_cut()
    scheduler.admit(3, texts(3, [150], 3), tenant="b")
    scheduler.cancel(1)
    assert spans(scheduler.schedule()) == [(2, 200, 250), (3, 0, 50)]


@pytest.mark.parametrize(("lengths", "expected"), [([4000], {2: 100}), ([4000, 5], {1: 5, 3: 95})])
def test_a_cut_sequence_is_hurried_where_no_oldest_fits(lengths: list[int], expected: dict[int, int]) -> None:
    scheduler = Scheduler(StepLimits(100, 1000, chunked=True), oldest_share=0.5)
    scheduler.admit(0, texts(0, [100]), tenant="a")
    scheduler.admit(1, texts(1, lengths, 1), tenant="a")
    scheduler.admit(2, texts(2, [1000], 3), tenant="b")
    assert [made.tokens_by_request(scheduler.schedule()) for _ in range(2)] == [{0: 100}, {2: 100}]
    scheduler.admit(3, texts(3, [1] * 100, 4), tenant="b")
    assert made.tokens_by_request(scheduler.schedule()) == expected


def test_a_budget_is_halved_again_and_recovers_at_once() -> None:
    scheduler = bidirectional(256)
    for _ in range(10):
        scheduler.reduce_budget(steps=1)
    assert scheduler.schedule() is None  # only steps count
    scheduler.admit(0, texts(0, [1] * 300))
    assert [cost(step) for step in run_dry(scheduler)] == [4, 256, 40]
    scheduler.reduce_budget(steps=1)
    scheduler.admit(1, texts(1, [1] * 130))
    assert [cost(step) for step in run_dry(scheduler)] == [128, 2]
    scheduler.reduce_budget()
    scheduler.admit(2, texts(2, [128] * 102))
    assert [cost(step) for step in run_dry(scheduler)] == [128] * 100 + [256]


def in_order(lengths: list[int], chunked: bool = False) -> list[Spans]:
    """The chunks of each step of a request whose first sequences count most."""
    scheduler = Scheduler(StepLimits(10, 100, chunked))
    scheduler.admit(0, texts(0, lengths), in_order=True)
    return [spans(step) for step in run_dry(scheduler)]


def test_a_request_may_be_run_in_the_order_in_which_it_was_given() -> None:
    steps = [[(0, 0, 2), (2, 0, 3), (3, 0, 4), (5, 0, 1)], [(1, 0, 9)], [(4, 0, 5)]]
    assert in_order([2, 9, 3, 4, 5, 1]) == steps, "what does not fit the step is passed"
    assert in_order([3, 12, 4], chunked=True)[0] == [(0, 0, 3), (2, 0, 4), (1, 0, 3)]
    assert in_order([5] + [6] * 64 + [5])[0] == [(0, 0, 5)], "one beyond the next ones is not looked for"
    assert in_order([5] + [6] * 63 + [5])[0] == [(0, 0, 5), (64, 0, 5)]
    scheduler = bidirectional(10)
    scheduler.admit(0, texts(0, [6, 6]), [cached(0, 4), cached(0, 4)], in_order=True)
    assert [prices(step) for step in run_dry(scheduler)] == [[4, 4], [], []], "what is cached comes first"


def test_tokens_and_chunks_say_what_they_are() -> None:
    assert made.tokens(5).num_attended == 5
    assert Tokens(np.zeros(5, dtype=np.int32), attended_len=3).num_attended == 3
    query, document = np.arange(3, dtype=np.int32), np.arange(7, 9, dtype=np.int32)
    joined = JoinedTokens.of((query, document), (np.array([4, 5, 6], dtype=np.int32), 1))
    assert joined.parts[0] is query, "it is not copied"
    assert (joined.ids.tolist(), joined.type_ids.tolist()) == ([0, 1, 2, 7, 8], [4, 5, 6, 1, 1])
    assert (len(joined), joined.num_attended, joined.pooled_positions) == (5, 5, None)
    for none in (lambda: Tokens(query[:0]), lambda: JoinedTokens.of((query[:0],), (0,))):
        with pytest.raises(ValueError, match=r"^a sequence needs at least one token$"):
            none()
    (text,), (prefix, pair) = texts(0, [10]), made.pairs(0, 1, [30])
    names = ("is_first", "is_last", "is_whole", "is_prefix", "is_all_after_prefix")
    for sequence, start, stop, expected in (
        *((text, 0, 10, {"is_first", "is_last", "is_whole"}), (text, 0, 9, {"is_first"})),
        *((text, 1, 10, {"is_last"}), (text, 1, 9, set())),
        (prefix, 0, 1, {"is_first", "is_last", "is_whole", "is_prefix"}),
        *((pair, 1, 31, {"is_last", "is_all_after_prefix"}), (pair, 1, 30, set())),
        (pair, 2, 31, {"is_last"}),
    ):
        chunk = Chunk(sequence, start, stop)
        assert {name for name in names if getattr(chunk, name)} == expected, (start, stop)


def test_a_document_counts_with_what_scoring_it_costs() -> None:
    for scheduler, lengths, scoring, expected in (
        (bidirectional(100), [10] * 5, 40, [100, 100, 50]),
        (bidirectional(100), [10, 10], 500, [510, 510]),
        (causal(100), [150], 30, [100, 80]),
        (causal(100), [20, 20], 70, [100, 80]),
    ):
        scheduler.admit(1, [document(1, i, length, -1, scoring) for i, length in enumerate(lengths)])
        assert scheduler.waiting_tokens == sum(lengths) + scoring * len(lengths) == sum(expected)
        assert [step.num_tokens + step.other_price for step in run_dry(scheduler)] == expected
        assert scheduler.waiting_tokens == 0


def step_of(num_chunks: int, num_cached: int) -> Step:
    chunks = tuple(Chunk(text, 0, len(text)) for text in texts(0, [5] * num_chunks))
    return Step(4, chunks, tuple(cached(0, price) for price in range(1, num_cached + 1)))


@pytest.mark.parametrize(("num_chunks", "num_cached"), [(3, 0), (0, 3), (1, 1), (1, 4), (4, 1)])
def test_a_step_splits_into_halves_that_hold_all_of_it(num_chunks: int, num_cached: int) -> None:
    step = step_of(num_chunks, num_cached)
    first, second = step.halves()
    assert ((*first.chunks, *second.chunks), (*first.cached, *second.cached)) == (step.chunks, step.cached)
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
    # Results of the requests to run first are delivered before the rest is run.
    chunks = [Chunk(text, 0, 5) for request_id in (1, 2, 1) for text in texts(request_id, [5])]
    step = Step(4, tuple(chunks), (cached(1, 7), cached(2, 8)), first=frozenset({2}))
    stages = step.stages()
    assert [stage.chunks for stage in stages] == [(chunks[1],), (), (chunks[0], chunks[2]), ()]
    assert [stage.cached for stage in stages] == [(), (step.cached[1],), (), (step.cached[0],)]
    assert all(not stage.first for stage in stages)
    one = query(0, 0, 10)
    assert Step(1, (Chunk(one, 0, 4), Chunk(one, 6, 10)), (cached(0, 100),)).num_tokens == 8


# Small requests


def beside_small(chunked: bool = False) -> Scheduler:
    return Scheduler(StepLimits(100, 1000, chunked, beside_small=40), oldest_share=0.125)


@pytest.mark.parametrize("chunked", [False, True])
def test_large_requests_have_a_part_of_steps_while_small_come(chunked: bool) -> None:
    scheduler = beside_small(chunked)
    scheduler.admit(0, texts(0, [5] * 10_000))
    assert scheduled(scheduler).num_tokens == 100
    scheduler.admit(1, texts(1, [15]))
    assert made.tokens_by_request(scheduled(scheduler)) == {0: 40, 1: 15}
    for _ in range(STEPS_BESIDE_SMALL - 1):
        assert scheduled(scheduler).num_tokens == 40
    assert scheduled(scheduler).num_tokens == 100, "none has come for a while"
    scheduler.admit(2, texts(2, [45]))
    assert scheduled(scheduler).num_tokens == 100, "it is not small"


def test_small_requests_fill_whole_steps() -> None:
    scheduler = beside_small()
    for request_id in range(40):
        scheduler.admit(request_id, texts(request_id, [5]))
    assert [step.num_tokens for step in run_dry(scheduler)] == [100, 100]
    # And use what large ones may not.
    scheduler.admit(0, texts(0, [5] * 100))
    for request_id in range(1, 16):
        scheduler.admit(request_id, texts(request_id, [5, 5]))
    by_request = made.tokens_by_request(scheduled(scheduler))
    assert (sum(by_request.values()), by_request[0] <= 40) == (100, True), by_request


def test_what_exceeds_the_large_ones_part_is_alone_cut_or_last() -> None:
    for chunked, expected in ((False, [10, 90]), (True, [40, 40, 20])):
        scheduler = beside_small(chunked)
        scheduler.admit(0, texts(0, [90, 10]))
        scheduler.admit(1, texts(1, [40]))
        scheduler.cancel(1)
        assert [step.num_tokens for step in run_dry(scheduler)] == expected
    scheduler = beside_small()
    scheduler.admit(0, texts(0, [90] * 10))
    for request_id in range(1, 11):
        scheduler.admit(request_id, texts(request_id, [30, 5]))
        stages = [*map(made.tokens_by_request, scheduled(scheduler).stages())]
        assert stages == [{request_id: 35}, {0: 90}], "one of the large ones, and no more"
    assert scheduler.waiting_tokens == 0


def test_small_requests_are_run_before_the_others_of_their_step() -> None:
    scheduler = beside_small()
    scheduler.admit(0, texts(0, [5] * 100))
    scheduler.admit(1, texts(1, [5, 5]))
    scheduler.admit(2, texts(2, [5]))
    assert [*map(made.tokens_by_request, scheduled(scheduler).stages())] == [{1: 10, 2: 5}, {0: 40}]
    # One of which little is left is not run before what it waits for.
    scheduler = beside_small()
    scheduler.admit(0, [query(0, 0, 30, num_consumers=2), *(document(0, i, 10, query_id=0) for i in (1, 2))])
    scheduler.admit(1, texts(1, [5], first_id=10))
    first, second = scheduled(scheduler).stages()
    assert made.tokens_by_request(first) == {1: 5}
    assert [chunk.sequence.sequence_id for chunk in second.chunks] == [0, 1]


def test_small_requests_are_served_whoever_stands_before_them() -> None:
    scheduler = beside_small()
    scheduler.admit(0, texts(0, [90] * 5), tenant="a")
    scheduler.admit(1, texts(1, [5], first_id=10), tenant="b")
    sequences, images = made.pages(2, 20, [[(10, 2)]], query_length=1, words=1)
    scheduler.admit(2, sequences, images=images, tenant="c")
    for request_id in range(3, 9):
        scheduler.admit(request_id, texts(request_id, [5], first_id=100 * request_id), tenant="c")
        assert request_id in scheduled(scheduler).request_ids


def test_pages_are_encoded_and_read_in_different_steps() -> None:
    scheduler = beside_small()
    sequences, images = made.pages(0, 0, [[(60, 40)]] * 3, query_length=3, words=10)
    scheduler.admit(0, sequences, images=images)
    kinds = []
    for request_id in range(1, 9):
        scheduler.admit(request_id, texts(request_id, [5], first_id=100 * request_id))
        step = scheduled(scheduler)
        larger = [chunk for chunk in step.chunks if chunk.sequence.request_id == 0]
        assert not (larger and step.images)
        assert step.stages()[0].request_ids == {request_id}
        kinds.append("pictures" if step.images else "sequences" if larger else "nothing")
    assert kinds == ["sequences", *["pictures", "sequences"] * 3, "nothing"]
