"""Queries and documents that are run apart: each different document once for each query, then its scores."""

from typing import Any

import numpy as np
import pytest
import torch

from maxsimd.engine.cache import EmbeddingCache
from maxsimd.engine.cache.slab import EmbeddingSlab
from maxsimd.engine.checkpoint import RoleRules
from maxsimd.engine.errors import InvalidRequestError, RequestTooLargeError
from maxsimd.engine.preprocess import Prepared, usage_of
from maxsimd.engine.preprocess.texts import TextBuilder
from maxsimd.engine.preprocess.two_stage import (
    DOCUMENTS_PER_TOKEN,
    IN_SLAB,
    ON_HOST,
    ROWS_PER_TOKEN,
    in_batches,
)
from maxsimd.engine.requests import REFUSE_LONG, Truncation
from maxsimd.engine.scoring.documents import CachedDocument
from maxsimd.scheduler import ResultSlot, Role, Sequence, Window
from tests.unit.engine.preprocess.preprocessing import (
    CLS,
    DOCUMENT_PROMPT,
    INSTRUCT_LABEL,
    QUERY_LABEL,
    SEP,
    embedding,
    empty_cache,
    ids,
    model,
    preprocessor,
    refused,
    request_ids,
    score_request,
    tokens_of,
    words,
)

LATE_INTERACTION, BI_ENCODER = "token_embed", "embed"


def score(
    queries: list[str],
    documents: list[str],
    truncation: Truncation = REFUSE_LONG,
    *,
    task: str = LATE_INTERACTION,
    instruction: str | None = None,
    cache: EmbeddingCache | None = None,
    **changes: object,
) -> Prepared:
    made = preprocessor(model(score_task=task, **changes), cache=cache)
    request = score_request(queries, documents, truncation, instruction=instruction)
    return made.score(request, request_ids())


def documents_of(prepared: Prepared) -> list[Sequence]:
    return [sequence for sequence in prepared.sequences if sequence.payload.role is Role.DOCUMENT]


def slots_of(prepared: Prepared) -> list[int]:
    return [one.payload.slot.index for one in documents_of(prepared) if one.payload.slot]


@pytest.mark.parametrize("task", [LATE_INTERACTION, BI_ENCODER])
def test_queries_come_first_and_documents_wait_for_theirs(task: str) -> None:
    prepared = score(["w1", "w2 w3"], ["w4", "w5 w6 w7"], task=task)
    assert tokens_of(prepared) == [
        [CLS, *ids(1, 1), SEP],
        [CLS, *ids(2, 2), SEP],
        [CLS, *ids(1, 4), SEP],
        [CLS, *ids(3, 5), SEP],
    ]
    assert [sequence.sequence_id for sequence in prepared.sequences] == [100, 101, 102, 103]
    roles = [sequence.payload.role for sequence in prepared.sequences]
    assert roles == [Role.QUERY, Role.QUERY, Role.DOCUMENT, Role.DOCUMENT]
    assert {(sequence.request_id, sequence.payload.task) for sequence in prepared.sequences} == {(7, task)}
    assert [sequence.num_consumers for sequence in prepared.sequences] == [1, 1, 0, 0]
    assert [sequence.waits_for for sequence in prepared.sequences] == [None, None, 100, 101]
    slots = [sequence.payload.slot for sequence in prepared.sequences[2:]]
    assert slots == [ResultSlot(7, 0), ResultSlot(7, 1)]
    assert prepared.results == 2
    assert prepared.combine([3, 4]).tolist() == [3, 4]
    assert usage_of(prepared).prompt_tokens == 3 + 4 + 3 + 5


def test_equal_documents_of_a_query_share_a_score() -> None:
    prepared = score(["w1"], ["w4", "w5", "w4", "w4"])
    assert tokens_of(prepared)[1:] == [[CLS, *ids(1, 4), SEP], [CLS, *ids(1, 5), SEP]]
    assert prepared.sequences[0].num_consumers == 2
    assert prepared.results == 2
    assert prepared.combine([3, 8]).tolist() == [3, 8, 3, 3]
    # Under two queries it is scored against each.
    prepared = score(["w1", "w2", "w1"], ["w4", "w4", "w4"])
    found = [(one.waits_for, one.tokens.ids.tolist()) for one in documents_of(prepared)]
    assert found == [(query, [CLS, *ids(1, 4), SEP]) for query in (100, 101, 102)]
    assert prepared.combine([1, 2, 3]).tolist() == [1, 2, 3]


