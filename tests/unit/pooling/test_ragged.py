"""Ragged: flat rows with offsets, seen as items."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.pooling import ragged
from maxsimd.pooling.ragged import Ragged

pytestmark = pytest.mark.fast

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def _items(lengths: list[int], dim: int = 3) -> list[torch.Tensor]:
    rows = torch.arange(float(sum(lengths) * dim)).reshape(-1, dim)
    return list(rows.split(lengths))


def _scaled(lengths: list[int]) -> Ragged:
    random = torch.Generator().manual_seed(sum(lengths))
    values = torch.randint(-127, 128, (sum(lengths), 3), generator=random, dtype=torch.int8)
    offsets = Ragged.from_lengths(values, lengths).offsets
    return Ragged(values, offsets, torch.rand(sum(lengths), generator=random) + 0.1)


@settings(max_examples=40)
@given(LENGTHS)
def test_items_are_found_by_index_by_iteration_and_by_offsets(lengths: list[int]) -> None:
    items = _items(lengths)
    for made in (Ragged.from_items(items), Ragged.from_lengths(torch.cat(items), lengths)):
        assert len(made) == len(lengths)
        assert made.lengths == lengths
        assert made.offsets[0] == 0
        assert made.offsets[-1] == len(made.values) == sum(lengths)
        assert made.scales is None
        for i, (item, one) in enumerate(zip(items, made, strict=True)):
            assert torch.equal(made[i], item)
            assert torch.equal(one, item)
            assert torch.equal(made.item(i).values, item)
            assert made.item(i).offsets.tolist() == [0, len(item)]


@settings(max_examples=40)
@given(LENGTHS, LENGTHS, st.booleans())
def test_joined_parts_have_all_items_in_order(first: list[int], second: list[int], scaled: bool) -> None:
    parts = [_scaled(lengths) for lengths in (first, second)]
    if not scaled:
        parts = [Ragged(part.values, part.offsets) for part in parts]
    joined = Ragged.join(parts)
    assert joined.lengths == first + second
    assert torch.equal(joined.values, torch.cat([part.values for part in parts]))
    assert (joined.scales is not None) == scaled
    exact = [item for part in parts for item in part.decoded(torch.float32)]
    for i, (item, expected) in enumerate(zip(joined.decoded(torch.float32), exact, strict=True)):
        assert torch.equal(item, expected)
        assert torch.equal(joined.item(i).decoded(torch.float32).values, expected), "with its own scales"


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 7), st.sampled_from([torch.float32, torch.bfloat16]))
def test_int8_rows_are_decoded_by_their_scales_whatever_the_tile(
    lengths: list[int], together: int, dtype: torch.dtype
) -> None:
    items = _scaled(lengths)
    assert items.scales is not None
    before, ragged._DECODED_TOGETHER = ragged._DECODED_TOGETHER, together
    try:
        decoded = items.decoded(dtype)
    finally:
        ragged._DECODED_TOGETHER = before
    assert decoded.scales is None
    assert decoded.offsets.tolist() == items.offsets.tolist()
    assert decoded.values.dtype is dtype
    rows = zip(items.values.tolist(), items.scales.tolist(), strict=True)
    exact = torch.tensor([[x * scale for x in row] for row, scale in rows]).reshape(-1, 3).to(dtype)
    torch.testing.assert_close(decoded.values, exact)


def test_without_scales_only_the_precision_changes() -> None:
    items = Ragged.from_items(_items([2, 1]))
    decoded = items.decoded(torch.bfloat16)
    assert decoded.values.dtype is torch.bfloat16
    assert (decoded.lengths, decoded.scales) == ([2, 1], None)
    assert torch.equal(decoded.values.float(), items.values)
    assert items.decoded(torch.float32).values is items.values, "nothing is copied where nothing changes"


def test_on_another_device_scales_are_applied_there() -> None:
    items = _scaled([2, 3])
    assert items.scales is not None
    elsewhere = Ragged(items.values.to("meta"), items.offsets, items.scales.to("meta"))
    decoded = elsewhere.decoded(torch.bfloat16)
    assert (decoded.values.device.type, decoded.values.dtype) == ("meta", torch.bfloat16)
    assert decoded.values.shape == (5, 3)
    assert (decoded.lengths, decoded.scales) == (items.lengths, None)
    on_gpu = Ragged(items.values.as_subclass(OnGpu), items.offsets, items.scales)
    values = on_gpu.decoded(torch.float32).values.as_subclass(torch.Tensor)
    torch.testing.assert_close(values, items.decoded(torch.float32).values)


class OnGpu(torch.Tensor):
    """Numbers that say that they are on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


@settings(max_examples=40)
@given(LENGTHS, st.data(), st.booleans())
def test_items_are_taken_in_order_with_scales(lengths: list[int], data: st.DataObject, scaled: bool) -> None:
    items = _scaled(lengths) if scaled else Ragged.from_items(_items(lengths))
    wanted = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))
    taken = items.take(wanted)
    assert taken.lengths == [lengths[i] for i in wanted]
    exact = [items.decoded(torch.float32)[i] for i in wanted]
    for item, expected in zip(taken.decoded(torch.float32), exact, strict=True):
        assert torch.equal(item, expected)


def test_items_that_follow_one_another_are_taken_without_a_copy() -> None:
    items = _scaled([2, 1, 3, 1])
    taken = items.take([1, 2])
    assert taken.values.data_ptr() == items[1].data_ptr()
    assert taken.offsets.tolist() == [0, 1, 4]
    assert Ragged.one_row_each(torch.zeros(3, 2)).lengths == [1, 1, 1]
