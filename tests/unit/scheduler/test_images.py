"""Pictures in the scheduler: encoded before their sequences, within the budget, and few features held."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxsimd.scheduler import Scheduler, Step, StepLimits, TokenSequence
from tests.unit.scheduler.scheduled_requests import Picture, pages, run_dry, scheduled, texts

PICTURES = st.tuples(st.integers(1, 60), st.integers(1, 60))
DOCUMENTS = st.lists(st.lists(PICTURES, max_size=3), max_size=6)
REQUESTS = st.tuples(DOCUMENTS, st.integers(1, 150), st.integers(0, 2), st.integers(-2, 2), st.integers(0, 3))


@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=5), budget=st.integers(20, 200),
    features=st.integers(1, 150), most_sequences=st.sampled_from([4, 100]),
    beside_small=st.sampled_from([None, 10, 20]), chunked=st.booleans(),
)  # fmt: skip
def test_every_sequence_runs_once_after_its_pictures(
    requests: Any, budget: int, features: int, most_sequences: int, beside_small: int | None, chunked: bool
) -> None:
    limits = StepLimits(budget if chunked else 400, most_sequences, chunked, beside_small, features=features)
    scheduler = Scheduler(limits)
    every: dict[int, TokenSequence] = {}
    encoded, first, last = dict[int, int](), dict[int, int](), dict[int, int]()

    def run(step: Step) -> None:
        for image in step.images:
            assert image.image_id not in encoded
            encoded[image.image_id] = step.step_id
        for chunk in step.chunks:
            first.setdefault(chunk.sequence.sequence_id, step.step_id)
            assert chunk.sequence.sequence_id not in last
            if chunk.is_last:
                last[chunk.sequence.sequence_id] = step.step_id
        held = sum(
            _features(sequence)
            for sequence in every.values()
            if sequence.sequence_id not in last
            and any(image.image_id in encoded for image in sequence.tokens.images)
        )
        assert scheduler._features.number == held <= max(features, *map(_features, every.values()))
        # A large part beside small requests is a stage of its own.
        for part in [step] if beside_small is None else step.stages():
            cost = part.num_tokens + sum(image.price for image in part.images)
            assert cost <= limits.tokens * (1.5 if part.images else 1) or part.num_parts == 1
            assert len(part.chunks) <= most_sequences

    for request_id, (documents, query_length, tenant, priority, between) in enumerate(requests):
        sequences, images = pages(request_id, 1000 * (request_id + 1), documents, query_length)
        every |= {sequence.sequence_id: sequence for sequence in sequences}
        scheduler.admit(request_id, sequences, (), priority, str(tenant), images=images)
        for _ in range(between):
            if (step := scheduler.schedule()) is not None:
                run(step)
    while (step := scheduler.schedule()) is not None:
        run(step)
    assert set(last) == every.keys()
    for sequence_id, sequence in every.items():
        document = sequence.payload.document
        if document is not None:
            assert first[sequence_id] >= last[document.query_id]
        for image in sequence.tokens.images:
            assert encoded[image.image_id] < first[sequence_id]
    assert scheduler.waiting_tokens == scheduler._features.number == 0


def _features(sequence: TokenSequence) -> int:
    return sum(len(image.positions) for image in sequence.tokens.images)


def admit(scheduler: Scheduler, documents: list[list[Picture]], request_id: int = 0, words: int = 3) -> int:
    """Admits a request, and returns the number of its sequences."""
    sequences, images = pages(request_id, 1_000 * request_id, documents, query_length=5, words=words)
    scheduler.admit(request_id, sequences, images=images)
    return len(sequences)


def steps_of(documents: Any, *, chunked: bool = False, words: int = 3, **options: Any) -> list[Step]:
    scheduler = Scheduler(StepLimits(100, 100, chunked, **options))
    admit(scheduler, documents, words=words)
    return run_dry(scheduler)


def test_pictures_wait_for_features_and_make_few_steps() -> None:
    steps = steps_of([[(10, 40)], [(10, 40)], [(10, 10)]], features=50)
    assert [[image.image_id for image in step.images] for step in steps] == [[1], [3, 5], []]
    more = steps_of([[(30, 9), (30, 9), (30, 9)]], features=10)
    assert [len(step.images) for step in more] == [3, 0], "a document with more is run all the same"
    for number, expected in ((12, [12]), (14, [9, 5]), (21, [9, 12])):
        steps = steps_of([[(10, 1)]] * number, words=0)
        assert [len(step.images) for step in steps if step.images] == expected
        assert sum(len(step.chunks) for step in steps) == number + 1
    scheduler = Scheduler(StepLimits(100, 100, chunked=True, features=10))
    admit(scheduler, [[(50, 10)]] * 3)
    scheduler.schedule()
    assert scheduler._features.number == 10
    scheduler.cancel(0)
    assert scheduler._features.number == scheduler.waiting_tokens == 0
    assert scheduler.schedule() is None


def test_newer_requests_do_not_use_up_what_the_oldest_waits_for() -> None:
    """New ones are smaller: without a reservation, they would hold all features for ever."""
    scheduler = Scheduler(StepLimits(2048, 512, chunked=False))
    left = admit(scheduler, [[(215, 1024)]] * 50)
    for number in range(1, 300):
        admit(scheduler, [[(215, 1024)]], number)
        left -= sum(chunk.sequence.request_id == 0 for chunk in scheduled(scheduler).chunks if chunk.is_last)
        if not left:
            return
    pytest.fail("the oldest request starves")


@pytest.mark.parametrize("documents", [[[(700, 750)]] * 40, [[(700, 750)] * 40]])
def test_many_requests_that_wait_for_features_do_not_hide_who_holds_them(documents: Any) -> None:
    scheduler = Scheduler(StepLimits(16_384, 512, chunked=True))
    admit(scheduler, documents)
    scheduler.schedule()
    for number in range(1, 101):
        admit(scheduler, [[(700, 750)]], number)
    assert len(run_dry(scheduler)) < 15


def test_a_step_runs_its_pictures_last_and_can_be_halved() -> None:
    scheduler = Scheduler(StepLimits(100, 100, chunked=False))
    admit(scheduler, [[(10, 4)], [(10, 4)]])
    scheduler.admit(1, texts(1, [6], first_id=50))
    step = scheduled(scheduler)
    assert (step.num_parts, step.request_ids) == (4, {0, 1})
    assert [(len(stage.chunks), len(stage.images)) for stage in step.stages()] == [(2, 0), (0, 2)]
    parts = [half for stage in step.halves() for half in stage.halves()]
    assert [(len(part.chunks), len(part.images)) for part in parts] == [(1, 0), (1, 0), (0, 1), (0, 1)]