def test_late_interaction_scores_all_windows_as_one() -> None:
    truncation = Truncation(max_tokens=6, windows=True, window_overlap=1)
    prepared = score(["w1"], [words(9), "w4", words(6)], truncation)
    documents = documents_of(prepared)
    assert [one.tokens.ids.tolist() for one in documents] == [
        [CLS, *ids(4), SEP],
        [CLS, *ids(4, 3), SEP],
        [CLS, *ids(3, 6), SEP],
        [CLS, *ids(1, 4), SEP],
        [CLS, *ids(4), SEP],
        [CLS, *ids(3, 3), SEP],
    ]
    assert slots_of(prepared) == [0, 0, 0, 1, 2, 2]
    windows = [one.payload.document.window for one in documents if one.payload.document]
    assert windows == [Window(101, 3)] * 3 + [None] + [Window(105, 2)] * 2
    assert [one.sequence_id for one in documents] == [101, 102, 103, 104, 105, 106]
    assert prepared.sequences[0].num_consumers == 6
    assert prepared.results == 3
    assert prepared.combine([1, 2, 3]).tolist() == [1, 2, 3]


@pytest.mark.parametrize("task", [LATE_INTERACTION, BI_ENCODER])
def test_too_many_windows_are_refused_at_once(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three documents have ten windows each, of two tokens beside [CLS] and [SEP]."""
    truncation = Truncation(max_tokens=4, windows=True)
    request = score_request(["a"], [words(20, i) for i in range(3)], truncation)
    made: list[int] = []
    complete = TextBuilder._completed

    def counting(builder: TextBuilder, *given: Any, **options: Any) -> Any:
        made.append(1)
        return complete(builder, *given, **options)

    monkeypatch.setattr(TextBuilder, "_completed", counting)
    prepare = preprocessor(model(score_task=task)).score
    assert len(prepare(request, request_ids(most_tokens=120)).sequences) == 1 + 30
    for most, windows in ((119, 30), (79, 20), (36, 10), (35, 0)):
        made.clear()
        with pytest.raises(RequestTooLargeError, match=f"more than the {most} tokens"):
            prepare(request, request_ids(most_tokens=most))
        assert len(made) == windows


def test_a_bi_encoder_scores_every_window_and_the_best_counts() -> None:
    truncation = Truncation(max_tokens=6, windows=True)
    prepared = score(["w1"], [words(9), "w4", words(5), words(9)], truncation, task=BI_ENCODER)
    documents = documents_of(prepared)
    assert slots_of(prepared) == [0, 1, 2, 3, 4, 5]
    assert all(one.payload.document and one.payload.document.window is None for one in documents)
    assert [one.sequence_id for one in documents] == [101, 102, 103, 104, 105, 106]
    assert prepared.sequences[0].num_consumers == 6
    assert prepared.results == 6
    np.testing.assert_array_equal(prepared.combine([1, 7, 2, -3, 4, 5]), [7, -3, 5, 7])


def test_an_instruction_takes_the_place_of_the_prompts_own() -> None:
    rules = RoleRules("Instruct: w8 w9\nQuery: ")
    options: dict[str, object] = {"query": rules, "document": RoleRules("passage: ")}

    def query(**more: object) -> list[int]:
        return tokens_of(score(["w1"], ["w2"], **options, **more))[0]  # type: ignore[arg-type]

    def instructed(instruction: list[int]) -> list[int]:
        return [CLS, INSTRUCT_LABEL, *instruction, QUERY_LABEL, *ids(1, 1), SEP]

    assert query() == instructed(ids(2, 8)), "nothing asked for: the prompt as it is"
    assert query(instruction="w20") == instructed(ids(1, 20))
    described = model(**options, instruction="w30")
    own = preprocessor(described).score(score_request(["w1"], ["w2"]), request_ids())
    assert tokens_of(own) == [instructed(ids(1, 30)), [CLS, DOCUMENT_PROMPT, *ids(1, 2), SEP]]
    with pytest.raises(InvalidRequestError, match="takes no instruction"):
        score(["w1"], ["w2"], instruction="w20")


def test_queries_and_documents_have_limits_of_their_own() -> None:
    limits = Truncation(max_query_tokens=2, max_document_tokens=4, side="left")
    prepared = score([words(3)], [words(6), words(4)], limits)
    assert tokens_of(prepared) == [[CLS, *ids(2, 1), SEP], [CLS, *ids(4, 2), SEP], [CLS, *ids(4), SEP]]
    assert prepared.truncated == 2


@pytest.mark.parametrize("task", [LATE_INTERACTION, BI_ENCODER])
def test_what_is_cut_counts_for_each_document_of_the_request(task: str) -> None:
    documents = [words(9), "w1", words(8), words(9)]
    prepared = score([words(9)], documents, Truncation(max_tokens=6), task=task)
    assert prepared.truncated == 4, "the query, and three documents, two of them equal"
    cut = [one.payload.document.truncated for one in documents_of(prepared) if one.payload.document]
    assert cut == [True, False, True]


def test_an_input_that_is_too_long_is_refused_by_its_index() -> None:
    with refused("documents", r"^documents\[3\] has 11 tokens, but at most 10"):
        score(["w1"], ["w2", "w2", "w3", words(9)], max_tokens=10)
    with refused("queries", r"^queries\[1\] has 11 tokens, but at most 10"):
        score(["w1", words(9)], ["w2", "w3"], max_tokens=10)
    assert score([words(8)], [words(8)], max_tokens=10).truncated == 0


def cached_prepared(task: str) -> Prepared:
    """Documents 1 and 3 are cached, with 2 and 5 tokens; 0 and 2 are not."""
    cache = empty_cache()
    cache.put([(cache.key("w5", "as it is"), embedding(rows=1, tokens=3))])
    cache.put([(cache.key("w7", "as it is"), embedding(rows=200, tokens=5, truncated=True))])
    return score(["w1"], ["w4", "w5", "w6 w6", "w7", "w5"], cache=cache, task=task)


@pytest.mark.parametrize("task", [LATE_INTERACTION, BI_ENCODER])
def test_cached_documents_are_scored_in_batches_of_their_query(task: str) -> None:
    prepared = cached_prepared(task)
    assert [one.tokens.ids.tolist() for one in documents_of(prepared)] == [
        [CLS, *ids(1, 4), SEP],
        [CLS, *ids(1, 6), *ids(1, 6), SEP],
    ]
    assert slots_of(prepared) == [0, 2]
    (batch,) = prepared.cached
    assert (batch.request_id, batch.waits_for, batch.price) == (7, 100, 3)
    assert batch.documents.slots == (ResultSlot(7, 1), ResultSlot(7, 3))
    assert [embedding.tokens for embedding in batch.documents.embeddings] == [3, 5]
    assert prepared.sequences[0].num_consumers == 4
    assert prepared.results == 4
    assert prepared.combine([1, 2, 3, 4]).tolist() == [1, 2, 3, 4, 2]
    assert prepared.truncated == 1, "cut when it was cached"
    usage = usage_of(prepared)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.cached_documents) == (3 + 3 + 4 + 8, 8, 2)
    assert prepared.num_new_tokens == 10


def test_cached_documents_are_in_batches_by_query_and_size() -> None:
    cache = empty_cache()
    cache.put([(cache.key("w5", "as it is"), embedding())])
    prepared = score(["w1", "w2"], ["w5", "w5"], cache=cache)
    assert [batch.waits_for for batch in prepared.cached] == [100, 101]
    assert [[slot.index for slot in batch.documents.slots] for batch in prepared.cached] == [[0], [1]]
    # They are larger where embeddings stay on the device.
    cache.put([(cache.key(f"w{i}", "as it is"), embedding(rows=ON_HOST.rows)) for i in range(3)])
    assert len(score(["w3"], ["w0", "w1", "w2"], cache=cache).cached) == 3
    cache.slab = EmbeddingSlab(64, 2, torch.float32, torch.device("cpu"))
    assert len(score(["w3"], ["w0", "w1", "w2"], cache=cache).cached) == 1
    assert IN_SLAB.rows > 3 * ON_HOST.rows


def batches(*rows: int) -> list[tuple[int, int]]:
    """How many documents each batch has, and its price, for documents of these numbers of rows."""
    documents = [CachedDocument(ResultSlot(7, i), embedding(rows=n)) for i, n in enumerate(rows)]
    made = list(in_batches(documents, 100))
    assert [slot for batch in made for slot in batch.documents.slots] == [one.slot for one in documents]
    embeddings = [embedding for batch in made for embedding in batch.documents.embeddings]
    assert embeddings == [one.embedding for one in documents]
    assert {(batch.request_id, batch.waits_for) for batch in made} <= {(7, 100)}
    return [(len(batch.documents), batch.price) for batch in made]


def test_a_batch_is_full_at_exactly_its_rows_or_documents() -> None:
    half = ON_HOST.rows // 2
    full = ON_HOST.rows // ROWS_PER_TOKEN
    assert batches(half, half) == [(2, full + 1)]
    assert batches(half, half, 1) == [(2, full + 1), (1, 1)]
    assert batches(half, half + 1) == [(1, full // 2 + 1), (1, full // 2 + 1)]
    assert batches(half + 1, half, half) == [(1, full // 2 + 1), (2, full + 1)]
    assert batches(1, ON_HOST.rows + 1, 1) == [(1, 1), (1, full + 1), (1, 1)]
    assert batches() == []
    price = ON_HOST.documents // DOCUMENTS_PER_TOKEN
    assert batches(*[0] * ON_HOST.documents) == [(ON_HOST.documents, price)]
    assert batches(*[0] * (ON_HOST.documents + 1)) == [(ON_HOST.documents, price), (1, 1)]


def test_a_batch_s_price_is_rounded_up_and_at_least_one_token() -> None:
    assert batches(1) == batches(0) == [(1, 1)]
    rest = ROWS_PER_TOKEN - ROWS_PER_TOKEN // DOCUMENTS_PER_TOKEN
    assert batches(rest) == [(1, 1)]
    assert batches(rest + 1) == [(1, 2)]
    assert batches(2 * ROWS_PER_TOKEN) == [(1, 3)]
    assert batches(*[0] * DOCUMENTS_PER_TOKEN) == [(DOCUMENTS_PER_TOKEN, 1)]
    assert batches(*[0] * (DOCUMENTS_PER_TOKEN + 1)) == [(DOCUMENTS_PER_TOKEN + 1, 2)]
