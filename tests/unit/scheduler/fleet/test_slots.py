"""Members that agree on their slots by what each of them says."""

import random

from hypothesis import given
from hypothesis import strategies as st

from maxsimd.scheduler.fleet.slots import agreed_slots, free_slot

somebodys = st.dictionaries(st.text(min_size=1, max_size=4), st.integers(0, 40), min_size=1, max_size=20)


def test_one_that_comes_has_what_it_wants_where_nobody_has_it() -> None:
    assert free_slot(3, [0, 1, 2]) == 3
    assert free_slot(3, [0, 1, 3, 4]) == 2
    assert free_slot(0, []) == 0
    assert free_slot(1, [0, 1]) == 2


@given(somebodys, st.integers(1, 9))
def test_all_agree_on_different_slots_and_stay_with_them(slots: dict[str, int], size: int) -> None:
    agreed = agreed_slots(slots, size)
    assert agreed.keys() == slots.keys()
    assert len(set(agreed.values())) == len(slots)
    assert max(agreed.values()) < -(-len(slots) // size) * size
    assert agreed_slots(agreed, size) == agreed


@given(st.sets(st.integers(0, 15), min_size=9))
def test_free_slots_are_left_free_where_no_cell_closes(slots: set[int]) -> None:
    """Two cells are needed: whoever has a slot in them stays there."""
    mine = {f"m{slot}": slot for slot in slots}
    assert agreed_slots(mine, 8) == mine


def test_whoever_is_in_a_cell_too_many_takes_a_free_slot() -> None:
    assert agreed_slots({"a": 0, "b": 2, "c": 8}, 8) == {"a": 0, "b": 2, "c": 1}


def test_members_that_come_and_go_end_with_a_slot_each() -> None:
    """Each hears of the others later, in another order, and in between says what it has by then."""
    for seed in range(5):
        rng = random.Random(seed)
        has: dict[str, int] = {}
        heard: dict[str, dict[str, int]] = {}
        for number in range(60):
            if has and rng.random() < 0.4:
                gone = rng.choice(sorted(has))
                del has[gone], heard[gone]
            else:
                # Several may come while they know of the same others only.
                others = rng.choice([*heard.values(), dict(has)])
                has[f"m{number}"] = free_slot(rng.randrange(len(has) + 1), others.values())
                heard[f"m{number}"] = others
            for name in rng.sample(sorted(has), k=len(has) // 2):
                heard[name] = dict(has)
                has[name] = agreed_slots({**heard[name], name: has[name]})[name]
        for _ in range(len(has)):
            for name in sorted(has):
                has[name] = agreed_slots(has)[name]
        assert len(set(has.values())) == len(has)
