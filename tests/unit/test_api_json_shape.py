"""Counting the arrays and objects of JSON text, compared with what Python's own reader finds."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxsimd.api import json_shape
from maxsimd.api.json_shape import has_more_containers


def _containers(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_containers, value.values()))
    return 1 + sum(map(_containers, value)) if isinstance(value, list) else 0


TEXT = st.text(st.sampled_from('{}[]"\\ a\nü'), max_size=12)
VALUES = st.recursive(
    TEXT | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=30,
)


@given(value=VALUES, block=st.integers(1, 40), is_ascii=st.booleans())
def test_arrays_and_objects_are_counted_and_what_texts_say_is_not(
    value: Any, block: int, is_ascii: bool
) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    count = _containers(value)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_shape, "_BLOCK", block)
        assert not has_more_containers(body, count)
        assert has_more_containers(body, count - 1)


@pytest.mark.parametrize("body", [b"", b"[" * 5, b'"[[[', b"\\", b'"\\', b"]]]]{{"])
def test_what_is_no_json_breaks_nothing(body: bytes) -> None:
    assert has_more_containers(body, 10) is False
