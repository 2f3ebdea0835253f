"""Token compression: which rows of a document become one, and the options that ask for it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine import EngineConfig
from maxsimd.engine.config import compress_layers_of
from maxsimd.engine.models.compression import Compression, Rows, compressed

# How many rows stand before the document, are its own, and stand behind it.
lengths = st.tuples(st.integers(0, 4), st.integers(0, 20), st.integers(1, 4))


def _rows(batch: list[tuple[int, int, int]]) -> Rows:
    longest = max(map(sum, batch))
    types = [[0] * a + [1] * b + [0] * (longest - a - b) for a, b, _ in batch]
    attended = [[1] * sum(each) + [0] * (longest - sum(each)) for each in batch]
    return Rows(torch.tensor(attended) != 0, torch.tensor(types) != 0)


@settings(max_examples=30)
@given(st.lists(lengths, min_size=1, max_size=5), st.sampled_from([2, 4, 8]))
def test_each_group_of_a_documents_rows_becomes_their_mean(
    batch: list[tuple[int, int, int]], ratio: int
) -> None:
    rows = _rows(batch)
    states = torch.randn(*rows.attended.shape, 3)
    groups, after = compressed(rows, ratio)
    found = groups.means(states)
    for i, (before, own, behind) in enumerate(batch):
        document = states[i, before : before + own].split(ratio) if own else ()
        end = before + own
        expected = [*states[i, :before], *(part.mean(0) for part in document), *states[i, end : end + behind]]
        count = len(expected)
        torch.testing.assert_close(found[i, :count], torch.stack(expected))
        assert after.attended[i].tolist() == [True] * count + [False] * (found.shape[1] - count)
        assert after.of_document[i].nonzero().flatten().tolist() == [*range(before, before + len(document))]
        assert after.last[i] == count - 1


def test_bfloat16_rows_are_averaged_in_float32() -> None:
    rows = _rows([(0, 3, 1)])
    states = torch.tensor([[[256.0], [1.0], [1.0], [7.0]]], dtype=torch.bfloat16)
    groups, _ = compressed(rows, 4)
    assert groups.means(states).tolist() == [[[86.0], [7.0]]]


def test_layers_are_numbers_with_commas_between() -> None:
    assert compress_layers_of("40, 24,24") == (24, 40)
    assert compress_layers_of("8") == (8,)
    for wrong in ("", "a", "0", "-1,2", "1;2", "1.5"):
        with pytest.raises(ValueError, match="compress_layers must be numbers from 1 on"):
            EngineConfig(compress_layers=wrong)


@pytest.mark.parametrize("ratio", [-1, 0, 3, 16])
def test_other_ratios_are_refused(ratio: int) -> None:
    with pytest.raises(ValueError, match=f"compress_ratio must be one of 1, 2, 4, 8, not {ratio}"):
        EngineConfig(compress_ratio=ratio)


def test_compression_says_what_it_does() -> None:
    assert str(Compression(2, (24,))) == "every 2 rows of a document become one behind layer 24"
    assert str(Compression(4, (8, 24))).endswith("one behind layers 8 and 24")
