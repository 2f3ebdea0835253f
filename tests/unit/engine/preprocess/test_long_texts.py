"""Long texts are tokenised in pieces of bounded length, which are cut only where that is proven: exactly, no
further than needed, and between other work."""

import functools
import logging
import re
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from maxsimd.engine.checkpoint import LoadedModel, PairRules
from maxsimd.engine.checkpoint.score_template import ScoreTemplate
from maxsimd.engine.errors import InvalidRequestError
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
from maxsimd.engine.preprocess.tokenization import PART_CHARACTERS, Side, TextTokenizer, cut
from maxsimd.engine.preprocess.workers import WithdrawnError, WorkerPool
from maxsimd.engine.requests import EmbedRequest, ScoreRequest, Truncation
from tests.checkpoints.tokenizer_kinds import CUT, bert, llama_2, qwen
from tests.unit.engine.preprocess.cut_texts import KINDS as CUT_KINDS
from tests.unit.engine.preprocess.cut_texts import cut_kind, num_characters, text_tokenizer, tokenized
from tests.unit.engine.preprocess.preprocessing import model, preprocessor, refused, request_ids

KINDS = CUT | {"llama_2": llama_2}
SIDES = st.sampled_from(["left", "right"])
WORDS = st.sampled_from(
    [
        *("the", "Paris", "is", "1815", "3.14", "a,b", "don't", "x\ny", "\n\n", "  ", "<mask>", "[SEP]"),
        *("\u6f22\u5b57\u3002", "caf\u00e9", "e\u0301", "\U0001f600"),
    ]
)
SENTENCES = st.lists(WORDS, min_size=1, max_size=12).map(" ".join)
# Up to three pieces or so.
LENGTHS = st.integers(PIECE // 2, 3 * PIECE)


def repeated(sentence: str, length: int) -> str:
    return (f"{sentence} " * (length // len(sentence) + 1))[:length]


@functools.cache
def library(name: str) -> Tokenizer:
    return KINDS[name]()


def whole(name: str, text: str) -> np.ndarray:
    return np.array(library(name).encode(text, add_special_tokens=False).ids, dtype=np.int32)


@pytest.mark.parametrize("name", [*CUT_KINDS, "llama_2"])
@settings(max_examples=4)
@given(sentence=SENTENCES, length=LENGTHS, most=st.none() | st.integers(0, 3000), side=SIDES)
def test_a_long_text_has_the_tokens_that_it_has_whole(
    name: str, sentence: str, length: int, most: int | None, side: Side
) -> None:
    text = repeated(sentence, length)
    read = [token for _, encoding in text_tokenizer(KINDS[name]).read(text, "text") for token in encoding.ids]
    assert read == whole(name, text).tolist()
    texts = [sentence, text]
    for tokens, each in zip(
        text_tokenizer(KINDS[name]).encode(texts, "documents", most, side), texts, strict=True
    ):
        expected = whole(name, each)
        assert tokens.tolist() == cut(expected, len(expected) if most is None else most, side).tolist()
        assert tokens.dtype == np.int32


@pytest.mark.parametrize("side", ["left", "right"])
def test_no_more_is_read_of_a_text_than_is_left_of_it(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = text_tokenizer(bert)
    batches = tokenized(monkeypatch, tokenizer)
    (tokens,) = tokenizer.encode(["word " * 100_000], "documents", 500, side)
    assert len(tokens) == 500
    assert num_characters(batches) < 10_000
    batches.clear()
    (tokens,) = tokenizer.encode(["extraordinarilylongish " * 100_000], "documents", 500, side)
    assert len(tokens) == 500
    assert num_characters(batches) < 30_000, "more where the first piece has too few"


def test_the_beginnings_of_texts_are_tokenised_together(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = text_tokenizer(bert)
    batches = tokenized(monkeypatch, tokenizer)
    tokenizer.encode(["word " * 10_000] * 20, "documents", 500)
    assert [len(batch) for batch in batches] == [16, 4], "as many as PART_CHARACTERS holds"
    batches.clear()
    tokenizer.encode(["x" * PART_CHARACTERS] * 3, "documents", 500)
    assert [len(batch) for batch in batches] == [1, 1, 1], "nothing cuts these"


def test_a_text_that_is_read_whole_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = text_tokenizer(qwen)
    batches = tokenized(monkeypatch, tokenizer)
    tokenizer.encode(["word " * 20_000], "documents")
    assert len(batches) == 7
    assert all(num_characters([batch]) <= PIECE + 5 for batch in batches)


def test_tokens_that_are_cut_off_are_not_held() -> None:
    (tokens,) = text_tokenizer(bert).encode(["word " * 3000], "documents", 10)
    assert tokens.base is None


TEMPLATE = ScoreTemplate(("query: {{ query }} passage: {{ document }}",))
ENDLESS = "x" * (LONGEST_PIECE + 1)


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [
        ("bert", ENDLESS, "put spaces or line breaks into it"),
        ("llama_2", "a " * LONGEST_PIECE, "split the text"),
    ],
)
def test_text_without_breaks_is_refused_by_its_field(name: str, text: str, remedy: str) -> None:
    tokenizer, names = text_tokenizer(KINDS[name]), ["documents[7]", "documents[9]"]
    for called, read in (
        ("documents", lambda: tokenizer.encode(["a", text], "documents")),
        ("documents[9]", lambda: tokenizer.encode(["a", text], "documents", names=names)),
        ("documents", lambda: tokenizer.encode_around(text, range(1, 2), "documents")),
        ("documents[9]", lambda: tokenizer.encode_around(text, range(1, 2), "documents", name=names[1])),
        ("documents", lambda: list(tokenizer.read(text, "documents"))),
    ):
        with refused(
            "documents", rf"^{re.escape(called)} holds more than {LONGEST_PIECE} characters of .*{remedy}$"
        ):
            read()


@pytest.mark.parametrize(
    "described",
    [
        model(),
        model(score_task="classify", pairs=PairRules()),
        model(score_task="classify", pairs=PairRules(template=TEMPLATE)),
    ],
    ids=["apart", "the tokeniser's pairs", "a template's pairs"],
)
@pytest.mark.parametrize("truncation", [Truncation(), Truncation(max_document_tokens=3)])
def test_the_text_that_cannot_be_cut_is_named(described: LoadedModel, truncation: Truncation) -> None:
    request = ScoreRequest(queries=("w1", ENDLESS), documents=("w1", "w2"), truncation=truncation)
    with refused("queries", r"^queries\[1\] holds more than"):
        preprocessor(described).score(request, request_ids())
    request = ScoreRequest(queries=("w1",), documents=("w1", "w1 w2", ENDLESS), truncation=truncation)
    with refused("documents", r"^documents\[2\] holds more than"):
        preprocessor(described).score(request, request_ids())
    embedded = EmbedRequest(task="token_embed", texts=((8, 9), "w1", ENDLESS))
    with pytest.raises(InvalidRequestError, match=r"^input\[2\] holds more than"):
        preprocessor(described).embed(embedded, request_ids())


def test_text_without_breaks_may_be_cut_off() -> None:
    (tokens,) = text_tokenizer(bert).encode(["word " * 1000 + ENDLESS], "documents", 500)
    assert tokens.tolist() == whole("bert", "word " * 500).tolist()


Spans = tuple[list[int], list[int], list[int]]


def around(name: str, text: str, span: range, most: int | None = None, side: Side = "right") -> Spans:
    found = text_tokenizer(KINDS[name]).encode_around(text, span, "documents", most, side)
    return found.before.tolist(), found.inside.tolist(), found.after.tolist()


def test_a_span_has_the_tokens_that_hold_its_characters() -> None:
    text = "paris rome berlin"
    paris, rome, berlin = whole("bert", text).tolist()
    assert around("bert", text, range(6, 10)) == ([paris], [rome], [berlin])
    assert around("bert", text, range(7, 8)) == ([paris], [rome], [berlin])
    assert around("bert", text, range(4, 12)) == ([], [paris, rome, berlin], [])
    assert around("bert", text, range(5, 6)) == ([paris], [], [rome, berlin]), "a space is in no token"
    assert around("bert", text, range(5, 10)) == ([paris], [rome], [berlin])
    assert around("bert", "", range(0, 0)) == ([], [], [])
    with pytest.raises(InvalidRequestError, match=r"^documents holds a text that is not valid Unicode"):
        around("bert", "\ud800", range(1))


@pytest.mark.parametrize("name", ["bert", "qwen", "llama_2"])
@settings(max_examples=5)
@given(SENTENCES, st.tuples(LENGTHS, LENGTHS, LENGTHS), st.none() | st.integers(0, 3000), SIDES)
def test_a_span_of_a_long_text_has_the_tokens_of_the_whole(
    name: str, sentence: str, bounds: tuple[int, int, int], most: int | None, side: Side
) -> None:
    start, stop, length = sorted(bounds)
    text = repeated(sentence, length)
    encoding = library(name).encode(text, add_special_tokens=False)
    held = [i for i, (a, b) in enumerate(encoding.offsets) if b > start and a < stop]
    before, inside, after = around(name, text, range(start, stop), most, side)
    if held:
        expected = encoding.ids[held[0] : held[-1] + 1]
        limit = len(expected) if most is None else most
        assert (before, after) == (encoding.ids[: held[0]], encoding.ids[held[-1] + 1 :])
        assert inside == cut(np.array(expected), limit, side).tolist()
    else:
        assert inside == []
        assert before + after == encoding.ids


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_is_cut_off_within_a_span_is_not_read(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = text_tokenizer(qwen)
    batches = tokenized(monkeypatch, tokenizer)
    text = "start " + "word " * 100_000 + "stop"
    found = tokenizer.encode_around(text, range(6, len(text) - 4), "documents", 500, side)
    assert len(found.inside) == 500
    assert num_characters(batches) < 4 * PIECE


@pytest.mark.parametrize(
    "read",
    [
        lambda tokenizer, text: tokenizer.encode([text], "documents", 10**9, "left"),
        lambda tokenizer, text: tokenizer.encode_around(text, range(5, len(text) - 5), "documents"),
        lambda tokenizer, text: list(tokenizer.read(text, "text")),
    ],
    ids=["encode from the end", "encode_around", "read"],
)
def test_a_caller_that_goes_away_ends_the_reading(
    read: Callable[[TextTokenizer, str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, pool = text_tokenizer(bert), WorkerPool(1, lambda: None)
    begun, go_on = threading.Event(), threading.Event()
    batches = tokenized(monkeypatch, tokenizer)
    encode = tokenizer._encode_batch

    def blocked(*given: Any, **named: Any) -> Any:
        begun.set()
        assert go_on.wait(20)
        return encode(*given, **named)

    monkeypatch.setattr(tokenizer, "_encode_batch", blocked)
    work = pool.submit(lambda: read(tokenizer, "word " * 100_000), 500_000)
    assert begun.wait(20)
    work.withdraw()
    go_on.set()
    with pytest.raises(WithdrawnError):
        work.future.result(20)
    assert len(batches) == 1
    pool.close()


CutUp = Callable[[str, int, Breaks | None], Iterator[tuple[int, int]]]
BOTH = pytest.mark.parametrize("cut_into", [cut_up, cut_up_backwards])
BREAKS = Breaks(re.compile("a(?=,b)"))
# Words of any length, with breaks or none.
CUT_TEXTS = st.lists(st.sampled_from(["a,b", "x", "a", ",", "x" * 40, "x" * 700]), max_size=80).map("".join)


@BOTH
@settings(max_examples=40)
@given(text=CUT_TEXTS, size=st.integers(1, 300))
def test_pieces_make_up_the_text_and_end_at_places(cut_into: CutUp, text: str, size: int) -> None:
    found = list(cut_into(text, size, BREAKS))
    in_order = found if cut_into is cut_up else found[::-1]
    assert in_order[0][0] == 0
    assert in_order[-1][1] == len(text)
    for (_, stop), (start, _) in pairwise(in_order):
        assert stop == start
        assert stop in BREAKS.all(text)


@settings(max_examples=40)
@given(text=CUT_TEXTS, size=st.integers(1, 300))
def test_a_piece_ends_at_the_first_place_once_it_is_long(text: str, size: int) -> None:
    breaks = BREAKS.all(text)
    for start, stop in list(cut_up(text, size, BREAKS))[:-1]:
        assert stop == min(found for found in breaks if found >= start + size)


@settings(max_examples=40)
@given(text=CUT_TEXTS, size=st.integers(1, 300))
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


@pytest.mark.parametrize("name", CUT_KINDS)
def test_places_are_proven_for_all_kinds_that_have_any(name: str, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer, breaks = cut_kind(name)
    assert proven_breaks(tokenizer) == breaks
    assert not caplog.records


def test_a_tokenizer_whose_pieces_differ_is_read_whole(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the lists of what is known were wrong: half a word has other tokens than the word."""
    monkeypatch.setattr(pieces, "find_breaks", lambda _: Breaks(re.compile("w(?=n)")))
    assert proven_breaks(bert()) is None
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
        assert proven_breaks(llama_2()) is None
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert str(LONGEST_PIECE) in caplog.text
