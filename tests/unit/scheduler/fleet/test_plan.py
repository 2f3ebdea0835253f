"""Members' documents and slots, and the fate of a request's parts when members die or are full."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.scheduler import fleet as fleets
from maxsimd.scheduler.fleet.members import agreed_slots, free_slot


def fleet(count: int, fingerprint: str = "f") -> tuple[fleets.Member, ...]:
    return tuple(fleets.Member(slot, f"m{slot}", fingerprint) for slot in range(count))


def digests(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


def test_documents_have_owners_with_equal_shares() -> None:
    assert fleets.digest_of(b"a") == fleets.digest_of(b"a") != fleets.digest_of(b"b")
    owned = np.bincount(fleets.ranked(digests(80_000), range(8))[:, 0])
    assert 9_500 < owned.min() <= owned.max() < 10_500
    for count in (1, 2, 3, 8, 40):
        before, after = (fleets.ranked(digests(20_000), range(n))[:, 0] for n in (count, count + 1))
        moved = before != after
        assert (after[moved] == count).all()
        assert moved.mean() <= 1.2 / (count + 1)


def test_a_cell_has_the_latest_member_of_each_slot() -> None:
    members, replaced = fleet(20), fleets.Member(3, "newer", "f")
    assert fleets.cells_of([*members, replaced], 8)[0].members[3] is replaced
    with pytest.raises(ValueError, match="share no request"):
        fleets.cells_of([*members, fleets.Member(19, "other", "g")])
    with pytest.raises(ValueError, match="room for a member"):
        fleets.cells_of(members, 0)


def reach_over(members: tuple[fleets.Member, ...]) -> fleets.Reach:
    [cell] = fleets.cells_of(members)
    return fleets.Reach(cell)


@settings(max_examples=40)
@given(st.sets(st.integers(0, 60), min_size=1), st.integers(1, 12))
def test_every_member_is_in_the_cell_of_its_slot(slots: set[int], size: int) -> None:
    cells = fleets.cells_of([fleets.Member(slot, f"m{slot}", "f") for slot in slots], size)
    assert [member.slot for cell in cells for member in cell.members] == sorted(slots)
    assert len({cell.number for cell in cells}) == len(cells)
    for cell in cells:
        assert {member.slot // size for member in cell.members} == {cell.number}
        assert cell.is_full == (len(cell.members) == size)


def test_documents_of_free_slots_go_to_another_cell() -> None:
    full, partial = fleets.cells_of(fleet(11), 8)
    numbers, reach = digests(4_000), fleets.Reach(partial, full)
    assert [member.slot for member in reach.members] == [8, 9, 10, *range(8)]
    order = np.array([member.slot for member in reach.members])[reach.ranked(numbers)]
    assert (np.sort(order, axis=1) == np.arange(11)).all(), "each member is in each document's order"
    of_all_slots = 8 + fleets.ranked(numbers, range(8, 16))[:, 0]
    has_member = of_all_slots < 11
    assert (order[has_member, 0] == of_all_slots[has_member]).all()
    assert (order[~has_member, 0] == fleets.ranked(numbers, range(8))[~has_member, 0]).all()
    assert (reach.numbers(numbers) == np.where(has_member, 1, 0)).all()
    assert 0.3 < has_member.mean() < 0.45, "three of eight slots have a member"


def test_the_lighter_of_two_cells_is_taken() -> None:
    cells = fleets.cells_of(fleet(30), 8)
    heavy, draws = cells[1], map(random.Random(0).getrandbits, [64] * 300)
    taken = [fleets.reach_of(cells, lambda cell: float(cell is heavy), draw) for draw in draws]
    assert {reach.cell.number for reach in taken} == {0, 2, 3}
    for reach in taken:
        assert (reach.other is None) == reach.cell.is_full
        assert reach.other is not reach.cell


def parts_of(numbers: Any, tokens: Any, load: Any, split: fleets.Split, least: int) -> list[fleets.Part]:
    """The parts of a request to a small fleet, of which each member has a load."""
    return fleets.plan(numbers, tokens, tokens, reach_over(fleet(len(load))), load, split, least)


requests = st.integers(1, 8).flatmap(
    lambda members: st.tuples(
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 500)), min_size=1, max_size=80),
        st.lists(st.integers(0, 5_000), min_size=members, max_size=members),
        st.integers(0, 2_000),
    )
)


@given(requests, st.sampled_from(fleets.Split))
def test_parts_hold_each_document_once_and_equal_ones_together(request: tuple, split: fleets.Split) -> None:
    documents, loads, least = request
    numbers = np.array([number for number, _ in documents], dtype=np.uint64)
    tokens = np.array([count for _, count in documents], dtype=np.int64)
    load = np.array(loads, dtype=np.int64)
    parts = parts_of(numbers, tokens, load, split, least)
    assert sorted(np.concatenate([part.indices for part in parts]).tolist()) == list(range(len(documents)))
    assert all((np.diff(part.indices) > 0).all() for part in parts)
    assert sum(part.weight for part in parts) == tokens.sum()
    for part in parts:
        assert sorted(member.slot for member in part.members) == list(range(len(load)))
    owner = {int(index): place for place, part in enumerate(parts) for index in part.indices}
    for number in set(numbers.tolist()):
        assert len({owner[index] for index in np.flatnonzero(numbers == number).tolist()}) == 1
    if split is fleets.Split.NEVER:
        [part] = parts
        assert load[part.members[0].slot] == load.min()
    if split is fleets.Split.BY_TOKENS:
        owners = np.unique(numbers, return_inverse=True)[1]
        assert len(parts) <= max(1, np.bincount(owners, tokens).clip(1).sum() // max(1, least))


@given(requests)
def test_no_member_has_much_more_than_the_mean(request: tuple) -> None:
    documents, loads, least = request
    numbers = np.arange(len(documents), dtype=np.uint64)
    tokens = np.array([count for _, count in documents], dtype=np.int64)
    load = np.array(loads, dtype=np.int64)
    after, weights = load.copy(), np.maximum(tokens, 1)
    for part in parts_of(numbers, tokens, load, fleets.Split.BY_OWNER, least):
        after[part.members[0].slot] += weights[part.indices].sum()
    most = 1.25 * (load.sum() + weights.sum()) / len(load) + least
    most += weights.sum() if tokens.sum() <= least else weights.max()  # a small request stays whole
    assert (after[after > load] <= most).all()


def test_documents_go_to_their_owner_while_it_has_room() -> None:
    numbers, tokens = digests(40), np.full(40, 10, dtype=np.int64)
    owners = fleets.ranked(numbers, range(4))[:, 0]
    for part in parts_of(numbers, tokens, np.zeros(4, dtype=np.int64), fleets.Split.BY_OWNER, 300):
        assert (owners[part.indices] == part.members[0].slot).all()
    numbers = digests(5)
    owners = fleets.ranked(numbers, range(4))[:, 0]
    tokens = np.where(owners == owners[0], 100, 10)
    [part] = parts_of(numbers, tokens, np.zeros(4, dtype=np.int64), fleets.Split.BY_OWNER, 1_000)
    assert part.members[0].slot == owners[0]
    busy = np.where(np.arange(4) == owners[0], 100_000, 0)
    [part] = parts_of(numbers, tokens, busy, fleets.Split.BY_OWNER, 1_000)
    assert part.members[0].slot != owners[0], "but not where too many wait"


def test_documents_by_digest_have_one_owner_among_all_members() -> None:
    planner, named = fleets.Planner(), digests(500)
    planner.loads.sent(fleet(20)[3], 10**9)
    owners = fleets.ranked(named, range(20))[:, 0]
    asked = fleets.cells_of(fleet(20), 8), named, np.full(500, 7), fleets.Split.AT_OWNER, 10_000, 0.0
    for draw in range(5):
        _, parts = planner.plan(*asked, draw)
        assert sum(len(part.indices) for part in parts) == 500
        assert all((owners[part.indices] == part.members[0].slot).all() for part in parts), "busy or not"


def test_parts_by_tokens_are_about_equal_and_avoid_the_busy() -> None:
    tokens = np.random.default_rng(0).integers(1, 512, 1_000)
    load = np.array([0, 0, 60_000, 0], dtype=np.int64)
    after = load.copy()
    for part in parts_of(digests(1_000), tokens, load, fleets.Split.BY_TOKENS, 1_000):
        after[part.members[0].slot] += part.weight
    assert after.max() - after.min() < 512
    few = parts_of(digests(10), np.full(10, 100), load, fleets.Split.BY_TOKENS, 600)
    assert [part.members[0].slot for part in few] == [0], "there is too little for two"


def test_loads_are_what_was_sent_and_what_others_sent() -> None:
    (one, two), loads = fleet(2), fleets.Loads()
    loads.sent(one, 100)
    loads.sent(one, 50)
    loads.sent(two, 30)
    assert loads.of([one, two]).tolist() == [150, 30]
    loads.answered(one, 100, queued_tokens=250)  # 50 of them are ours
    assert loads.of([one, two]).tolist() == [250, 30]
    loads.answered(two, 30, queued_tokens=None)
    loads.forget_others([two])
    assert loads.of([one, two]).tolist() == [0, 0]


def test_seen_documents_weigh_little_while_their_member_lives() -> None:
    reach = reach_over(fleet(2))
    seen, tokens = fleets.Seen(capacity=2), np.full(3, 100)
    numbers = np.array([1, 2, 3], dtype=np.uint64)
    assert seen.weights(reach, numbers, tokens).tolist() == [100, 100, 100]
    seen.remember(reach, [1, 2, 3], reach.members[0])
    assert seen.weights(reach, numbers, tokens).tolist() == [100, 2, 2], "the oldest is forgotten"
    survivor = fleets.Reach(fleets.Cell(0, reach.members[1:]))
    assert seen.weights(survivor, numbers, tokens).tolist() == [100, 100, 100]
    other = fleets.Reach(fleets.Cell(1, (fleets.Member(8, "m8", "f"),)))
    assert seen.weights(other, numbers, tokens).tolist() == [100, 100, 100]
    full, partial = fleets.cells_of(fleet(9), 8)
    reach, seen, numbers = fleets.Reach(partial, full), fleets.Seen(1_000), digests(200)
    seen.remember(fleets.Reach(full), numbers.tolist(), full.members[0])
    weights = seen.weights(reach, numbers, np.full(200, 100))
    assert (weights == np.where(partial.is_owned(numbers), 100, 2)).all()


def test_whoever_comes_or_is_one_too_many_takes_a_free_slot() -> None:
    assert (free_slot(3, [0, 1, 2]), free_slot(3, [0, 1, 3, 4]), free_slot(0, [])) == (3, 2, 0)
    assert (free_slot(1, [0, 1]), agreed_slots({"a": 0, "b": 2, "c": 8}, 8)) == (2, {"a": 0, "b": 2, "c": 1})


@settings(max_examples=40)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.integers(1, 9))
def test_all_agree_on_different_slots_and_stay_with_them(wanted: list[int], size: int) -> None:
    slots = {f"m{i}": slot for i, slot in enumerate(wanted)}
    agreed = agreed_slots(slots, size)
    assert (agreed.keys(), len(set(agreed.values()))) == (slots.keys(), len(slots))
    assert max(agreed.values()) < -(-len(slots) // size) * size
    assert agreed_slots(agreed, size) == agreed


@settings(max_examples=20)
@given(st.sets(st.integers(0, 15), min_size=9))
def test_free_slots_are_left_free_where_no_cell_closes(slots: set[int]) -> None:
    mine = {f"m{slot}": slot for slot in slots}
    assert agreed_slots(mine, 8) == mine


# A request's parts

MEMBERS = fleet(4)


def part(*indices: int, members: tuple[fleets.Member, ...] = MEMBERS, is_whole: bool = False) -> fleets.Part:
    return fleets.Part(members, np.array(indices, dtype=np.int64), 10 * len(indices), is_whole=is_whole)


def test_a_part_that_killed_two_is_halved_and_then_fails() -> None:
    attempts = fleets.Attempts([part(4, 5, 6), part(7)], fleets.RetryBudget())
    sends = {tuple(send.part.indices.tolist()): send for send in attempts.begin()}
    [again] = attempts.lost(sends[4, 5, 6].attempt, MEMBERS[1:])
    halves = attempts.lost(again.attempt, MEMBERS[2:])
    assert [half.part.indices.tolist() for half in halves] == [[4], [5, 6]]
    assert all(half.is_suspect and half.member.name in ("m2", "m3") for half in halves)
    assert attempts.answered(halves[0].attempt)
    with pytest.raises(fleets.FleetError, match=r"documents\[5\], documents\[6\]") as failed:
        attempts.lost(halves[1].attempt, MEMBERS[3:])
    assert (failed.value.indices, attempts.is_over) == ((5, 6), True)
    assert not attempts.answered(sends[(7,)].attempt)


def test_retries_are_few_where_there_is_no_room_or_budget() -> None:
    attempts = fleets.Attempts([part(0), part(1)], fleets.RetryBudget())
    first, other = attempts.begin()
    [second] = attempts.full(first.attempt, 3.0, MEMBERS)
    assert second.member.name == "m1"
    with pytest.raises(fleets.FleetError) as failed:
        attempts.full(second.attempt, 2.0, MEMBERS)
    assert (failed.value.retry_after, failed.value.indices) == (3.0, ())
    assert attempts.full(other.attempt, 1.0, MEMBERS) == []
    budget = fleets.RetryBudget(share=0.1, spare=2.0)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(11):
        budget.sent()
    assert [budget.take() for _ in range(2)] == [True, False]
    attempts = fleets.Attempts([part(0)], budget)
    [send] = attempts.begin()
    with pytest.raises(fleets.FleetError, match="too many"):
        attempts.lost(send.attempt, MEMBERS[1:])
    attempts = fleets.Attempts([part(0)], fleets.RetryBudget())
    [send] = attempts.begin()
    with pytest.raises(fleets.FleetError, match="no engine is left"):
        attempts.lost(send.attempt, MEMBERS[:1])


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(2, 6), st.booleans())
def test_nothing_is_lost_while_members_die(seed: int, documents: int, members: int, poisoned: bool) -> None:
    chance = random.Random(seed)
    alive = [fleets.Member(slot, f"m{slot}", "f") for slot in range(members)]
    poison = chance.randrange(documents) if poisoned else None
    owners = np.array([chance.randrange(members) for _ in range(documents)])
    parts = [
        fleets.Part((alive[slot], *alive[:slot], *alive[slot + 1 :]), np.flatnonzero(owners == slot), 10)
        for slot in set(owners.tolist())
    ]
    attempts, answered = fleets.Attempts(parts, fleets.RetryBudget(spare=1_000.0)), list[int]()
    waiting, failed, born, by_poison = attempts.begin(), None, members, 0
    random_deaths = 2 if poison is None else 0
    while waiting and failed is None:
        send = waiting.pop(chance.randrange(len(waiting)))
        kills = poison is not None and poison in send.part.indices
        by_poison += kills
        if kills or (random_deaths and chance.random() < 0.3 and not send.is_suspect):
            random_deaths -= not kills
            alive = [member for member in alive if member.name != send.member.name]
            alive.append(fleets.Member(send.member.slot, f"m{born}", "f"))
            born += 1
            try:
                waiting += attempts.lost(send.attempt, alive)
            except fleets.FleetError as error:
                failed = error
            if chance.random() < 0.5:  # it had not died, but could not be reached
                assert not attempts.answered(send.attempt)
        elif attempts.answered(send.attempt):
            answered += send.part.indices.tolist()
    assert attempts.is_over
    if poison is None:
        assert failed is None
        assert sorted(answered) == list(range(documents)), "each once"
    else:
        assert failed is not None
        assert (poison in failed.indices, by_poison) == (True, 3), failed.indices


def test_what_was_never_sent_counts_for_nothing() -> None:
    attempts = fleets.Attempts([part(0, 1)], fleets.RetryBudget(spare=0.0))
    [send] = attempts.begin()
    assert attempts.avoided(send.attempt) == {"m0"}
    [again] = attempts.unsent(send.attempt, MEMBERS[1:])
    assert (again.member.name, again.is_suspect) == ("m1", False)
    assert (attempts.answered(again.attempt), attempts.is_over) == (True, True)


def test_whole_parts_are_suspected_and_silent_members_are_not() -> None:
    for spare, most, said in ((2.0, 2, "too many"), (9.0, 3, "did not answer while they had this request")):
        attempts = fleets.Attempts([part(0, 1)], fleets.RetryBudget(spare=spare))
        sends = attempts.begin()
        for _ in range(most):
            sends = attempts.unanswered(sends[0].attempt, MEMBERS[:1])
            assert [(each.member.name, each.is_suspect) for each in sends] == [("m0", False)]
        with pytest.raises(fleets.FleetError, match=said):
            attempts.unanswered(sends[0].attempt, MEMBERS[:1])
    attempts = fleets.Attempts([part(0, 1, 2, 3, is_whole=True)], fleets.RetryBudget())
    sends = attempts.begin()
    for lost in (1, 2):
        sends = attempts.lost(sends[0].attempt, MEMBERS[lost:])
    assert ([each.part.indices.tolist() for each in sends], sends[0].is_suspect) == ([[0, 1, 2, 3]], True)
