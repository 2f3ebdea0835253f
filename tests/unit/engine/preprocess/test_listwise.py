"""Listwise prompts: which documents share one, what it says, and which of its tokens count."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine.checkpoint import ListwiseRules
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.preprocess import Prepared
from maxsimd.engine.preprocess.combine import BlockCosines
from maxsimd.engine.preprocess.listwise import in_blocks, listwise_prompt
from maxsimd.engine.requests import CUT_LONG, REFUSE_LONG, Truncation
from maxsimd.scheduler import ResultSlot
from tests.unit.engine.preprocess.preprocessing import (
    DOCUMENT,
    DOCUMENT_MARKER,
    FIRST_WORD,
    QUERY_MARKER,
    document,
    ids,
    model,
    preprocessor,
    refused,
    request_ids,
    score_request,
    tokenizer,
    words,
)


def rules(**changes: int) -> ListwiseRules:
    settings = {"context": 1000, "max_query_tokens": 6, "max_document_tokens": 10, "block_documents": 3}
    return ListwiseRules("[QUERY]", "[DOCUMENT]", **settings | changes)


RULES = rules()


def score(
    queries: list[str],
    documents: list[str],
    truncation: Truncation = REFUSE_LONG,
    *,
    ranked_by: ListwiseRules = RULES,
    instruction: str | None = None,
    default: str | None = None,
    max_tokens: int = 5000,
) -> Prepared:
    described = model(score_task="rank", listwise=ranked_by, instruction=default, max_tokens=max_tokens)
    request = score_request(queries, documents, truncation, instruction=instruction)
    return preprocessor(described).score(request, request_ids())


def texts_of(prepared: Prepared) -> list[list[list[int]]]:
    """For each sequence its texts' words: those before each marker, the query last."""
    found = []
    for sequence in prepared.sequences:
        texts: list[list[int]] = []
        text: list[int] = []
        for token in sequence.tokens.ids.tolist():
            if token in (DOCUMENT_MARKER, QUERY_MARKER):
                texts.append(text)
            text = [*text, token] if token >= FIRST_WORD else []
        found.append(texts)
    return found


def prompt_length(query: str, documents: list[str], ranked_by: ListwiseRules = RULES) -> int:
    return len(tokenizer().encode([listwise_prompt(query, documents, None, ranked_by)], "text")[0])


def test_documents_share_prompts_with_the_query_block_by_block() -> None:
    documents = [words(i + 1, DOCUMENT) for i in range(7)]
    prepared = score(["w1"], documents)
    query = ids(1, 1)
    assert texts_of(prepared) == [
        [ids(1, DOCUMENT), ids(2, DOCUMENT), ids(3, DOCUMENT), query],
        [ids(4, DOCUMENT), ids(5, DOCUMENT), ids(6, DOCUMENT), query],
        [ids(7, DOCUMENT), query],
    ]
    assert [sequence.sequence_id for sequence in prepared.sequences] == [100, 101, 102]
    assert [sequence.payload.slot for sequence in prepared.sequences] == [ResultSlot(7, i) for i in range(3)]
    assert {sequence.payload.task for sequence in prepared.sequences} == {"rank"}
    assert prepared.results == 3
    assert prepared.combine == BlockCosines((3,))


def test_the_markers_are_what_is_pooled() -> None:
    tokens = score(["w1"], ["w2", "w3"]).sequences[0].tokens
    assert tokens.pooled_positions is not None
    pooled = tokens.ids[tokens.pooled_positions].tolist()
    assert pooled == [DOCUMENT_MARKER, DOCUMENT_MARKER, QUERY_MARKER]
    assert tokens.type_ids is not None
    assert tokens.type_ids.tolist() == [0] * len(tokens)
    # N queries are ranked each with its own document.
    prepared = score(["w1", "w2", "w3"], ["w4", "w5", "w6"])
    assert texts_of(prepared) == [[ids(1, 4 + i), ids(1, 1 + i)] for i in range(3)]
    assert prepared.combine == BlockCosines((1, 1, 1))


