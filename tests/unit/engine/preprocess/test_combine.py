"""From values to scores: the best window of each document, shared scores, and cosines over blocks."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine.preprocess.combine import (
    BlockCosines,
    best_windows,
    merge_blocks,
    one_each,
    shared_scores,
)


def test_scores_are_float32() -> None:
    for combine in (one_each, best_windows([2, 1]), shared_scores(one_each, [0, 1, 0, 2])):
        assert combine([0.1, 0.2, 0.3]).dtype == np.float32


@settings(max_examples=40)
@given(st.lists(st.integers(1, 4), max_size=12), st.data())
def test_the_best_window_of_each_document_counts(num_windows: list[int], data: st.DataObject) -> None:
    total = sum(num_windows)
    values = data.draw(st.lists(st.floats(-5, 5, width=32), min_size=total, max_size=total))
    expected, rest = [], list(values)
    for count in num_windows:
        expected.append(max(rest[:count]))
        rest = rest[count:]
    assert best_windows(num_windows)(values).tolist() == expected  # type: ignore[arg-type]


@settings(max_examples=40)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_equal_documents_share_a_score_in_their_order(position_of: list[int]) -> None:
    scores = shared_scores(one_each, position_of)
    if len(set(position_of)) == len(position_of):
        assert scores is one_each, "all differ, and are in their order already"
    else:
        assert scores([0.0, 10.0, 20.0, 30.0]).tolist() == [10.0 * position for position in position_of]


def _block(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def test_a_document_s_score_is_its_cosine_with_the_query() -> None:
    scores = merge_blocks([_block([2, 0], [0, 3], [-0.001, 0], [1, 1], [5, 0])])
    np.testing.assert_allclose(scores, [1, 0, -1, np.sqrt(0.5)], atol=1e-6)
    assert scores.dtype == np.float32
    assert merge_blocks([_block([0, 0], [1, 0], [1, 0])]).tolist() == [0, 1], "zeros have no cosine"


def test_the_query_is_a_mean_over_blocks_by_the_best_cosine() -> None:
    first = _block([1, 0], [0, 1], [3, 4])  # the best cosine is 0.8: weight 0.9
    second = _block([-2, 0], [0, 4])  # its only cosine is 0: weight 0.5
    scores = merge_blocks([first, second])
    query = np.array([0.9 * 3, 0.9 * 4 + 0.5 * 4]) / 1.4
    query /= np.linalg.norm(query)
    np.testing.assert_allclose(scores, [query[0], query[1], -query[0]], atol=1e-6)


def test_each_list_has_its_own_blocks_and_query() -> None:
    lists = [
        [_block([1, 0], [1, 0]), _block([0, 1], [1, 0])],
        [_block([0, 3], [5, 0], [0, -2], [0, 2])],
        [_block([1, 1], [1, 0])],
    ]
    values = [block for blocks in lists for block in blocks]
    scores = BlockCosines((2, 1, 1))(values)  # type: ignore[arg-type]
    np.testing.assert_array_equal(scores, np.concatenate([merge_blocks(blocks) for blocks in lists]))
    np.testing.assert_allclose(scores, [1, 0, 1, 0, -1, np.sqrt(0.5)], atol=1e-6)
