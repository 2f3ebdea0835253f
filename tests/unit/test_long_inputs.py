"""Cutting says what it did; nothing counts along that others could read half-way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxsimd.engine import Engine, EngineConfig, InvalidRequestError, Truncation
from maxsimd.engine.preprocess.long_inputs import InputName, LongInputs, Room

LENGTHS = st.integers(0, 60)


def _text(length: int) -> np.ndarray:
    return np.arange(length, dtype=np.int32)


@given(LENGTHS, st.integers(1, 60), st.none() | LENGTHS, st.none() | LENGTHS)
def test_a_text_is_truncated_where_less_of_it_is_read_than_the_checkpoint_would(
    length: int, room: int, own: int | None, most: int | None
) -> None:
    inputs = LongInputs(Truncation(max_tokens=-1), 100, 0)
    fitted = inputs.fit(_text(length), Room(room, 2), InputName("documents", 0), own, most)
    limits = [limit for limit in (own, most) if limit is not None]
    assert len(fitted.tokens) == min([length, room, *limits])
    as_meant = length if own is None else min(length, own)
    assert fitted.truncated == (len(fitted.tokens) < as_meant)


@given(LENGTHS, st.integers(1, 60), st.none() | LENGTHS)
def test_where_cutting_is_not_allowed_a_text_is_refused_by_its_own_length_and_the_most_that_can_be_run(
    length: int, room: int, own: int | None
) -> None:
    inputs = LongInputs(Truncation(), 100, 0)
    if min(length, 60 if own is None else own) <= room:
        assert not inputs.fit(_text(length), Room(room, 2), InputName("documents", 3), own).truncated
        return
    with pytest.raises(
        InvalidRequestError, match=f"has {length + 2} tokens, but at most {room + 2} can be run"
    ):
        inputs.fit(_text(length), Room(room, 2), InputName("documents", 3), own)


def test_windows_and_limits_say_what_they_left_out() -> None:
    inputs = LongInputs(Truncation(max_tokens=10, windows=True, max_document_tokens=20), 100, 2)
    wanted = inputs.document(_text(30))
    assert (len(wanted.tokens), wanted.truncated) == (20, True)
    assert not inputs.document(_text(20)).truncated
    windows = inputs.windows(_text(20), Room(8, 2), InputName("documents", 0))
    assert [window.tokens.tolist() for window in windows] == [
        list(range(0, 8)),
        list(range(6, 14)),
        list(range(12, 20)),
    ]
    assert not any(window.truncated for window in windows)


async def test_every_input_that_is_cut_counts_and_no_other() -> None:
    async with Engine(EngineConfig()) as engine:
        long = "word " * 40
        documents = ["short", long, "word " * 39, long, "b"]
        cut = await engine.score(long, documents, truncation=Truncation(max_tokens=20))
        assert cut.truncated == 4, "the query, and three documents, two of them equal"
        again = await engine.score("a", documents, truncation=Truncation(max_tokens=20))
        assert (again.truncated, again.usage.cached_documents) == (3, 4)
        limited = await engine.score("a", documents, truncation=Truncation(max_document_tokens=40))
        assert limited.truncated == 0
        limited = await engine.score(long, documents, truncation=Truncation(max_query_tokens=5))
        assert limited.truncated == 1
