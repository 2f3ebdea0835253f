"""Positions of tokens beside pictures are those that transformers works out, for every layout."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    Qwen2VLConfig,
    Qwen2VLModel,
    Qwen3VLConfig,
    Qwen3VLModel,
)

from maxsimd.engine.checkpoint.visual.rope import rope_positions

_MERGE = 2
_CLASSES = {Qwen2VLModel: Qwen2VLConfig, Qwen2_5_VLModel: Qwen2_5_VLConfig, Qwen3VLModel: Qwen3VLConfig}

# Texts and grids in turn, a text before, between and behind pictures: touching ones are one to transformers.
texts = st.integers(1, 9)
grids = st.tuples(st.integers(1, 7), st.integers(1, 7))


@pytest.fixture(scope="module", params=_CLASSES, ids=lambda each: each.__name__)
def model(request: pytest.FixtureRequest) -> Any:
    """A model without weights: positions depend on none."""
    with torch.device("meta"):
        return request.param(_CLASSES[request.param]())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(texts, grids), max_size=4), st.integers(0, 9), st.booleans())
def test_positions_equal_those_of_transformers(
    model: Any, begun: list[tuple[int, tuple[int, int]]], rest: int, picture_first: bool
) -> None:
    types: list[int] = []
    images: list[tuple[int, tuple[int, int]]] = []
    for i, (text, (rows, columns)) in enumerate(begun):
        types += [0] * (0 if picture_first and i == 0 else text)
        images.append((len(types), (rows, columns)))
        types += [1] * (rows * columns)
    types += [0] * rest
    if not types:
        return
    found = rope_positions(len(types), images)
    if not images:
        np.testing.assert_array_equal(found, np.tile(np.arange(len(types)), (3, 1)))
        return
    patches = torch.tensor([[1, rows * _MERGE, columns * _MERGE] for _, (rows, columns) in images])
    expected, _ = model.get_rope_index(
        torch.zeros(1, len(types), dtype=torch.long), torch.tensor([types]), image_grid_thw=patches
    )
    np.testing.assert_array_equal(found, expected[:, 0].numpy())
