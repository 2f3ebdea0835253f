"""Long texts are tokenized in pieces, which are cut only where that is proven, between other work."""

import functools
import logging
import re
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from maxsimd.engine.checkpoint import LoadedModel, PairRules
from maxsimd.engine.checkpoint.templates import ScoreTemplate
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.processors.text import breaks, tokenization
from maxsimd.engine.processors.text.breaks import LONGEST_PIECE, Breaks, proven_breaks, remembered_breaks
from maxsimd.engine.processors.text.builder import InputName, LongInputs, Room
from maxsimd.engine.processors.text.tokenization import PIECE, Side, truncate
from maxsimd.engine.requests import EmbedRequest, ScoreRequest, Truncation
from maxsimd.engine.workers import WithdrawnError, WorkerPool
from tests.checkpoints.tokenizer_kinds import CUT, bert, llama_2
from tests.unit.engine.processors.small_models import model, processors, refused, request_ids
from tests.unit.engine.processors.split_texts import KINDS as CUT_KINDS
from tests.unit.engine.processors.split_texts import num_characters, text_tokenizer, tokenized
from tests.waiting import Pause

KINDS = CUT | {"llama_2": llama_2}
SIDES = st.sampled_from(["left", "right"])
PLAIN = ("the", "Paris", "is", "1815", "3.14", "a,b", "don't", "x\ny", "\n\n", "  ", "<mask>", "[SEP]")
WORDS = st.sampled_from([*PLAIN, "\u6f22\u5b57\u3002", "caf\u00e9", "e\u0301", "\U0001f600"])
SENTENCES = st.lists(WORDS, min_size=1, max_size=12).map(" ".join)
# Up to three pieces or so.
LENGTHS = st.integers(PIECE // 2, 3 * PIECE)
SPANS = st.integers(0, 2 * PIECE)


def repeated(sentence: str, length: int) -> str:
    return (f"{sentence} " * (length // len(sentence) + 1))[:length]


@functools.cache
def library(name: str) -> Tokenizer:
    return KINDS[name]()


def whole(name: str, text: str) -> np.ndarray:
    return np.array(library(name).encode(text, add_special_tokens=False).ids, dtype=np.int32)


@pytest.mark.parametrize("name", [*CUT_KINDS, "llama_2"])
@settings(max_examples=2)
@given(sentence=SENTENCES, length=LENGTHS, most=st.none() | st.integers(0, 3000), side=SIDES)
def test_long_texts_keep_tokens(name: str, sentence: str, length: int, most: int | None, side: Side) -> None:
    if name in CUT:
        assert text_tokenizer(KINDS[name]).breaks("a b") == [1], "places are proven"
    text = repeated(sentence, length)
    reader = text_tokenizer(KINDS[name])
    read = [token for _, encoding in reader.read(text, "text") for token in encoding.ids]
    assert read == whole(name, text).tolist()
    texts = [sentence, text]
    for tokens, each in zip(reader.encode(texts, "documents", most, side), texts, strict=True):
        expected = whole(name, each)
        assert tokens.tolist() == truncate(expected, len(expected) if most is None else most, side).tolist()
        assert tokens.dtype == np.int32


@pytest.mark.parametrize("side", ["left", "right"])
def test_no_more_is_read_of_a_text_than_is_left_of_it(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = text_tokenizer(bert)
    batches = tokenized(monkeypatch, tokenizer)
    (tokens,) = tokenizer.encode(["word " * 100_000], "documents", 500, side)
    assert (len(tokens), tokens.base) == (500, None), "what is cut off is not held"
    assert num_characters(batches) < 10_000
    batches.clear()
    (tokens,) = tokenizer.encode(["extraordinarilylongish " * 100_000], "documents", 500, side)
    assert len(tokens) == 500
    assert num_characters(batches) < 30_000, "more where the first piece has too few"
    batches.clear()
    text = "start " + "word " * 100_000 + "stop"
    assert len(tokenizer.encode_around(text, range(6, len(text) - 4), "documents", 500, side).inside) == 500
    assert num_characters(batches) < 4 * PIECE
    batches.clear()
    tokenizer.encode(["word " * 20_000], "documents")
    assert all(num_characters([batch]) <= PIECE + 5 for batch in batches), "also where it is read whole"


TEMPLATE = ScoreTemplate(("query: {{ query }} passage: {{ document }}",))
ENDLESS = "x" * (LONGEST_PIECE + 1)


def test_text_without_breaks_is_refused_or_cut_off() -> None:
    for kind, text, remedy in (
        (bert, ENDLESS, "put spaces or line breaks into it"),
        (llama_2, "a " * LONGEST_PIECE, "split the text"),
    ):
        tokenizer = text_tokenizer(kind)
        with refused("documents", rf"^documents holds more than {LONGEST_PIECE} characters of .*{remedy}$"):
            tokenizer.encode(["a", text], "documents")
        with refused("text", rf"^text holds more than .*{remedy}$"):
            list(tokenizer.read(text, "text"))
        bounds = tokenizer._piece_bounds(ENDLESS[1:], PIECE, "left", "text", "text")
        assert list(bounds) == [(0, LONGEST_PIECE)]
    expected = whole("bert", "word " * 500).tolist()
    for text, side in ((f"{'word ' * 1000}{ENDLESS}", "right"), (f"{ENDLESS}{' word' * 1000}", "left")):
        (tokens,) = text_tokenizer(bert).encode([text], "documents", 500, side)  # type: ignore[arg-type]
        assert tokens.tolist() == expected


def test_a_text_without_breaks_lets_other_work_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, text, yields = text_tokenizer(KINDS["qwen"]), "x7" * 50_000, count()
    monkeypatch.setattr(tokenization, "yield_to_smaller", lambda: next(yields))
    ids, spans = tokenizer.encode_with_spans(text, "text")
    expected = library("qwen").encode(text, add_special_tokens=False)
    assert (ids.tolist(), [*map(tuple, spans.tolist())]) == (expected.ids, expected.offsets)
    assert next(yields) > 2 * (len(ids) // PIECE)
    searched = Mock(wraps=re.compile("x(?= )").search)
    for length in (10, 100_000, 500_000):
        assert Breaks(Mock(search=searched)).first("x" * length + " x", 3, length + 1) == length
    assert max(stop - start for _, start, stop in (call.args for call in searched.mock_calls)) < 70_000
    asked = ScoreRequest(queries=("a", "b"), documents=("c", "d"), instruction=text)
    assert asked.reading > 2 * len(text), "in a thread"


PAIRED = [model(score_task="classify", pairs=rules) for rules in (PairRules(), PairRules(template=TEMPLATE))]
KINDS_OF_SCORES = pytest.mark.parametrize("described", [model(), *PAIRED], ids=["apart", "pairs", "template"])


@KINDS_OF_SCORES
def test_texts_beyond_the_requests_limits_may_be_refused(described: LoadedModel) -> None:
    two_words = {"queries": ("w1 w2",), "documents": ("w1", "w1 w2")}
    for limit, where in (("max_query_tokens", "queries[0]"), ("max_document_tokens", "documents[1]")):
        cut_short = ScoreRequest(**two_words, truncation=Truncation(max_tokens=-1, **{limit: 1}))
        assert processors(described).scores.prepare(cut_short, request_ids()).truncated == 1
        truncation = Truncation(max_tokens=-1, **{limit: 1}, refuse=True)
        with refused(where[:-3], rf"^{re.escape(where)} has more than 1 tokens"):
            request = ScoreRequest(**two_words, truncation=truncation)
            processors(described).scores.prepare(request, request_ids())
        longer = Truncation(max_tokens=-1, **{limit: 2}, refuse=True)
        processors(described).scores.prepare(ScoreRequest(**two_words, truncation=longer), request_ids())
    assert LongInputs(truncation, 9, 0).signature != LongInputs(cut_short.truncation, 9, 0).signature


@KINDS_OF_SCORES
@pytest.mark.parametrize("truncation", [Truncation(), Truncation(max_document_tokens=3)])
def test_the_text_that_cannot_be_cut_is_named(described: LoadedModel, truncation: Truncation) -> None:
    request = ScoreRequest(queries=("w1", ENDLESS), documents=("w1", "w2"), truncation=truncation)
    with refused("queries", r"^queries\[1\] holds more than"):
        processors(described).scores.prepare(request, request_ids())
    request = ScoreRequest(queries=("w1",), documents=("w1", "w1 w2", ENDLESS), truncation=truncation)
    with refused("documents", r"^documents\[2\] holds more than"):
        processors(described).scores.prepare(request, request_ids())
    embedded = EmbedRequest(task="token_embed", texts=((8, 9), "w1", ENDLESS))
    with pytest.raises(InvalidRequestError, match=r"^input\[2\] holds more than"):
        processors(described).embedding.prepare(embedded, request_ids())


@pytest.mark.parametrize("name", ["bert", "qwen", "llama_2"])
@settings(max_examples=3)
@given(SENTENCES, st.tuples(SPANS, SPANS, LENGTHS), st.none() | st.integers(0, 3000), SIDES)
@example("the Paris is", (4, 9, 3000), None, "right")
@example("the Paris is", (3, 4, 3000), None, "right")
def test_a_span_of_a_text_has_the_tokens_that_hold_it(
    name: str, sentence: str, bounds: tuple[int, int, int], most: int | None, side: Side
) -> None:
    start, stop, length = sorted(bounds)
    text = repeated(sentence, length)
    found = text_tokenizer(KINDS[name]).encode_around(text, range(start, stop), "documents", most, side)
    before, inside, after = found.before.tolist(), found.inside.tolist(), found.after.tolist()
    encoding = library(name).encode(text, add_special_tokens=False)
    held = [i for i, (a, b) in enumerate(encoding.offsets) if b > start and a < stop]
    if held:
        expected = encoding.ids[held[0] : held[-1] + 1]
        limit = len(expected) if most is None else most
        assert (before, after) == (encoding.ids[: held[0]], encoding.ids[held[-1] + 1 :])
        assert inside == truncate(np.array(expected), limit, side).tolist()
    else:
        assert inside == [], "a space is in no token"
        assert before + after == encoding.ids


@pytest.mark.parametrize(
    "read",
    [
        lambda tokenizer, text: tokenizer.encode([text], "documents", 10**9, "left"),
        lambda tokenizer, text: tokenizer.encode_around(text, range(5, len(text) - 5), "documents"),
        lambda tokenizer, text: list(tokenizer.read(text, "text")),
    ],
    ids=["encode from the end", "encode_around", "read"],
)
def test_a_caller_that_goes_away_ends_the_reading(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, pool, pause = text_tokenizer(bert), WorkerPool(1), Pause()
    batches = tokenized(monkeypatch, tokenizer)
    monkeypatch.setattr(tokenizer, "_encode_batch", pause.before(tokenizer._encode_batch))
    work = pool.submit(lambda: read(tokenizer, "word " * 100_000), 500_000)
    assert pause.is_there.wait(600)
    work.withdraw()
    pause.may_go_on.set()
    with pytest.raises(WithdrawnError):
        work.future.result(600)
    assert len(batches) == 1
    pool.close()


def test_odd_tokenizers_read_whole(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.INFO):
        assert proven_breaks(llama_2()) is None, "nothing is known of it"
        # As if the lists of what is known were wrong: half a word has other tokens than the word.
        monkeypatch.setattr(breaks, "find_breaks", lambda _: Breaks(re.compile("w(?=n)")))
        assert proven_breaks(bert()) is None
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert str(LONGEST_PIECE) in caplog.messages[0]
    assert "cannot split texts safely" in caplog.messages[1]


def test_breaks_of_an_earlier_start_are_proven_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokenizer = bert()
    found = remembered_breaks(tokenizer, "this one")
    monkeypatch.setattr(breaks, "find_breaks", lambda _: None)
    assert remembered_breaks(tokenizer, "another") is None, "which is found again"
    assert remembered_breaks(tokenizer, "this one") == found
    (kept,) = (tmp_path / "maxsimd" / "recipes").iterdir()
    for wrong in (b"w(?=n)", b"(", b"\xff"):
        kept.write_bytes(wrong)
        assert remembered_breaks(tokenizer, "this one") is None, wrong


def test_added_tokens_are_part_of_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens(["x y"])
    monkeypatch.setattr(breaks, "find_breaks", lambda _: Breaks(re.compile("x(?= y)")))
    assert proven_breaks(tokenizer) is None


TOKENS = st.integers(0, 60)


def _text(length: int) -> np.ndarray:
    return np.arange(length, dtype=np.int32)


@settings(max_examples=40)
@given(st.integers(0, 80), st.integers(1, 20), st.integers(0, 19), st.booleans())
def test_windows_cover_a_text_and_share_overlaps(length: int, room: int, overlap: int, asked: bool) -> None:
    truncation = Truncation(max_tokens=-1, windows=True, window_overlap=overlap if asked else None)
    inputs = LongInputs(truncation, 100, 5 if asked else overlap)
    text, name = _text(length), InputName("documents", 4)
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
    for before, after in pairwise(windows):
        assert before[room - overlap :] == after[:overlap]
        assert len(after) > overlap, "each window reads something new"
    assert windows[0] + [token for window in windows[1:] for token in window[overlap:]] == text.tolist()


@settings(max_examples=40)
@given(TOKENS, st.integers(1, 60), st.none() | TOKENS, st.none() | TOKENS, st.booleans(), SIDES)
def test_as_much_of_a_text_is_read_as_is_needed(
    length: int, room: int, own: int | None, most: int | None, may_cut: bool, side: Side
) -> None:
    truncation = Truncation(max_tokens=-1 if may_cut else None, side=side, max_document_tokens=most)
    inputs = LongInputs(truncation, 100, 0)
    name, of_room = InputName("documents", 0), Room(room, 2)

    def fitted(text: np.ndarray) -> tuple[list[int], bool] | str:
        try:
            found = inputs.truncate_to_room(text, of_room, name, own)
        except InvalidRequestError as error:
            return str(error)
        return found.tokens.tolist(), found.truncated

    read = inputs.most_of_text(room, own, "documents")
    text = _text(length)
    assert fitted(text if read is None else truncate(text, read, side)) == fitted(text)
    if may_cut:
        assert read is not None
        assert read <= room + 1
