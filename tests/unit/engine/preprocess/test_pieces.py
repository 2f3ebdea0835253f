"""Long texts are cut into pieces of bounded length, from either end, and only where that is proven."""

import logging
import re
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from maxsimd.engine.preprocess import pieces
from maxsimd.engine.preprocess.breaks import Breaks
from maxsimd.engine.preprocess.pieces import (
    LONGEST_PIECE,
    PIECE,
    LongPieceError,
    cut_up,
    cut_up_backwards,
    proven_breaks,
)
from tests.checkpoints import tokenizer_kinds
from tests.unit.engine.preprocess.cut_texts import KINDS, cut_kind

CutUp = Callable[[str, int, Breaks | None], Iterator[tuple[int, int]]]
BOTH = pytest.mark.parametrize("cut_into", [cut_up, cut_up_backwards])
BREAKS = Breaks(re.compile("a(?=,b)"))
# Words of any length, with breaks or none.
TEXTS = st.lists(st.sampled_from(["a,b", "x", "a", ",", "x" * 40, "x" * 700]), max_size=80).map("".join)


@BOTH
@settings(max_examples=40)
@given(text=TEXTS, size=st.integers(1, 300))
def test_pieces_make_up_the_text_and_end_at_places(cut_into: CutUp, text: str, size: int) -> None:
    found = list(cut_into(text, size, BREAKS))
    in_order = found if cut_into is cut_up else found[::-1]
    assert in_order[0][0] == 0
    assert in_order[-1][1] == len(text)
    for (_, stop), (start, _) in pairwise(in_order):
        assert stop == start
        assert stop in BREAKS.all(text)


@settings(max_examples=40)
@given(text=TEXTS, size=st.integers(1, 300))
def test_a_piece_ends_at_the_first_place_once_it_is_long(text: str, size: int) -> None:
    breaks = BREAKS.all(text)
    for start, stop in list(cut_up(text, size, BREAKS))[:-1]:
        assert stop == min(found for found in breaks if found >= start + size)


@settings(max_examples=40)
@given(text=TEXTS, size=st.integers(1, 300))
def test_backwards_a_piece_is_at_most_a_step_longer(text: str, size: int) -> None:
    breaks, step = BREAKS.all(text), 256
    for start, stop in list(cut_up_backwards(text, size, BREAKS))[:-1]:
        assert stop - start > size
        near = [found for found in breaks if 0 < stop - size - found <= step]
        assert not near or stop - start <= size + step


@BOTH
def test_without_breaks_a_text_is_one_piece_of_limited_length(cut_into: CutUp) -> None:
    assert list(cut_into("a,b" * 9, 3, None)) == [(0, 27)]
    assert list(cut_into("", 3, BREAKS)) == [(0, 0)]
    longest = "x" * LONGEST_PIECE
    for breaks in (BREAKS, None):
        assert list(cut_into(longest, PIECE, breaks)) == [(0, LONGEST_PIECE)]
        with pytest.raises(LongPieceError):
            list(cut_into(longest + "x", PIECE, breaks))


def test_pieces_before_the_refused_one_are_given() -> None:
    """They may be all that is wanted of a text."""
    endless = "x" * (LONGEST_PIECE + 1)
    for found in (cut_up(f"a,b{endless}", 1, BREAKS), cut_up_backwards(f"{endless}a,b", 1, BREAKS)):
        start, stop = next(found)
        assert stop - start <= 2
        with pytest.raises(LongPieceError):
            next(found)


@pytest.mark.parametrize("name", KINDS)
def test_places_are_proven_for_all_kinds_that_have_any(name: str, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer, breaks = cut_kind(name)
    assert proven_breaks(tokenizer) == breaks
    assert not caplog.records


def test_a_tokenizer_whose_pieces_differ_is_read_whole(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the lists of what is known were wrong: half a word has other tokens than the word."""
    monkeypatch.setattr(pieces, "find_breaks", lambda _: Breaks(re.compile("w(?=n)")))
    assert proven_breaks(tokenizer_kinds.bert()) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "do not have the tokens of the whole" in caplog.text


def test_added_tokens_are_part_of_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens(["x y"])
    monkeypatch.setattr(pieces, "find_breaks", lambda _: Breaks(re.compile("x(?= y)")))
    assert proven_breaks(tokenizer) is None


def test_a_tokeniser_of_which_nothing_is_known_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert proven_breaks(tokenizer_kinds.llama_2()) is None
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert str(LONGEST_PIECE) in caplog.text
