"""Characters that a text's tokens stand for, and the chunk of a document that each belongs to."""

import unicodedata
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine import InvalidRequestError
from maxsimd.engine.processors.embedding import as_document, passages_of
from maxsimd.engine.processors.text.tokenization import PIECE, Origins
from tests.checkpoints.tokenizer_kinds import CUT
from tests.unit.engine.processors.small_models import refused
from tests.unit.engine.processors.split_texts import KINDS, SCRIPTS, text_tokenizer

WORDS = [
    "Der", "gute", "Käse", "e\u0301te\u0301", "schmeckt", "in", "東京", "naïve", "👍🏽", "👨\u200d👩", "🎉",
]  # fmt: skip
TEXT = " ".join((*WORDS, *SCRIPTS.values()))


@pytest.mark.parametrize("name", KINDS)
def test_the_tokens_of_a_text_stand_for_all_of_it_in_order(name: str) -> None:
    tokenizer = text_tokenizer(CUT[name])
    ids, spans = tokenizer.encode_with_spans(TEXT, "text")
    assert ids.tolist() == tokenizer.encode([TEXT], "text")[0].tolist()
    assert (np.diff(spans[:, 0]) >= 0).all()
    origins = Origins(ids, spans)
    found = [origins.span(row, TEXT) for row in range(len(ids))]
    read = {i for span in found if span is not None for i in range(*span)}
    left_out = [character for i, character in enumerate(TEXT) if i not in read]
    # A normaliser drops spaces, marks alone, and signs that are not seen.
    seen = [each for each in left_out if not each.isspace() and unicodedata.category(each)[0] not in "MC"]
    assert not seen
    # Words of other scripts are not looked at one by one.
    starts = {TEXT.index(word): word for word in WORDS}
    for span in found:
        assert span is not None
        seen = TEXT[slice(*span)]
        if not seen.strip() or span[0] > len(" ".join(WORDS)):
            continue
        word = next(starts[start] for start in sorted(starts, reverse=True) if start <= span[0])
        assert seen in word
        assert len(word) > 3 or word in ("Der", "in", "東京") or seen == word, (seen, word)
        assert not unicodedata.combining(seen[0])


@pytest.mark.parametrize(
    ("name", "side", "most"),
    [("bert", "right", None), ("qwen", "left", 5), ("xlm_roberta", "left", 3000), ("bert", "right", 3000)],
)
def test_long_texts_are_cut_as_their_tokens_are(name: str, side: str, most: int | None) -> None:
    tokenizer = text_tokenizer(CUT[name])
    text = "".join(f"Käse {i}, " for i in range(2 * PIECE // 10))
    ids, spans = tokenizer.encode_with_spans(text, "text", most, side)  # type: ignore[arg-type]
    assert ids.tolist() == tokenizer.encode([text], "text", most, side)[0].tolist()  # type: ignore[arg-type]
    assert len(spans) == len(ids)
    _, whole = tokenizer.encode_with_spans(text, "text")
    expected = whole if most is None else whole[:most] if side == "right" else whole[-most:]
    assert spans.tolist() == expected.tolist()


@st.composite
def tokens_of_a_text(draw: st.DrawFn) -> tuple[str, list[tuple[int, int]]]:
    """A text and the characters of its tokens: some without any, some characters without a token."""
    text = draw(st.text("ab \n", min_size=1, max_size=20))
    pieces = list(pairwise(sorted(draw(st.sets(st.integers(0, len(text)), min_size=2)) | {0})))
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


@settings(max_examples=40)
@given(tokens_of_a_text(), st.data())
def test_a_token_is_its_first_letters(case: tuple[str, list[tuple[int, int]]], data: st.DataObject) -> None:
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


REFUSED: tuple[tuple[Any, Any, bool, str], ...] = (
    (["a"], [(0, 1)], False, "chunks"), ([(1, 2)], None, True, "input"),
    (["a", "b"], [(0, 1)], True, "chunks"), (["a"], [], True, "chunks"), (["ab"], [(0, 3)], True, "chunks"),
    (["ab"], [(1, 1)], True, "chunks"), (["ab"], [(0, 1, 2)], True, "chunks"),
    (["ab"], ["01"], True, "chunks"), (["ab"], [3], True, "chunks"), (["ab"], 5, True, "chunks"),
)  # fmt: skip


def test_texts_are_the_chunks_of_one_document() -> None:
    assert as_document(["One. ", "", "Two."], None, True) == ("One. Two.", ((0, 5), (5, 5), (5, 9)))
    assert as_document(["One. Two."], [[0, 4], (5, 9)], True) == ("One. Two.", ((0, 4), (5, 9)))
    assert as_document(["One.", "Two."], None, False) is None
    for texts, chunks, late, param in REFUSED:
        with refused(param, "."):
            as_document(texts, chunks, late)
    spans = np.array([(0, 1)], dtype=np.int32)
    assert len(passages_of("a", spans, ((0, 1),) * 8)) == 8
    with pytest.raises(InvalidRequestError, match="overlap less"):
        passages_of("a", spans, ((0, 1),) * 9)
