"""Long queries, documents and instructions: pairs are what they would be if all texts were read whole, and a
query that thousands of documents share is neither tokenised nor held for each of them."""

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maxsimd.engine.checkpoint import ListwiseRules, LoadedModel, PairRules
from maxsimd.engine.checkpoint.score_template import ScoreTemplate
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.preprocess import Prepared, Preprocessor
from maxsimd.engine.preprocess.tokenization import TextTokenizer, cut, longest_first
from maxsimd.engine.requests import CUT_LONG, REFUSE_LONG, Truncation
from maxsimd.scheduler import JoinedTokens
from tests.checkpoints.tokenizer_kinds import qwen
from tests.unit.engine.preprocess.preprocessing import (
    CLS,
    DOCUMENT,
    SEP,
    ids,
    model,
    preprocessor,
    request_ids,
    score_request,
    tokens_of,
    words,
)
from tests.unit.engine.preprocess.preprocessing import tokenizer as small_tokenizer

INSTRUCTED = ScoreTemplate(
    (
        "<|im_start|>Judge: {{ instruction }}\n<Query>: {{ query }}\n"
        "<Document>: {{ document }}<|im_end|>\n<think>",
    ),
    instruction="is it relevant?",
)
MERGING = ScoreTemplate(("a{{ query }}b", "{{ query }}{{ document }}{{ query }}", "{{ query }}"))


@functools.cache
def tokenizer() -> TextTokenizer:
    return TextTokenizer(SimpleNamespace(backend_tokenizer=qwen()))


def score(
    described: LoadedModel, queries: list[str], documents: list[str], truncation: Truncation = REFUSE_LONG
) -> Prepared:
    made = Preprocessor(described, tokenizer(), 100_000, 0, None, False)
    return made.score(score_request(queries, documents, truncation), request_ids())


def asked(template: ScoreTemplate, max_tokens: int = 100_000) -> LoadedModel:
    return model(score_task="classify", pairs=PairRules(template=template), max_tokens=max_tokens)


TEXTS = st.lists(st.sampled_from(["a", "b ", " c", ",", ".\n", "\n", "d,e", "\u6f22", "  ", "1"])).map(
    "".join
)


@pytest.mark.parametrize("template", [INSTRUCTED, MERGING], ids=["instructed", "merging"])
@settings(max_examples=40)
@given(query=TEXTS, documents=st.lists(TEXTS, min_size=1, max_size=3))
@example(query="a b, c d.\n", documents=["e f, g", ""])
def test_a_pair_has_the_tokens_of_its_segments_written_out(
    template: ScoreTemplate, query: str, documents: list[str]
) -> None:
    """Although what cannot merge with the document is tokenised apart."""
    segments = [
        [frame.before if frame.after is None else frame.before + document + frame.after for frame in frames]
        for frames in [template.frames(query, None)]
        for document in documents
    ]
    expected = [np.concatenate(tokenizer().encode(each, "x")).tolist() for each in segments]
    assert tokens_of(score(asked(template), [query], documents)) == expected


def recorded(monkeypatch: pytest.MonkeyPatch, made: TextTokenizer) -> list[str]:
    """What is tokenised from now on."""
    encoded: list[str] = []
    encode = made._encode_batch

    def record(texts: list[str], *given: Any, **named: Any) -> Any:
        encoded.extend(texts)
        return encode(texts, *given, **named)

    monkeypatch.setattr(made, "_encode_batch", record)
    return encoded


def test_a_long_query_is_tokenised_once_for_all_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = recorded(monkeypatch, tokenizer())
    query = "what is it? " * 500
    prepared = score(asked(INSTRUCTED), [query], [f"document {i}" for i in range(1000)])
    assert len(prepared.sequences) == 1000
    assert sum(map(len, encoded)) < 10 * len(query)


@pytest.mark.parametrize(
    ("described", "held"),
    [
        pytest.param(asked(INSTRUCTED), 1000, id="template"),
        pytest.param(model(score_task="classify", max_tokens=100_000), 1000, id="tokenizer"),
        pytest.param(model(score_task="classify", max_tokens=100), 80, id="cut for each"),
    ],
)
def test_pairs_hold_their_query_once(described: LoadedModel, held: int) -> None:
    prepared = score(described, ["what is it? " * 500], [f"document {i}" for i in range(5)], CUT_LONG)
    longest = []
    for sequence in prepared.sequences:
        assert isinstance(sequence.tokens, JoinedTokens)
        longest.append(max(sequence.tokens.parts, key=len))
    assert all(np.shares_memory(part, longest[0]) for part in longest)
    assert len(longest[0]) > held


LENGTHS = st.integers(0, 400)


@settings(max_examples=40)
@given(LENGTHS, LENGTHS, st.integers(4, 120), st.sampled_from(["left", "right"]), st.none() | LENGTHS)
@example(301, 300, 103, "right", None)
@example(300, 301, 103, "right", None)
def test_a_cut_pair_is_what_the_whole_texts_would_be_cut_to(
    query: int, document: int, limit: int, side: str, most: int | None
) -> None:
    """Also where both are far longer, and the odd token goes to the longer one."""
    truncation = Truncation(max_tokens=limit, side=side, max_document_tokens=most)  # type: ignore[arg-type]
    made = preprocessor(model(score_task="classify", max_tokens=limit))
    texts = score_request([words(query)], [words(document, DOCUMENT)], truncation)
    prepared = made.score(texts, request_ids())
    limited = document if most is None else min(document, most)
    first, second = longest_first(query, limited, limit - 3)
    wanted = cut(np.array(ids(document, DOCUMENT), np.int32), limited, side)  # type: ignore[arg-type]
    expected = [
        *(CLS, *cut(np.array(ids(query), np.int32), first, side), SEP),  # type: ignore[arg-type]
        *(*cut(wanted, second, side), SEP),  # type: ignore[arg-type]
    ]
    assert tokens_of(prepared) == [expected]
    assert prepared.truncated == (limited < document or query + limited > limit - 3)


def test_an_instruction_that_fills_a_sequence_is_refused() -> None:
    described = asked(INSTRUCTED, max_tokens=50)
    made = Preprocessor(described, tokenizer(), 100_000, 0, None, False)
    for length, refused in ((49, False), (50, True), (100_000, True)):
        request = score_request(["a"], ["b"], instruction="a" + " a" * (length - 1))
        with pytest.raises(InvalidRequestError) as error:
            made.score(request, request_ids())
        assert (error.value.param == "instruction") == refused
    assert str(error.value) == (
        "instruction has 50 tokens or more, and no more can be run in a sequence; shorten it"
    )


def test_what_a_listwise_model_does_not_read_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked_by = ListwiseRules("[QUERY]", "[DOCUMENT]", 1000, max_query_tokens=6, max_document_tokens=10)
    described = model(score_task="rank", listwise=ranked_by, max_tokens=10_000)
    small = small_tokenizer()
    encoded = recorded(monkeypatch, small)
    text = f"{words(100)} " * 500
    made = Preprocessor(described, small, 10_000, 0, None, False)
    # Its own length is no reason to refuse a text.
    for request in (score_request([text], [text, text], CUT_LONG), score_request(["a"], [text])):
        encoded.clear()
        made.score(request, request_ids())
        assert sum(map(len, encoded)) < 10_000
