"""What becomes of texts that are too long: they are cut and counted, refused, or read through windows."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine import InvalidRequestError, RequestTooLargeError, Truncation
from maxsimd.engine.preprocess.long_inputs import InputName, LongInputs, Room
from maxsimd.engine.preprocess.tokenization import Side, cut
from tests.unit.engine.preprocess.preprocessing import refused

LENGTHS = st.integers(0, 60)


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


@settings(max_examples=40)
@given(st.integers(0, 80), st.integers(1, 20), st.integers(0, 19), st.booleans())
def test_windows_cover_a_text_and_share_exactly_the_overlap(
    length: int, room: int, overlap: int, asked: bool
) -> None:
    truncation = Truncation(max_tokens=-1, windows=True, window_overlap=overlap if asked else None)
    inputs = LongInputs(truncation, 100, 0 if asked else overlap)
    text = _text(length)
    name = InputName("documents", 4)
    if length > room and asked and overlap > room // 2:
        with refused(
            "window_overlap",
            rf"^window_overlap is {overlap}, .* have {room} tokens and may share at most {room // 2};",
        ):
            inputs.windows(text, Room(room, 2), name)
        return
    windows = [window.tokens.tolist() for window in inputs.windows(text, Room(room, 2), name)]
    assert sum(map(len, windows)) <= 2 * length, "a document costs at most twice its tokens"
    overlap = min(overlap, room // 2)
    assert all(len(window) == room for window in windows[:-1])
    assert len(windows[-1]) <= room
    for before, after in itertools.pairwise(windows):
        assert before[room - overlap :] == after[:overlap]
        assert len(after) > overlap, "each window reads something new"
    assert windows[0] + [token for window in windows[1:] for token in window[overlap:]] == text.tolist()


def test_the_request_s_overlap_goes_before_the_engine_s() -> None:
    text, room, name = _text(10), Room(4, 0), InputName("documents", 0)
    asked = LongInputs(Truncation(windows=True, window_overlap=0), 100, 2)
    assert [len(window.tokens) for window in asked.windows(text, room, name)] == [4, 4, 2]
    default = LongInputs(Truncation(windows=True), 100, 2)
    assert [len(window.tokens) for window in default.windows(text, room, name)] == [4, 4, 4, 4]


def test_without_windows_a_text_is_cut_or_refused() -> None:
    text, room, name = _text(10), Room(4, 3), InputName("documents", 1)
    (cut,) = LongInputs(Truncation(max_tokens=-1, side="left"), 100, 2).windows(text, room, name)
    assert (cut.tokens.tolist(), cut.truncated) == ([6, 7, 8, 9], True)
    with pytest.raises(InvalidRequestError, match=r"^documents\[1\] has 13 tokens, but at most 7 can be run"):
        LongInputs(Truncation(), 100, 2).windows(text, room, name)


def test_windows_are_counted_before_any_is_made() -> None:
    def check(tokens: int) -> None:
        counted.append(tokens)
        if tokens > 27:
            raise RequestTooLargeError("too much")

    counted: list[int] = []
    inputs = LongInputs(Truncation(windows=True), 100, 0, check)
    room, name = Room(7, 2), InputName("documents", 0)
    inputs.windows(_text(7), room, name)
    assert counted == [], "one sequence"
    assert len(inputs.windows(_text(28), room, name)) == 4
    with pytest.raises(RequestTooLargeError):
        inputs.windows(_text(29), room, name)
    # How many tokens the last one has is not certain.
    assert counted == [3 * 9, 4 * 9]


def test_a_text_without_any_room_is_refused() -> None:
    inputs, name = LongInputs(Truncation(max_tokens=-1), 100, 0), InputName("documents", 1)
    assert len(inputs.fit(_text(5), Room(1, 9), name).tokens) == 1
    assert len(inputs.fit(_text(0), Room(0, 9), name).tokens) == 0
    with refused("queries", r"^9 tokens stand around documents\[1\]"):
        inputs.fit(_text(5), Room(0, 9), name)


def test_a_request_may_ask_for_less_than_can_be_run() -> None:
    for asked, limit in ((None, 100), (-1, 100), (100, 100), (99, 99), (1, 1)):
        inputs = LongInputs(Truncation(max_tokens=asked), 100, 0)
        assert (inputs.limit, inputs.may_cut) == (limit, asked is not None)
    with refused("truncate_prompt_tokens", r"^truncate_prompt_tokens is 101, more than the 100 tokens"):
        LongInputs(Truncation(max_tokens=101), 100, 0)


def test_windows_that_are_mostly_something_else_are_refused() -> None:
    """Each would repeat the rest for a few tokens of the document."""
    inputs, name = LongInputs(Truncation(windows=True), 100, 0), InputName("documents", 2)
    assert len(inputs.windows(_text(30), Room(2, 14), name)) == 15
    with refused("documents", r"^documents\[2\] .* windows of 2 tokens beside 15 others; shorten the query"):
        inputs.windows(_text(30), Room(2, 15), name)
    assert len(inputs.windows(_text(2), Room(2, 15), name)) == 1, "a document that fits needs no windows"


SIDES = st.sampled_from(["left", "right"])


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
