"""Listwise prompts: which documents share one, what it says, and which of its tokens count."""

from typing import Any

import numpy as np
import pytest

from maxsimd.engine.checkpoint import ListwiseRules
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.processors.listwise import ListwisePlan, in_blocks, listwise_prompt, merge_blocks
from maxsimd.engine.requests import CUT_LONG, Truncation
from maxsimd.scheduler import ResultSlot
from tests.unit.engine.processors import small_models as small
from tests.unit.engine.processors.small_models import DOCUMENT, FIRST_WORD, document, ids, model, words


def rules(**changes: int) -> ListwiseRules:
    settings = {"context": 1000, "max_query_tokens": 6, "max_document_tokens": 10, "block_documents": 3}
    return ListwiseRules("[QUERY]", "[DOCUMENT]", **settings | changes)


RULES = rules()


def score(
    *texts: Any, ranked_by: ListwiseRules = RULES, default: Any = None, max_tokens: int = 5000, **options: Any
) -> ListwisePlan:
    described = model(score_task="rank", listwise=ranked_by, instruction=default, max_tokens=max_tokens)
    request = small.score_request(*texts, **options)
    plan = small.processors(described).scores.prepare(request, small.request_ids())
    assert isinstance(plan, ListwisePlan)
    return plan


def texts_of(plan: ListwisePlan) -> list[list[list[int]]]:
    """For each sequence its texts' words: those before each marker, the query last."""
    found = []
    for sequence in plan.sequences:
        texts, text = list[list[int]](), list[int]()
        for token in sequence.tokens.ids.tolist():
            if token in (small.DOCUMENT_MARKER, small.QUERY_MARKER):
                texts.append(text)
            text = [*text, token] if token >= FIRST_WORD else []
        found.append(texts)
    return found


def prompt_length(query: str, documents: list[str], ranked_by: ListwiseRules = RULES) -> int:
    return len(small.tokenizer().encode([listwise_prompt(query, documents, None, ranked_by)], "text")[0])


def test_documents_share_prompts_with_the_query_block_by_block() -> None:
    plan = score(["w1"], [words(i + 1, DOCUMENT) for i in range(7)])
    query = ids(1, 1)
    assert texts_of(plan) == [
        [ids(1, DOCUMENT), ids(2, DOCUMENT), ids(3, DOCUMENT), query],
        [ids(4, DOCUMENT), ids(5, DOCUMENT), ids(6, DOCUMENT), query],
        [ids(7, DOCUMENT), query],
    ]
    assert [sequence.payload.slot for sequence in plan.sequences] == [ResultSlot(7, i) for i in range(3)]
    assert (plan.num_values, plan.num_blocks) == (3, (3,))
    assert plan.input_of(1) == "documents", "a block has many"
    tokens = plan.sequences[2].tokens
    assert tokens.pooled_positions is not None
    assert tokens.ids[tokens.pooled_positions].tolist() == [small.DOCUMENT_MARKER, small.QUERY_MARKER]
    plan = score(["w1", "w2", "w3"], ["w4", "w5", "w6"])
    assert texts_of(plan) == [[ids(1, 4 + i), ids(1, 1 + i)] for i in range(3)]
    assert plan.num_blocks == (1, 1, 1)


def test_the_requests_instruction_goes_before_the_checkpoints() -> None:
    def instructed(**options: str) -> list[list[int]]:
        tokens = score(["w1"], ["w2"], **options).sequences[0].tokens.ids.tolist()  # type: ignore[arg-type]
        return [ids(1, word) for word in (10, 11) if FIRST_WORD + word in tokens]

    assert (instructed(), instructed(instruction="w10", default="w11")) == ([], [ids(1, 10)])
    assert instructed(default="w11") == [ids(1, 11)]


@pytest.mark.parametrize("odd", ["[QUERY]", "[DOC[DOCUMENT]UMENT]", "[QUE[DOCUMENT]RY]", "[DOC[QUERY]UMENT]"])
def test_no_text_and_no_instruction_brings_markers(odd: str) -> None:
    for marked in (f"w1 {odd * 2}", odd[:4] * 3 + odd * 3 + odd[4:] * 3):
        (sequence,) = score([f"w1 {marked}"], [f"w2 {marked}", "w3"], instruction=marked).sequences
        assert sequence.tokens.pooled_positions is not None
        assert len(sequence.tokens.pooled_positions) == 3


def test_texts_are_cut_to_the_models_lengths_and_the_requests() -> None:
    for truncation in (Truncation(), CUT_LONG):
        plan = score([words(7)], [document(11), document(10)], truncation)
        assert (texts_of(plan), plan.truncated) == ([[ids(10, DOCUMENT), ids(10, DOCUMENT), ids(6)]], 0)
    limits = Truncation(max_query_tokens=2, max_document_tokens=3, side="left")
    plan = score([words(3)], [document(4), document(3), document(5)], limits)
    assert texts_of(plan) == [[ids(3, DOCUMENT + 1), ids(3, DOCUMENT), ids(3, DOCUMENT + 2), ids(2, 1)]]
    assert (plan.truncated, plan.truncated_queries) == (3, 1), "the query, and two documents"
    pairs = score([words(3)] * 2, [document(3), document(4)], limits)
    assert (pairs.truncated, pairs.truncated_queries) == (3, 2), "both queries, and a document"
    plan = score(["w1"], [document(11), document(10)], Truncation(max_tokens=-1, windows=True))
    assert (texts_of(plan), plan.truncated) == ([[ids(10, DOCUMENT), ids(10, DOCUMENT), ids(1, 1)]], 1)
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
    assert (texts_of(halved), halved.num_blocks) == ([[*read[:2], ids(1, 1)], [*read[2:], ids(1, 1)]], (2,))
    documents = ["w2", "w3"]
    room = prompt_length("w1", documents)
    assert len(score(["w1"], documents, Truncation(max_tokens=room)).sequences) == 1
    assert len(score(["w1"], documents, Truncation(max_tokens=room - 1)).sequences) == 2
    assert len(score(["w1"], documents, max_tokens=room - 1).sequences) == 2
    alone = prompt_length("w1", ["w2"])
    with small.refused("documents", f"^a pass over one document has {alone} tokens, but at most {alone - 1}"):
        score(["w1"], ["w2"], max_tokens=alone - 1)


def test_a_block_is_closed_when_a_longest_document_may_not_fit() -> None:
    made = rules(context=100, max_document_tokens=20, block_documents=4)
    # The query takes 5 of 100 tokens, twice: 70 leave exactly a longest document, which is not enough.
    for lengths, sizes in (
        ([1] * 9, [4, 4, 1]), ([1] * 4, [4]), ([35, 35, 1], [2, 1]), ([35, 34, 1], [3]),
        ([70, 69, 1, 1], [1, 2, 1]),
    ):  # fmt: skip
        assert in_blocks(lengths, 5, made) == sizes


def _block(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def test_the_query_is_a_mean_over_the_blocks_of_its_list() -> None:
    first = _block([1, 0], [0, 1], [3, 4])  # the best cosine is 0.8: weight 0.9
    second = _block([-2, 0], [0, 4])  # its only cosine is 0: weight 0.5
    query = np.array([0.9 * 3, 0.9 * 4 + 0.5 * 4]) / 1.4
    query /= np.linalg.norm(query)
    scores = np.concatenate([merge_blocks([first, second]), merge_blocks([_block([1, 1], [1, 0])])])
    np.testing.assert_allclose(scores, [query[0], query[1], -query[0], np.sqrt(0.5)], atol=1e-6)
