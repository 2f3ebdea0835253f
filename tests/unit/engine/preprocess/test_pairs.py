"""Pairs that the tokeniser joins: what is read of both texts, how they are cut, and their windows."""

import numpy as np
import pytest

from maxsimd.engine.checkpoint import PairRules
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.preprocess import Prepared, RequestIds, usage_of
from maxsimd.engine.requests import CUT_LONG, REFUSE_LONG, ScoreRequest, Truncation
from maxsimd.scheduler import ResultSlot, Role
from tests.unit.engine.preprocess.preprocessing import (
    CLS,
    SEP,
    ids,
    model,
    preprocessor,
    refused,
    request_ids,
    words,
)

LONGEST_FIRST = PairRules(truncation="longest_first")
ONLY_SECOND = PairRules(truncation="only_second")
DOCUMENT = 500  # the first word of documents


def score(
    queries: list[str],
    documents: list[str],
    truncation: Truncation = REFUSE_LONG,
    *,
    pairs: PairRules = LONGEST_FIRST,
    max_tokens: int = 64,
    overlap: int = 0,
    special_tokens: bool = True,
) -> Prepared:
    described = model(score_task="classify", pairs=pairs, max_tokens=max_tokens)
    made = preprocessor(described, overlap=overlap, special_tokens=special_tokens)
    request = ScoreRequest(queries=tuple(queries), documents=tuple(documents), truncation=truncation)
    return made.score(request, request_ids())


def document(length: int) -> str:
    return words(length, DOCUMENT)


def pair(query: list[int], read: list[int]) -> list[int]:
    return [CLS, *query, SEP, *read, SEP]


def tokens_of(prepared: Prepared) -> list[list[int]]:
    return [sequence.tokens.ids.tolist() for sequence in prepared.sequences]


def test_one_query_joins_every_document_and_n_each_its_own() -> None:
    one = score(["w1"], [document(2), document(3)])
    assert tokens_of(one) == [pair(ids(1, 1), ids(2, DOCUMENT)), pair(ids(1, 1), ids(3, DOCUMENT))]
    two = score(["w1", "w2"], [document(2), document(3)])
    assert tokens_of(two) == [pair(ids(1, 1), ids(2, DOCUMENT)), pair(ids(1, 2), ids(3, DOCUMENT))]
    types = two.sequences[0].tokens.type_ids
    assert types is not None
    assert types.tolist() == [0, 0, 0, 1, 1, 1]


def test_pairs_fill_the_slots_of_the_request_in_order() -> None:
    prepared = score(["w1"], [document(2), document(3), document(2)])
    assert [sequence.sequence_id for sequence in prepared.sequences] == [100, 101, 102]
    assert [sequence.payload.slot for sequence in prepared.sequences] == [ResultSlot(7, i) for i in range(3)]
    assert {sequence.payload.role for sequence in prepared.sequences} == {Role.PAIR}
    assert prepared.results == 3
    usage = usage_of(prepared)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.cached_documents) == (6 + 7 + 6, 0, 0)
    assert prepared.combine([1.0, 3.0, 2.0]).tolist() == [1, 3, 2]


def test_a_pair_that_does_not_fit_is_refused_or_cut() -> None:
    assert tokens_of(score([words(4)], [document(5)], max_tokens=12)) == [pair(ids(4), ids(5, DOCUMENT))]
    assert score([words(4)], [document(5)], CUT_LONG, max_tokens=12).truncated == 0
    with refused("documents", r"^documents\[1\] has 13 tokens, but at most 12 can be run"):
        score([words(4)], [document(5), document(6)], max_tokens=12)
    cut = score([words(4)], [document(5), document(6), document(7)], CUT_LONG, max_tokens=12)
    assert tokens_of(cut)[1] == pair(ids(4), ids(5, DOCUMENT))
    assert cut.truncated == 2


def test_the_longer_text_is_cut_first_at_the_named_side() -> None:
    query, read = [words(20)], [document(3)]
    assert tokens_of(score(query, read, CUT_LONG, max_tokens=12)) == [pair(ids(6), ids(3, DOCUMENT))]
    left = Truncation(max_tokens=-1, side="left")
    assert tokens_of(score(query, read, left, max_tokens=12)) == [pair(ids(6, 14), ids(3, DOCUMENT))]
    both = score([words(20)], [document(30)], left, max_tokens=12)
    assert tokens_of(both) == [pair(ids(4, 16), ids(5, DOCUMENT + 25))]