def test_the_prompt_names_the_query_twice_and_any_instruction() -> None:
    def after_the_introduction(prompt: str) -> str:
        return prompt.partition("relevance to query: ")[2]

    assert "provide you with 2 passages" in listwise_prompt("the query", ["one", "two"], None, RULES)
    passages = (
        '<passage id="0">\none[DOCUMENT]\n</passage>\n<passage id="1">\ntwo[DOCUMENT]\n</passage>\n'
        "<query>\nthe query[QUERY]\n</query><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    for instruction in (None, ""):
        prompt = listwise_prompt("the query", ["one", "two"], instruction, RULES)
        assert after_the_introduction(prompt) == f"the query\n{passages}"
    instructed = listwise_prompt("the query", ["one", "two"], "the task", RULES)
    task = "<instruct>\nthe task\n</instruct>\n"
    assert after_the_introduction(instructed) == f"the query\n{task}{passages}"


def test_the_requests_instruction_goes_before_the_checkpoints() -> None:
    def instructed(**options: str) -> list[list[int]]:
        tokens = score(["w1"], ["w2"], **options).sequences[0].tokens.ids.tolist()  # type: ignore[arg-type]
        return [ids(1, word) for word in (10, 11) if FIRST_WORD + word in tokens]

    assert instructed() == []
    assert instructed(instruction="w10", default="w11") == [ids(1, 10)]
    assert instructed(default="w11") == [ids(1, 11)]


def test_markers_in_a_text_are_taken_out() -> None:
    prepared = score(["w1 [QUERY] w2"], ["[DOCUMENT] w3 [QUERY]"])
    assert texts_of(prepared) == [[ids(1, 3), ids(2, 1)]]
    # All else stays as it is: here the words around the marker become one that the tokenizer does not know.
    assert texts_of(score(["w1[QUERY]w2"], ["w3[QUERY]w4"])) == [[[], []]]


def test_texts_are_read_to_the_models_lengths() -> None:
    for truncation in (Truncation(), CUT_LONG):
        prepared = score([words(7)], [document(11), document(10)], truncation)
        assert texts_of(prepared) == [[ids(10, DOCUMENT), ids(10, DOCUMENT), ids(6)]]
        assert prepared.truncated == 0


def test_the_request_s_own_limits_cut_and_count() -> None:
    limits = Truncation(max_query_tokens=2, max_document_tokens=3, side="left")
    prepared = score([words(3)], [document(4), document(3), document(5)], limits)
    expected = [ids(3, DOCUMENT + 1), ids(3, DOCUMENT), ids(3, DOCUMENT + 2), ids(2, 1)]
    assert texts_of(prepared) == [expected]
    assert prepared.truncated == 3, "the query, and two documents"
    pairs = score([words(3)] * 2, [document(3), document(4)], limits)
    assert pairs.truncated == 3, "both queries, and a document"


def test_a_document_asked_for_in_windows_is_cut_and_counted() -> None:
    windows = Truncation(max_tokens=-1, windows=True)
    prepared = score(["w1"], [document(11), document(10)], windows)
    assert texts_of(prepared) == [[ids(10, DOCUMENT), ids(10, DOCUMENT), ids(1, 1)]]
    assert prepared.truncated == 1
    for queries in (["w1"], ["w1", "w1"]):
        with pytest.raises(InvalidRequestError, match=r"^documents\[1\] has 11 tokens, but at most 10"):
            score(queries, ["w2", words(11)], Truncation(windows=True))


def test_a_prompt_that_does_not_fit_the_context_is_halved() -> None:
    documents = [words(2, DOCUMENT + 2 * i) for i in range(5)]
    room = prompt_length("w1", documents)
    whole = rules(context=room, block_documents=5, max_document_tokens=2)
    assert len(score(["w1"], documents, ranked_by=whole).sequences) == 1
    less = rules(context=room - 1, block_documents=5, max_document_tokens=2)
    halved = score(["w1"], documents, ranked_by=less)
    read = [ids(2, DOCUMENT + 2 * i) for i in range(5)]
    assert texts_of(halved) == [[*read[:2], ids(1, 1)], [*read[2:], ids(1, 1)]]
    assert halved.combine == BlockCosines((2,))


def test_the_request_s_and_the_model_s_limits_bound_the_context() -> None:
    documents = ["w2", "w3"]
    room = prompt_length("w1", documents)
    assert len(score(["w1"], documents, Truncation(max_tokens=room)).sequences) == 1
    assert len(score(["w1"], documents, Truncation(max_tokens=room - 1)).sequences) == 2
    assert len(score(["w1"], documents, max_tokens=room - 1).sequences) == 2


def test_a_document_that_does_not_fit_alone_is_refused() -> None:
    room = prompt_length("w1", ["w2"])
    assert len(score(["w1"], ["w2"], max_tokens=room).sequences) == 1
    with refused("documents", f"^a pass over one document has {room} tokens, but at most {room - 1} can be"):
        score(["w1"], ["w2"], max_tokens=room - 1)


def test_a_block_is_closed_when_a_longest_document_may_not_fit() -> None:
    made = rules(context=100, max_document_tokens=20, block_documents=4)
    assert in_blocks([1] * 9, 5, made) == [4, 4, 1]
    assert in_blocks([1] * 4, 5, made) == [4]
    # Of 100 tokens 10 are the query's, twice: 70 leave exactly a longest document, which is not enough.
    assert in_blocks([35, 35, 1], 5, made) == [2, 1]
    assert in_blocks([35, 34, 1], 5, made) == [3]
    assert in_blocks([70, 69, 1, 1], 5, made) == [1, 2, 1]
    assert in_blocks([], 5, made) == []


@settings(max_examples=40)
@given(st.lists(st.integers(0, 20), max_size=40), st.integers(0, 20))
def test_blocks_never_hold_more_than_the_context(lengths: list[int], query: int) -> None:
    made = rules(context=100, max_document_tokens=20, block_documents=4)
    sizes = in_blocks(lengths, query, made)
    assert sum(sizes) == len(lengths)
    start = 0
    for size in sizes:
        assert 1 <= size <= 4
        assert sum(lengths[start : start + size]) + 2 * query <= 100
        start += size
