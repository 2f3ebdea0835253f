"""Which characters the tokens of a text stand for, with the tokenisers of published models."""

import unicodedata
from types import SimpleNamespace

import numpy as np
import pytest

from maxsimd.engine.preprocess.origins import Origins, around, behind_prompt, extent
from maxsimd.engine.preprocess.pieces import PIECE
from maxsimd.engine.preprocess.tokenization import TextTokenizer
from tests.checkpoints.tokenizer_kinds import CUT
from tests.unit.engine.preprocess.cut_texts import KINDS, SCRIPTS

WORDS = (
    "Der",
    "gute",
    "Käse",
    "e\u0301te\u0301",
    "schmeckt",
    "in",
    "東京",
    "naïve",
    "👍🏽",
    "👨\u200d👩",
    "🎉",
)
TEXT = " ".join((*WORDS, *SCRIPTS.values()))


def _tokenizer(name: str) -> TextTokenizer:
    return TextTokenizer(SimpleNamespace(backend_tokenizer=CUT[name]()))


@pytest.mark.parametrize("name", KINDS)
def test_the_tokens_of_a_text_stand_for_all_of_it_in_order(name: str) -> None:
    tokenizer = _tokenizer(name)
    ids, spans = tokenizer.encode_with_spans(TEXT, "text")
    assert ids.tolist() == tokenizer.encode([TEXT], "text")[0].tolist()
    assert (np.diff(spans[:, 0]) >= 0).all()
    origins = Origins(ids, spans)
    found = [origins.span(row, TEXT) for row in range(len(ids))]
    read = {i for span in found if span is not None for i in range(*span)}
    left_out = {character for i, character in enumerate(TEXT) if i not in read}
    # What a normaliser drops: spaces, marks alone, and signs that are not seen.
    assert all(character.isspace() or unicodedata.category(character)[0] in "MC" for character in left_out), (
        left_out
    )


@pytest.mark.parametrize("name", KINDS)
def test_words_are_made_of_whole_spans(name: str) -> None:
    """No token's span reaches into two words, nor ends within what a reader sees as one character."""
    tokenizer = _tokenizer(name)
    text = " ".join(WORDS)
    ids, spans = tokenizer.encode_with_spans(text, "text")
    origins = Origins(ids, spans)
    starts = {text.index(word): word for word in WORDS}
    for row in range(len(ids)):
        span = origins.span(row, text)
        assert span is not None
        seen = text[slice(*span)]
        if not seen.strip():
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
    tokenizer = _tokenizer(name)
    text = "".join(f"Käse {i}, " for i in range(2 * PIECE // 10))
    ids, spans = tokenizer.encode_with_spans(text, "text", most, side)  # type: ignore[arg-type]
    assert ids.tolist() == tokenizer.encode([text], "text", most, side)[0].tolist()  # type: ignore[arg-type]
    assert len(spans) == len(ids)
    _, whole = tokenizer.encode_with_spans(text, "text")
    expected = whole if most is None else whole[:most] if side == "right" else whole[-most:]
    assert spans.tolist() == expected.tolist()


def test_what_is_not_the_texts_has_no_span() -> None:
    spans = np.array([[0, 6], [6, 9], [9, 12]], dtype=np.int32)
    behind = behind_prompt(spans, 7)
    assert behind.tolist() == [[-1, -1], [0, 2], [2, 5]]
    placed = around(behind, 1, 6)
    assert placed.tolist() == [[-1, -1], [-1, -1], [0, 2], [2, 5], [-1, -1], [-1, -1]]
    assert extent(placed) == (0, 5)
    assert extent(placed[:2]) is None
    origins = Origins(np.arange(6, dtype=np.int32), placed)
    assert [origins.span(row, "ab cd") for row in range(6)] == [None, None, (0, 2), (3, 5), None, None]