def test_a_model_that_cuts_only_documents_reads_the_whole_query() -> None:
    cut = score([words(7)], [document(20)], CUT_LONG, pairs=ONLY_SECOND, max_tokens=12)
    assert tokens_of(cut) == [pair(ids(7), ids(2, DOCUMENT))]
    # Exactly full: nothing of the document is left.
    assert tokens_of(score([words(9)], [document(2)], CUT_LONG, pairs=ONLY_SECOND, max_tokens=12)) == [
        pair(ids(9), [])
    ]
    with refused("queries", r"^the query has 10 tokens and leaves no room for documents\[1\]"):
        score(["w1", words(10)], ["w2", document(2)], CUT_LONG, pairs=ONLY_SECOND, max_tokens=12)


def test_the_requests_limits_cut_both_texts_and_are_counted() -> None:
    limits = Truncation(max_query_tokens=2, max_document_tokens=4)
    prepared = score([words(3)], [document(4), document(5), document(6)], limits)
    assert tokens_of(prepared) == [pair(ids(2), ids(4, DOCUMENT))] * 3
    assert prepared.truncated == 3, "the query once, and two documents"
    left = Truncation(max_query_tokens=2, max_document_tokens=4, side="left")
    assert tokens_of(score([words(3)], [document(6)], left)) == [pair(ids(2, 1), ids(4, DOCUMENT + 2))]
    assert score([words(2)], [document(4)], limits).truncated == 0
    # Each query that is cut counts.
    assert score([words(3)] * 3, [document(5)] * 3, limits).truncated == 6
    # A limited document that is cut again counts once.
    twice = Truncation(max_tokens=10, max_document_tokens=9)
    assert score([words(3)], [document(20)], twice).truncated == 1


def test_windows_stand_behind_the_query_and_cover_the_document() -> None:
    truncation = Truncation(max_tokens=12, windows=True)
    for length, bodies in (
        (15, [(0, 7), (5, 12), (10, 15)]),
        (17, [(0, 7), (5, 12), (10, 17)]),
        (8, [(0, 7), (5, 8)]),
        (7, [(0, 7)]),
        (0, [(0, 0)]),
    ):
        prepared = score([words(2)], [document(length)], truncation, overlap=2)
        expected = [pair(ids(2), ids(stop - start, DOCUMENT + start)) for start, stop in bodies]
        assert tokens_of(prepared) == expected
        assert prepared.truncated == 0
    # An overlap of at most half of the room.
    halved = score([words(5)], [document(6)], truncation, overlap=9)
    assert tokens_of(halved) == [pair(ids(5), ids(4, DOCUMENT + start)) for start in (0, 2)]


def test_too_many_windows_are_refused_before_any_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document has ten windows of two tokens, beside the query and three special tokens."""
    truncation = Truncation(max_tokens=6, windows=True)
    counted: list[int] = []
    monkeypatch.setattr(RequestIds, "check_tokens", lambda ids, tokens: counted.append(tokens))
    assert len(score(["w1"], [document(20)], truncation).sequences) == 10
    assert counted == [9 * 6, 10 * 6], "all but the last before they are made, and what was made"


def test_the_best_of_each_document_s_windows_is_its_score() -> None:
    truncation = Truncation(max_tokens=8, windows=True)
    prepared = score(["w1"], [document(9), document(2), document(5)], truncation)
    assert [len(sequence) for sequence in prepared.sequences] == [8, 8, 5, 6, 8, 5]
    assert prepared.results == 6
    np.testing.assert_array_equal(prepared.combine([1, 9, 2, -5, 3, 4]), [9, -5, 4])
    assert usage_of(prepared).prompt_tokens == 40


def test_windows_that_leave_no_room_beside_the_query_are_refused() -> None:
    windows = Truncation(max_tokens=16, windows=True)
    with pytest.raises(InvalidRequestError, match=r"documents\[0\] .* windows of 1 tokens beside 15 others"):
        score([words(12)], [document(9)], windows)
    assert score([words(11)], [document(9)], windows).results == 5


def test_a_pair_without_tokens_is_refused_by_its_index() -> None:
    with refused("documents", r"^documents\[1\] and its query have no tokens; leave them out$"):
        score(["", ""], ["w1", ""], special_tokens=False)
    assert tokens_of(score([""], [""])) == [[CLS, SEP, SEP]]


def test_an_instruction_is_refused_where_it_has_no_place() -> None:
    made = preprocessor(model(score_task="classify"))
    for instruction in ("w1", ""):
        with refused("instruction", r"^this model takes no instruction; leave"):
            made.score(ScoreRequest(queries=("a",), documents=("b",), instruction=instruction), request_ids())


def test_a_limit_beyond_what_the_model_takes_is_refused() -> None:
    assert score(["a"], ["b"], Truncation(max_tokens=64)).results == 1
    with pytest.raises(InvalidRequestError, match="is 65, more than the 64"):
        score(["a"], ["b"], Truncation(max_tokens=65))
