"""Which tokens belong to which chunk of a document, and what is refused."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxsimd.engine import InvalidRequestError
from maxsimd.engine.preprocess.late_chunking import as_document, passages_of


@st.composite
def tokens_of_a_text(draw: st.DrawFn) -> tuple[str, list[tuple[int, int]]]:
    """A text and the characters of its tokens: some without any, some characters without a token."""
    text = draw(st.text("ab \n", min_size=1, max_size=20))
    cuts = (
        sorted(draw(st.sets(st.integers(0, len(text)), min_size=2)) | {0})
        if len(text) > 1
        else [0, len(text)]
    )
    pieces = [(start, stop) for start, stop in pairwise(cuts)]
    chosen = [piece for piece in pieces if draw(st.booleans())] or pieces[:1]
    before = [(-1, -1)] * draw(st.integers(0, 2))
    return text, [*before, *chosen, *[(-1, -1)] * draw(st.integers(0, 2))]


def plain_owner(text: str, spans: list[tuple[int, int]], row: int) -> int:
    """The character that decides to which chunks a token belongs."""
    own = [i for i, (start, _) in enumerate(spans) if start >= 0]
    if row not in own:
        row = own[0] if row < own[0] else max(i for i in own if i < row)
    start, stop = spans[row]
    return next((i for i in range(start, stop) if not text[i].isspace()), start)


@given(tokens_of_a_text(), st.data())
def test_a_token_is_in_the_chunk_of_its_first_visible_character(
    case: tuple[str, list[tuple[int, int]]], data: st.DataObject
) -> None:
    text, spans = case
    bounds = st.tuples(st.integers(0, len(text) - 1), st.integers(1, len(text)))
    chunks = tuple(data.draw(st.lists(bounds.filter(lambda each: each[0] < each[1]), min_size=1, max_size=4)))
    owners = [plain_owner(text, spans, row) for row in range(len(spans))]
    expected = [[i for i, at in enumerate(owners) if start <= at < stop] for start, stop in chunks]
    placed = np.array(spans, dtype=np.int32)
    if not all(expected):
        with pytest.raises(InvalidRequestError, match="has no token of its own"):
            passages_of(text, placed, chunks)
        return
    found = [list(range(first, stop)) for first, stop in passages_of(text, placed, chunks)]
    assert found == expected


def test_texts_are_the_chunks_of_one_document() -> None:
    assert as_document(["One. ", "", "Two."], None, True) == ("One. Two.", ((0, 5), (5, 5), (5, 9)))
    assert as_document(["One. Two."], [[0, 4], (5, 9)], True) == ("One. Two.", ((0, 4), (5, 9)))
    assert as_document(["One.", "Two."], None, False) is None


@pytest.mark.parametrize(
    ("texts", "chunks", "late", "param"),
    [
        (["a"], [(0, 1)], False, "chunks"),
        ([(1, 2)], None, True, "input"),
        (["a", "b"], [(0, 1)], True, "chunks"),
        (["a"], [], True, "chunks"),
        (["ab"], [(0, 3)], True, "chunks"),
        (["ab"], [(1, 1)], True, "chunks"),
        (["ab"], [(0, 1, 2)], True, "chunks"),
        (["ab"], ["01"], True, "chunks"),
        (["ab"], [3], True, "chunks"),
        (["ab"], 5, True, "chunks"),
    ],
)
def test_what_is_no_document_with_chunks_is_refused(texts: Any, chunks: Any, late: bool, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        as_document(texts, chunks, late)
    assert refused.value.param == param


def test_chunks_may_be_an_array() -> None:
    assert as_document(["ab"], np.array([[0, 1], [1, 2]]), True) == ("ab", ((0, 1), (1, 2)))


def test_chunks_that_repeat_a_text_too_often_are_refused() -> None:
    spans = np.array([(0, 1)], dtype=np.int32)
    assert len(passages_of("a", spans, ((0, 1),) * 8)) == 8
    with pytest.raises(InvalidRequestError, match="overlap less"):
        passages_of("a", spans, ((0, 1),) * 9)
