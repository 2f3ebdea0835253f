"""What becomes of a request's parts when members of a fleet die, are full, or answer with errors."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxsimd.scheduler.fleet import Attempts, Fail, Member, Merge, Part, RetryBudget, Send

MEMBERS = tuple(Member(slot, f"m{slot}", "f") for slot in range(4))


def part(*indices: int, members: tuple[Member, ...] = MEMBERS, is_whole: bool = False) -> Part:
    return Part(members, np.array(indices, dtype=np.int64), 10 * len(indices), is_whole=is_whole)


def fails(outcome: object) -> Fail:
    assert isinstance(outcome, Fail)
    return outcome


def sent(outcome: list[Send] | Fail) -> list[Send]:
    assert isinstance(outcome, list)
    return outcome


def test_a_part_that_killed_two_is_halved_and_then_fails() -> None:
    attempts = Attempts([part(4, 5, 6), part(7)], RetryBudget())
    sends = {tuple(send.part.indices.tolist()): send for send in attempts.begin()}
    [again] = attempts.lost(sends[4, 5, 6].attempt, MEMBERS[1:])
    halves = sent(attempts.lost(again.attempt, MEMBERS[2:]))
    assert [half.part.indices.tolist() for half in halves] == [[4], [5, 6]]
    assert all(half.is_suspect and half.member.name in ("m2", "m3") for half in halves)
    assert attempts.answered(halves[0].attempt)
    failed = fails(attempts.lost(halves[1].attempt, MEMBERS[3:]))
    assert failed.error.kind == "lost"
    assert failed.error.indices == (5, 6)
    assert "documents[5], documents[6]" in failed.error.message
    assert failed.cancelled == (sends[(7,)].attempt,)
    assert attempts.is_over
    assert not attempts.answered(sends[(7,)].attempt)


def test_a_part_without_room_is_tried_once_elsewhere() -> None:
    attempts = Attempts([part(0), part(1)], RetryBudget())
    first, other = attempts.begin()
    [second] = attempts.full(first.attempt, 3.0, MEMBERS)
    assert second.member.name == "m1"
    failed = fails(attempts.full(second.attempt, 2.0, MEMBERS))
    assert (failed.error.kind, failed.error.retry_after) == ("full", 3.0)
    assert failed.cancelled == (other.attempt,)
    assert attempts.full(other.attempt, 1.0, MEMBERS) == []


def test_an_error_names_the_document_by_its_place_in_the_request() -> None:
    attempts = Attempts([part(3, 8, 9)], RetryBudget())
    [send] = attempts.begin()
    failed = attempts.failed(send.attempt, "invalid", "is too long", 1)
    assert failed is not None
    assert failed.error.indices == (8,)
    assert attempts.failed(send.attempt, "invalid", "is too long", 1) is None


def test_retries_are_limited_by_a_budget_and_by_who_is_left() -> None:
    budget = RetryBudget(share=0.1, spare=2.0)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(11):
        budget.sent()
    assert [budget.take() for _ in range(2)] == [True, False]
    attempts = Attempts([part(0)], budget)
    [send] = attempts.begin()
    assert "too many" in fails(attempts.lost(send.attempt, MEMBERS[1:])).error.message
    attempts = Attempts([part(0)], RetryBudget())
    [send] = attempts.begin()
    assert "no engine is left" in fails(attempts.lost(send.attempt, MEMBERS[:1])).error.message


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(2, 6), st.booleans())
def test_nothing_is_lost_while_members_die(seed: int, documents: int, members: int, poisoned: bool) -> None:
    """Members die at random, and are replaced; answers come in any order, some after they were given up. One
    document may kill whoever scores it."""
    chance = random.Random(seed)
    alive = [Member(slot, f"m{slot}", "f") for slot in range(members)]
    poison = chance.randrange(documents) if poisoned else None
    owners = np.array([chance.randrange(members) for _ in range(documents)])
    parts = [
        Part((alive[slot], *alive[:slot], *alive[slot + 1 :]), np.flatnonzero(owners == slot), 10)
        for slot in set(owners.tolist())
    ]
    attempts, merge = Attempts(parts, RetryBudget(spare=1_000.0)), Merge(documents)
    waiting, failed, born, by_poison = attempts.begin(), None, members, 0
    random_deaths = 2 if poison is None else 0
    while waiting and failed is None:
        send = waiting.pop(chance.randrange(len(waiting)))
        kills = poison is not None and poison in send.part.indices
        by_poison += kills
        if kills or (random_deaths and chance.random() < 0.3 and not send.is_suspect):
            random_deaths -= not kills
            alive = [member for member in alive if member.name != send.member.name]
            alive.append(Member(send.member.slot, f"m{born}", "f"))
            born += 1
            outcome = attempts.lost(send.attempt, alive)
            if isinstance(outcome, Fail):
                failed = outcome
            else:
                waiting += outcome
            if chance.random() < 0.5:  # it had not died, but could not be reached
                assert not attempts.answered(send.attempt)
        elif attempts.answered(send.attempt):
            merge.commit(send.part.indices, send.part.indices.astype(np.float64))
    assert attempts.is_over
    if poison is None:
        assert failed is None
        assert merge.result().tolist() == list(range(documents))
    else:
        assert failed is not None
        assert poison in failed.error.indices
        assert by_poison == 3


def test_each_score_is_written_once() -> None:
    merge = Merge(3)
    merge.commit(np.array([2, 0]), np.array([0.2, 0.0]))
    assert merge.missing.tolist() == [1]
    with pytest.raises(ValueError, match="no score yet"):
        merge.result()
    for indices, said in (([0], "twice"), ([1, 1], "twice"), ([3], "beyond"), ([-1], "beyond")):
        with pytest.raises(ValueError, match=said):
            merge.commit(np.array(indices), np.zeros(len(indices)))
    with pytest.raises(ValueError, match="2 scores for 1"):
        merge.commit(np.array([1]), np.zeros(2))
    merge.commit(np.array([1]), np.array([0.1]))
    assert merge.result().tolist() == [0.0, 0.1, 0.2]


def test_what_was_never_sent_counts_for_nothing() -> None:
    attempts = Attempts([part(0, 1)], RetryBudget(spare=0.0))
    [send] = attempts.begin()
    assert attempts.avoided(send.attempt) == {"m0"}
    again = sent(attempts.unsent(send.attempt, MEMBERS[1:]))
    assert [(each.member.name, each.is_suspect) for each in again] == [("m1", False)]
    assert attempts.answered(again[0].attempt)
    assert attempts.is_over


def test_a_member_that_does_not_answer_is_no_suspicion() -> None:
    for spare, most, said in ((2.0, 2, "too many"), (9.0, 3, "did not answer while they had this request")):
        attempts = Attempts([part(0, 1)], RetryBudget(spare=spare))
        sends = attempts.begin()
        for _ in range(most):
            sends = sent(attempts.unanswered(sends[0].attempt, MEMBERS[:1]))
            assert [(each.member.name, each.is_suspect) for each in sends] == [("m0", False)]
        assert said in fails(attempts.unanswered(sends[0].attempt, MEMBERS[:1])).error.message


def test_a_whole_part_is_suspected_but_not_halved() -> None:
    attempts = Attempts([part(0, 1, 2, 3, is_whole=True)], RetryBudget())
    sends = attempts.begin()
    for lost in (1, 2):
        sends = sent(attempts.lost(sends[0].attempt, MEMBERS[lost:]))
    assert [each.part.indices.tolist() for each in sends] == [[0, 1, 2, 3]]
    assert sends[0].is_suspect
