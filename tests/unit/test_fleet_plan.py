"""Which member of a fleet takes which documents of a request."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.scheduler.fleet import (
    Cell,
    Documents,
    Loads,
    Member,
    Seen,
    Split,
    cell_of,
    cells_of,
    digest_of,
    plan,
    ranked,
)


def fleet(count: int, fingerprint: str = "f") -> tuple[Member, ...]:
    return tuple(Member(slot, f"m{slot}", fingerprint) for slot in range(count))


def digests(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


def test_a_digest_is_of_the_text_alone() -> None:
    assert digest_of("a") == digest_of("a") != digest_of("b")
    assert 0 <= digest_of("\ud800") < 2**64, "half a surrogate pair is a text too"


def test_owners_have_equal_shares() -> None:
    owned = np.bincount(ranked(digests(80_000), range(8))[:, 0])
    assert owned.min() > 9_500
    assert owned.max() < 10_500


@pytest.mark.parametrize("count", [1, 2, 3, 8, 40])
def test_a_member_that_comes_takes_its_share_and_moves_nothing_else(count: int) -> None:
    before, after = (ranked(digests(20_000), range(n))[:, 0] for n in (count, count + 1))
    moved = before != after
    assert (after[moved] == count).all()
    assert moved.mean() <= 1.2 / (count + 1)


def test_documents_of_a_member_that_goes_are_spread_over_all() -> None:
    slots = [0, 1, 2, 3, 4]
    order = ranked(digests(20_000), slots)
    rest = ranked(digests(20_000), [slot for slot in slots if slot != 2])
    owners = np.array([0, 1, 3, 4])[rest[:, 0]]
    stayed = order[:, 0] != 2
    assert (owners[stayed] == order[stayed, 0]).all()
    assert (owners[~stayed] == order[~stayed, 1]).all(), "the second in turn takes over"
    assert np.bincount(owners[~stayed])[[0, 1, 3, 4]].min() > 800


def test_cells_are_of_neighbouring_slots() -> None:
    members = fleet(20)
    assert slots_of(cells_of(members, 8)) == [[*range(8)], [*range(8, 16)], [*range(16, 20)]]
    replaced = Member(3, "newer", "f")
    assert cells_of([*members, replaced], 8)[0].members[3] is replaced
    with pytest.raises(ValueError, match="share no request"):
        cells_of([*members, Member(19, "other", "g")])
    with pytest.raises(ValueError, match="room for a member"):
        cells_of(members, 0)


def slots_of(cells: tuple[Cell, ...]) -> list[list[int]]:
    return [[member.slot for member in cell.members] for cell in cells]


def test_a_cell_with_fewer_than_half_its_members_joins_the_one_before() -> None:
    assert slots_of(cells_of(fleet(19), 8)) == [[*range(8)], [*range(8, 19)]]
    assert slots_of(cells_of(fleet(3), 8)) == [[0, 1, 2]], "there is none before"
    some = [member for member in fleet(16) if member.slot not in (0, 1, 2, 3, 4)]
    [cell] = cells_of(some, 8)
    assert cell.number == 1, "that of most of them, whose documents stay"
    assert slots_of((cell,)) == [[*range(5, 16)]]


@settings(deadline=None)
@given(st.sets(st.integers(0, 60), min_size=1), st.integers(1, 12))
def test_every_member_is_in_one_cell_and_cells_are_not_small(slots: set[int], size: int) -> None:
    cells = cells_of([Member(slot, f"m{slot}", "f") for slot in slots], size)
    assert [slot for cell in slots_of(cells) for slot in cell] == sorted(slots)
    assert len({cell.number for cell in cells}) == len(cells)
    assert len(cells) == 1 or all(2 * len(cell.members) >= size for cell in cells)


def test_requests_are_spread_over_cells_as_they_have_members() -> None:
    cells = cells_of(fleet(20), 8)
    taken = np.zeros(3)
    for key in digests(6_000).tolist():
        cell = cell_of(cells, key, lambda _: 0.0, 0)
        assert cell is cell_of(cells, key, lambda _: 1.0, 7), "a key has one cell"
        taken[cell.number] += 1
    np.testing.assert_allclose(taken / taken.sum(), [0.4, 0.4, 0.2], atol=0.03)


def test_keys_move_to_a_cell_that_grows_and_nowhere_else() -> None:
    before, after = cells_of(fleet(20), 8), cells_of(fleet(21), 8)
    moved = 0
    for key in digests(6_000).tolist():
        first, second = (cell_of(cells, key, lambda _: 0.0, 0).number for cells in (before, after))
        assert first == second or second == 2
        moved += first != second
    assert moved / 6_000 <= 1.2 / 21


def test_without_a_key_the_lighter_of_two_cells_is_taken() -> None:
    cells = cells_of(fleet(32), 8)
    heavy = cells[1]
    draws = random.Random(0)

    def load(cell: Cell) -> float:
        return float(cell is heavy)

    taken = [cell_of(cells, None, load, draws.getrandbits(64)) for _ in range(300)]
    assert heavy not in taken
    assert {cell.number for cell in taken} == {0, 2, 3}


requests = st.integers(1, 8).flatmap(
    lambda members: st.tuples(
        st.just(fleet(members)),
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 500)), min_size=1, max_size=80),
        st.lists(st.integers(0, 5_000), min_size=members, max_size=members),
        st.integers(0, 2_000),
    )
)


@settings(deadline=None)
@given(requests, st.sampled_from(Split))
def test_parts_hold_each_document_once_and_equal_ones_together(request: tuple, split: Split) -> None:
    members, documents, loads, least = request
    numbers = np.array([number for number, _ in documents], dtype=np.uint64)
    tokens = np.array([count for _, count in documents], dtype=np.int64)
    load = np.array(loads, dtype=np.int64)
    parts = plan(Documents(numbers, tokens, tokens), members, load, split, least)
    held = np.concatenate([part.indices for part in parts])
    assert sorted(held.tolist()) == list(range(len(documents)))
    assert all((np.diff(part.indices) > 0).all() for part in parts)
    assert sum(part.weight for part in parts) == tokens.sum()
    for part in parts:
        assert sorted(member.slot for member in part.members) == list(range(len(members)))
    owner = {int(index): place for place, part in enumerate(parts) for index in part.indices}
    for number in set(numbers.tolist()):
        assert len({owner[index] for index in np.flatnonzero(numbers == number).tolist()}) == 1
    if split is Split.NEVER:
        [part] = parts
        assert load[part.members[0].slot] == load.min()
    if split is Split.BY_TOKENS:
        assert len(parts) <= max(1, np.bincount(owner_of(numbers), tokens).clip(1).sum() // max(1, least))


def owner_of(numbers: np.ndarray) -> np.ndarray:
    return np.unique(numbers, return_inverse=True)[1]


@settings(deadline=None)
@given(requests)
def test_no_member_has_much_more_than_the_mean(request: tuple) -> None:
    members, documents, loads, least = request
    numbers = np.arange(len(documents), dtype=np.uint64)
    tokens = np.array([count for _, count in documents], dtype=np.int64)
    load = np.array(loads, dtype=np.int64)
    after = load.copy()
    weights = np.maximum(tokens, 1)
    for part in plan(Documents(numbers, tokens, tokens), members, load, Split.BY_OWNER, least):
        slot = part.members[0].slot
        after[slot] += weights[part.indices].sum()
    most = 1.25 * (load.sum() + weights.sum()) / len(members) + least
    most += weights.sum() if tokens.sum() <= least else weights.max()  # a small request stays whole
    assert (after[after > load] <= most).all()


def test_a_document_with_room_at_its_owner_goes_there() -> None:
    members, numbers = fleet(4), digests(40)
    tokens = np.full(40, 10, dtype=np.int64)
    parts = plan(
        Documents(numbers, tokens, tokens), members, np.zeros(4, dtype=np.int64), Split.BY_OWNER, 300
    )
    owners = ranked(numbers, range(4))[:, 0]
    for part in parts:
        assert (owners[part.indices] == part.members[0].slot).all()


def test_a_small_request_goes_to_the_owner_of_most_of_it() -> None:
    members, numbers = fleet(4), digests(5)
    owners = ranked(numbers, range(4))[:, 0]
    tokens = np.where(owners == owners[0], 100, 10)
    idle = np.zeros(4, dtype=np.int64)
    [part] = plan(Documents(numbers, tokens, tokens), members, idle, Split.BY_OWNER, 1_000)
    assert part.members[0].slot == owners[0]
    busy = np.where(np.arange(4) == owners[0], 100_000, 0)
    [part] = plan(Documents(numbers, tokens, tokens), members, busy, Split.BY_OWNER, 1_000)
    assert part.members[0].slot != owners[0], "but not where too many wait"


def test_parts_by_tokens_are_about_equal_and_avoid_the_busy() -> None:
    tokens = np.random.default_rng(0).integers(1, 512, 1_000)
    load = np.array([0, 0, 60_000, 0], dtype=np.int64)
    parts = plan(Documents(digests(1_000), tokens, tokens), fleet(4), load, Split.BY_TOKENS, 1_000)
    after = load.copy()
    for part in parts:
        after[part.members[0].slot] += part.weight
    assert after.max() - after.min() < 512
    few = plan(
        Documents(digests(10), np.full(10, 100), np.full(10, 100)), fleet(4), load, Split.BY_TOKENS, 600
    )
    assert [part.members[0].slot for part in few] == [0], "there is too little for two"


def test_nobody_can_take_a_part_of_an_empty_fleet() -> None:
    none, one = np.zeros(0, np.int64), np.ones(1, np.int64)
    with pytest.raises(ValueError, match="no member"):
        plan(Documents(digests(1), one, one), (), none, Split.BY_OWNER, 1)
    assert plan(Documents(digests(0), none, none), fleet(1), one, Split.NEVER, 1) == []


def test_loads_are_what_was_sent_and_what_others_sent() -> None:
    one, two = fleet(2)
    loads = Loads()
    loads.sent(one, 100)
    loads.sent(one, 50)
    loads.sent(two, 30)
    assert loads.of([one, two]).tolist() == [150, 30]
    loads.answered(one, 100, queued_tokens=250)  # 50 of them are ours
    assert loads.of([one, two]).tolist() == [250, 30]
    loads.answered(two, 30, queued_tokens=None)
    loads.forget_others([two])
    assert loads.of([one, two]).tolist() == [0, 0]


def test_documents_lately_seen_weigh_little_while_their_member_lives() -> None:
    [cell] = cells_of(fleet(2))
    seen, tokens = Seen(capacity=2), np.full(3, 100)
    numbers = np.array([1, 2, 3], dtype=np.uint64)
    assert seen.weights(cell, numbers, tokens).tolist() == [100, 100, 100]
    seen.remember(cell, [1, 2, 3], cell.members[0])
    assert seen.weights(cell, numbers, tokens).tolist() == [100, 2, 2], "the oldest is forgotten"
    survivor = Cell(cell.number, cell.members[1:])
    assert seen.weights(survivor, numbers, tokens).tolist() == [100, 100, 100]
    other = Cell(1, cell.members)
    assert seen.weights(other, numbers, tokens).tolist() == [100, 100, 100]
