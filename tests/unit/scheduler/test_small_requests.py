"""While small requests come, steps have little of large ones, so that nobody waits for a long step."""

import pytest

from maxsimd.scheduler import Scheduler, Step, StepLimits
from maxsimd.scheduler.small_requests import STEPS_BESIDE_SMALL
from tests.unit.scheduler.scheduled_requests import document, pages, query, run_dry, texts, tokens_by_request


def scheduled(scheduler: Scheduler) -> Step:
    step = scheduler.schedule()
    assert step is not None
    return step


def beside_small(chunked: bool = False) -> Scheduler:
    return Scheduler(StepLimits(100, 1000, chunked, beside_small=40), oldest_share=0.125)


@pytest.mark.parametrize("chunked", [False, True])
def test_large_requests_have_a_part_of_steps_while_small_come(chunked: bool) -> None:
    scheduler = beside_small(chunked)
    scheduler.admit(0, texts(0, [5] * 10_000))
    assert scheduled(scheduler).num_tokens == 100
    scheduler.admit(1, texts(1, [15]))
    assert tokens_by_request(scheduled(scheduler)) == {0: 40, 1: 15}
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
    by_request = tokens_by_request(scheduled(scheduler))
    assert sum(by_request.values()) == 100
    assert by_request[0] <= 40


def test_what_exceeds_the_part_of_large_ones_is_alone_or_cut() -> None:
    for chunked, expected in ((False, [10, 90]), (True, [40, 40, 20])):
        scheduler = beside_small(chunked)
        scheduler.admit(0, texts(0, [90, 10]))
        scheduler.admit(1, texts(1, [40]))
        scheduler.cancel(1)
        assert [step.num_tokens for step in run_dry(scheduler)] == expected


def test_small_requests_are_run_before_the_others_of_their_step() -> None:
    scheduler = beside_small()
    scheduler.admit(0, texts(0, [5] * 100))
    scheduler.admit(1, texts(1, [5, 5]))
    scheduler.admit(2, texts(2, [5]))
    first, second = scheduled(scheduler).stages()
    assert tokens_by_request(first) == {1: 10, 2: 5}
    assert tokens_by_request(second) == {0: 40}
    # One of which little is left is not run before what it waits for.
    scheduler = beside_small()
    sequences = [query(0, 0, 30, num_consumers=2), *(document(0, i, 10, query_id=0) for i in (1, 2))]
    scheduler.admit(0, sequences)
    scheduler.admit(1, texts(1, [5], first_id=10))
    first, second = scheduled(scheduler).stages()
    assert tokens_by_request(first) == {1: 5}
    assert [chunk.sequence.sequence_id for chunk in second.chunks] == [0, 1]


def test_what_cannot_be_cut_is_run_behind_small_requests() -> None:
    scheduler = beside_small()
    scheduler.admit(0, texts(0, [90] * 10))
    for request_id in range(1, 11):
        scheduler.admit(request_id, texts(request_id, [30, 5]))
        first, second = scheduled(scheduler).stages()
        assert tokens_by_request(first) == {request_id: 35}
        assert tokens_by_request(second) == {0: 90}, "one, and no more"
    assert scheduler.waiting_tokens == 0


def test_small_requests_are_served_whoever_stands_before_them() -> None:
    scheduler = beside_small()
    scheduler.admit(0, texts(0, [90] * 5), tenant="a")
    scheduler.admit(1, texts(1, [5], first_id=10), tenant="b")
    sequences, images = pages(2, 20, [[(10, 2)]], query_length=1, words=1)
    scheduler.admit(2, sequences, images=images, tenant="c")
    for request_id in range(3, 9):
        scheduler.admit(request_id, texts(request_id, [5], first_id=100 * request_id), tenant="c")
        assert request_id in scheduled(scheduler).request_ids


def test_pages_are_encoded_and_read_in_different_steps() -> None:
    scheduler = beside_small()
    sequences, images = pages(0, 0, [[(60, 40)]] * 3, query_length=3, words=10)
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
