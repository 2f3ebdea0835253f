"""Sequences of similar length together: every one once, and little padding."""

from hypothesis import given
from hypothesis import strategies as st

from maxsimd.engine.execution.grouping import GROUP_COST_ROWS, group_by_length, in_powers_of_two, round_length
from maxsimd.engine.execution.padded_runner import PADDING, SMALL_BATCH, by_length


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_groups_hold_every_sequence_once_and_little_padding(lengths: list[int]) -> None:
    groups = group_by_length(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[index] for index in group)
        assert sum(longest - lengths[index] for index in group) <= GROUP_COST_ROWS
        parts = in_powers_of_two(group)
        assert [index for part in parts for index in part] == group
        assert all(len(part).bit_count() == 1 for part in parts)


@given(st.integers(1, 10_000))
def test_a_length_is_rounded_up_a_little(length: int) -> None:
    assert length <= round_length(length) < length + max(4, length / 4)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_padded_batches_hold_each_once_and_little_padding(lengths: list[int]) -> None:
    batches = by_length(lengths)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        rows = len(batch) * max(lengths[index] for index in batch)
        padding = rows - sum(lengths[index] for index in batch)
        assert rows <= SMALL_BATCH or padding <= PADDING * rows
