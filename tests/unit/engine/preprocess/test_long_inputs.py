"""What becomes of texts that are too long: they are cut and counted, refused, or read through windows."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine import InvalidRequestError, Truncation
from maxsimd.engine.preprocess.long_inputs import InputName, LongInputs, Room
from maxsimd.engine.preprocess.tokenization import Side, cut
from tests.unit.engine.preprocess.preprocessing import refused

LENGTHS = st.integers(0, 60)
SIDES = st.sampled_from(["left", "right"])


def _text(length: int) -> np.ndarray:
    return np.arange(length, dtype=np.int32)


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 60), st.none() | LENGTHS, st.none() | LENGTHS)
def test_a_text_is_truncated_if_less_is_read_than_by_itself(
    length: int, room: int, own: int | None, most: int | None
) -> None:
    inputs = LongInputs(Truncation(max_tokens=-1), 100, 0)
    fitted = inputs.fit(_text(length), Room(room, 2), InputName("documents", 0), own, most)
    limits = [limit for limit in (own, most) if limit is not None]
    assert len(fitted.tokens) == min([length, room, *limits])
    as_meant = length if own is None else min(length, own)
    assert fitted.truncated == (len(fitted.tokens) < as_meant)


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 60), st.none() | LENGTHS)
def test_a_text_that_may_not_be_cut_is_refused_by_its_length(length: int, room: int, own: int | None) -> None:
    inputs = LongInputs(Truncation(), 100, 0)
    if min(length, 60 if own is None else own) <= room:
        assert not inputs.fit(_text(length), Room(room, 2), InputName("documents", 3), own).truncated
        return
    refusal = f"has {length + 2} tokens, but at most {room + 2} can be run"
    with pytest.raises(InvalidRequestError, match=refusal):
        inputs.fit(_text(length), Room(room, 2), InputName("documents", 3), own)


@settings(max_examples=40)
@given(st.integers(0, 80), st.integers(1, 20), st.integers(0, 19), st.booleans())
def test_windows_cover_a_text_and_share_exactly_the_overlap(
    length: int, room: int, overlap: int, asked: bool
) -> None:
    truncation = Truncation(max_tokens=-1, windows=True, window_overlap=overlap if asked else None)
    inputs = LongInputs(truncation, 100, 5 if asked else overlap)
    text = _text(length)
    name = InputName("documents", 4)
    if length > room and asked and overlap > room // 2:
        refusal = rf"^window_overlap is {overlap}, .* have {room} tokens and may share at most {room // 2};"
        with refused("window_overlap", refusal):
            inputs.windows(text, Room(room, 2), name)
        return
    made = inputs.windows(text, Room(room, 2), name)
    assert not any(window.truncated for window in made)
    windows = [window.tokens.tolist() for window in made]
    assert sum(map(len, windows)) <= 2 * length, "a document costs at most twice its tokens"
    overlap = min(overlap, room // 2)
    assert all(len(window) == room for window in windows[:-1])
    assert len(windows[-1]) <= room
    for before, after in itertools.pairwise(windows):
        assert before[room - overlap :] == after[:overlap]
        assert len(after) > overlap, "each window reads something new"
    assert windows[0] + [token for window in windows[1:] for token in window[overlap:]] == text.tolist()


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 60), st.none() | LENGTHS, st.none() | LENGTHS, st.booleans(), SIDES)
def test_as_much_of_a_text_is_read_as_is_needed(
    length: int, room: int, own: int | None, most: int | None, may_cut: bool, side: Side
) -> None:
    inputs = LongInputs(Truncation(max_tokens=-1 if may_cut else None, side=side), 100, 0)
    name, of_room = InputName("documents", 0), Room(room, 2)

    def fitted(text: np.ndarray) -> tuple[list[int], bool] | str:
        try:
            found = inputs.fit(text, of_room, name, own, most)
        except InvalidRequestError as error:
            return str(error)
        return found.tokens.tolist(), found.truncated

    read = inputs.most_of_text(room, own, most)
    text = _text(length)
    assert fitted(text if read is None else cut(text, read, side)) == fitted(text)
    if may_cut:
        assert read is not None
        assert read <= room + 1


@settings(max_examples=40)
@given(LENGTHS, st.integers(0, 60), st.none() | LENGTHS, st.booleans(), SIDES)
def test_as_much_of_a_document_is_read_as_is_needed(
    length: int, room: int, most: int | None, windows: bool, side: Side
) -> None:
    inputs = LongInputs(
        Truncation(max_tokens=-1, side=side, windows=windows, max_document_tokens=most), 100, 0
    )

    def left(text: np.ndarray) -> tuple[list[int], bool]:
        """What is left of it within its room, and whether it was cut."""
        document = inputs.document(text)
        fitted = document.tokens if windows else cut(document.tokens, room, side)
        return fitted.tolist(), document.truncated or len(fitted) < len(document.tokens)

    read = inputs.most_of_document(room)
    assert (read is None) == (windows and most is None)
    if read is not None:
        assert left(cut(_text(length), read, side)) == left(_text(length))
