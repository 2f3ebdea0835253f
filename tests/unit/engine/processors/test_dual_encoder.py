"""Queries and documents that are run apart, each document once a query, and the keys of cached ones."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from maxsimd.engine.cache import EmbeddingCache
from maxsimd.engine.cache.slab import EmbeddingSlab
from maxsimd.engine.checkpoint import RoleRules, Task
from maxsimd.engine.errors import RequestTooLargeError
from maxsimd.engine.processors.dual_encoder import IN_SLAB, ON_HOST, in_batches
from maxsimd.engine.processors.processor import ScorePlan
from maxsimd.engine.processors.text.builder import LongInputs, TextBuilder
from maxsimd.engine.requests import CUT_LONG, REFUSE_LONG, CacheMode, Truncation, Values
from maxsimd.engine.scoring import scorer
from maxsimd.scheduler import ResultSlot, Role, TokenSequence, Window
from tests.unit.engine.processors import small_models as small
from tests.unit.engine.processors.small_models import CLS, SEP, embedding, ids, model, request_ids, words

LATE_INTERACTION, BI_ENCODER = "token_embed", "embed"


def score(
    *texts: Any, task: str = LATE_INTERACTION, instruction: Any = None, cache: Any = None, **changes: Any
) -> ScorePlan:
    made = small.processors(model(score_task=task, **changes), cache=cache)
    return made.scores.prepare(small.score_request(*texts, instruction=instruction), request_ids())


def documents_of(plan: ScorePlan) -> list[TokenSequence]:
    return [sequence for sequence in plan.sequences if sequence.payload.role is Role.DOCUMENT]


def slots_of(plan: ScorePlan) -> list[int]:
    return [one.payload.slot.index for one in documents_of(plan) if one.payload.slot]


@pytest.mark.parametrize("task", [LATE_INTERACTION, BI_ENCODER])
def test_queries_come_first_and_documents_wait_for_theirs(task: str) -> None:
    plan = score(["w1", "w2 w3"], ["w4", "w5 w6 w7"], task=task)
    texts = [ids(1, 1), ids(2, 2), ids(1, 4), ids(3, 5)]
    assert small.tokens_of(plan) == [[CLS, *text, SEP] for text in texts]
    assert [sequence.sequence_id for sequence in plan.sequences] == [100, 101, 102, 103]
    assert [sequence.payload.role for sequence in plan.sequences] == [Role.QUERY] * 2 + [Role.DOCUMENT] * 2
    assert {(sequence.request_id, sequence.payload.task) for sequence in plan.sequences} == {(7, task)}
    assert [sequence.num_consumers for sequence in plan.sequences] == [1, 1, 0, 0]
    assert [sequence.waits_for for sequence in plan.sequences] == [None, None, 100, 101]
    assert (slots_of(plan), plan.num_values, plan.raw_scores([3, 4]).tolist()) == ([0, 1], 2, [3, 4])
    assert plan.usage.prompt_tokens == 3 + 4 + 3 + 5


def test_equal_documents_of_a_query_share_a_score() -> None:
    plan = score(["w1"], ["w4", "w5", "w4", "w4"])
    assert small.tokens_of(plan)[1:] == [[CLS, *ids(1, 4), SEP], [CLS, *ids(1, 5), SEP]]
    assert (plan.sequences[0].num_consumers, plan.num_values) == (2, 2)
    assert plan.raw_scores([3, 8]).tolist() == [3, 8, 3, 3]
    plan = score(["w1", "w2", "w1"], ["w4", "w4", "w4"])
    found = [(one.waits_for, one.tokens.ids.tolist()) for one in documents_of(plan)]
    assert found == [(query, [CLS, *ids(1, 4), SEP]) for query in (100, 101, 102)]
    assert plan.raw_scores([1, 2, 3]).tolist() == [1, 2, 3]


def test_late_interaction_scores_all_windows_as_one() -> None:
    plan = score(["w1"], [words(9), "w4", words(6)], Truncation(max_tokens=6, windows=True, window_overlap=1))
    documents = documents_of(plan)
    bodies = [ids(4), ids(4, 3), ids(3, 6), ids(1, 4), ids(4), ids(3, 3)]
    assert [one.tokens.ids.tolist() for one in documents] == [[CLS, *body, SEP] for body in bodies]
    assert slots_of(plan) == [0, 0, 0, 1, 2, 2]
    windows = [one.payload.document.window for one in documents if one.payload.document]
    assert windows == [Window(101, 3)] * 3 + [None] + [Window(105, 2)] * 2
    assert [one.sequence_id for one in documents] == [101, 102, 103, 104, 105, 106]
    assert plan.sequences[0].num_consumers == 6
    assert (plan.num_values, plan.raw_scores([1, 2, 3]).tolist()) == (3, [1, 2, 3])


@pytest.mark.parametrize("task", [LATE_INTERACTION, BI_ENCODER])
def test_too_many_windows_are_refused_at_once(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three documents have ten windows each, of two tokens beside [CLS] and [SEP]."""
    truncation = Truncation(max_tokens=4, windows=True)
    request = small.score_request(["a"], [words(20, i) for i in range(3)], truncation)
    made: list[int] = []
    complete = TextBuilder._completed
    counting = lambda *given, **options: made.append(1) or complete(*given, **options)  # noqa: E731
    monkeypatch.setattr(TextBuilder, "_completed", counting)
    prepare = small.processors(model(score_task=task)).scores.prepare
    assert len(prepare(request, request_ids(most_tokens=120)).sequences) == 1 + 30
    for most, windows in ((119, 30), (79, 20), (36, 10), (35, 0)):
        made.clear()
        with pytest.raises(RequestTooLargeError, match=f"more than the {most} tokens"):
            prepare(request, request_ids(most_tokens=most))
        assert len(made) == windows


def test_a_bi_encoder_scores_every_window_and_the_best_counts() -> None:
    truncation = Truncation(max_tokens=6, windows=True)
    plan = score(["w1"], [words(9), "w4", words(5), words(9)], truncation, task=BI_ENCODER)
    documents = documents_of(plan)
    assert slots_of(plan) == [0, 1, 2, 3, 4, 5]
    assert all(one.payload.document and one.payload.document.window is None for one in documents)
    assert (plan.sequences[0].num_consumers, plan.num_values) == (6, 6)
    np.testing.assert_array_equal(plan.raw_scores([1, 7, 2, -3, 4, 5]), [7, -3, 5, 7])
    assert [plan.documents_of([value]) for value in range(6)] == [[0, 3]] * 3 + [[1], [2], [2]]
    assert (plan.documents_of([0, 2, 3]), plan.input_of(4)) == ([0, 1, 3], "documents[2]")


def test_documents_that_cannot_be_read_have_errors_beside_the_scores_of_the_others() -> None:
    request = small.score_request(["w1"], ["w2", "\ud83d", "w3", "w2"], skip_unreadable=True, normalize=True)
    tasks = {"token_embed": Task("all", torch.nn.Identity(), 8, normalized=True)}
    plan = small.processors(model(tasks=tasks, similarity="maxsim")).scores.prepare(request, request_ids())
    assert (list(plan.errors), plan.num_values, plan.usage.prompt_tokens) == ([1], 2, 9)
    np.testing.assert_array_equal(plan.raw_scores([1.5, 3]), [1.5, np.nan, 3, 1.5])
    np.testing.assert_allclose(plan.scores([1.5, 3]), [0.5, np.nan, 1, 0.5])
    assert [plan.documents_of([value]) for value in range(2)] == [[0, 3], [2]]
    result = plan.result(Values([1.5, None], {1: "the model failed on it"}))
    assert (result.errors, result.unscored) == ({1: plan.errors[1], 2: "the model failed on it"}, ())
    assert plan.result(Values([1.5, None], {})).unscored == (2,)


def test_an_instruction_takes_the_place_of_the_prompts_own() -> None:
    rules = {"query": RoleRules("Instruct: w8 w9\nQuery: "), "document": RoleRules("passage: ")}
    for own, of_request, written in (
        (None, None, ids(2, 8)),  # the prompt as it is
        (None, "w20", ids(1, 20)),
        ("w30", None, ids(1, 30)),
    ):
        request = small.score_request(["w1"], ["w2"], instruction=of_request)
        plan = small.processors(model(**rules, instruction=own)).scores.prepare(request, request_ids())
        query = [CLS, small.INSTRUCT_LABEL, *written, small.QUERY_LABEL, *ids(1, 1), SEP]
        assert small.tokens_of(plan) == [query, [CLS, small.DOCUMENT_PROMPT, *ids(1, 2), SEP]]
    with small.refused("instruction", "takes no instruction"):
        score(["w1"], ["w2"], instruction="w20")


@pytest.mark.parametrize("task", [LATE_INTERACTION, BI_ENCODER])
def test_what_is_cut_counts_for_each_document_of_the_request(task: str) -> None:
    plan = score([words(9)], [words(9), "w1", words(8), words(9)], Truncation(max_tokens=6), task=task)
    assert plan.truncated == 4, "the query, and three documents, two of them equal"
    cut = [one.payload.document.truncated for one in documents_of(plan) if one.payload.document]
    assert cut == [True, False, True]
    limits = Truncation(max_query_tokens=2, max_document_tokens=4, side="left")
    limited = score([words(3)], [words(6), words(4)], limits, task=task)
    assert small.tokens_of(limited) == [[CLS, *ids(2, 1), SEP], [CLS, *ids(4, 2), SEP], [CLS, *ids(4), SEP]]
    assert limited.truncated == 2


def test_what_is_too_long_is_refused_by_its_index() -> None:
    with small.refused("documents", r"^documents\[3\] has 11 tokens, but at most 10"):
        score(["w1"], ["w2", "w2", "w3", words(9)], max_tokens=10)
    with small.refused("queries", r"^queries\[1\] has 11 tokens, but at most 10"):
        score(["w1", words(9)], ["w2", "w3"], max_tokens=10)
    assert score([words(8)], [words(8)], max_tokens=10).truncated == 0
    prepare = small.processors(model(max_tokens=10_000), most_vectors=20).scores.prepare
    assert prepare(small.score_request([words(38)], ["w1", words(8)]), request_ids()).num_values == 2
    with small.refused(
        "documents", r"^documents\[2\] has 11 vectors and its query 40, and at most 400 pairs"
    ):
        prepare(small.score_request([words(38)], ["w1", "w1", words(9)]), request_ids())


@pytest.mark.parametrize("task", [LATE_INTERACTION, BI_ENCODER])
def test_cached_documents_are_scored_in_batches_of_their_query(task: str) -> None:
    cache = small.empty_cache()
    cache.put([(cache.key("w5", "as it is"), embedding(rows=1, tokens=3))])
    cache.put([(cache.key("w7", "as it is"), embedding(rows=200, tokens=5, truncated=True))])
    plan = score(["w1"], ["w4", "w5", "w6 w6", "w7", "w5"], cache=cache, task=task)
    expected = [[CLS, *ids(1, 4), SEP], [CLS, *ids(1, 6), *ids(1, 6), SEP]]
    assert ([one.tokens.ids.tolist() for one in documents_of(plan)], slots_of(plan)) == (expected, [0, 2])
    (batch,) = plan.cached
    assert (batch.request_id, batch.waits_for, batch.price) == (7, 100, 3)
    assert batch.documents.slots == (ResultSlot(7, 1), ResultSlot(7, 3))
    assert [embedding.tokens for embedding in batch.documents.embeddings] == [3, 5]
    assert (plan.sequences[0].num_consumers, plan.num_values) == (4, 4)
    assert plan.raw_scores([1, 2, 3, 4]).tolist() == [1, 2, 3, 4, 2]
    assert plan.truncated == 1, "cut when it was cached"
    usage = plan.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.cached_documents) == (3 + 3 + 4 + 8, 8, 2)
    assert sum(each.num_new_tokens for each in plan.sequences) == 10


def test_cached_documents_are_in_batches_by_query_and_size() -> None:
    cache = small.empty_cache()
    cache.put([(cache.key("w5", "as it is"), embedding())])
    plan = score(["w1", "w2"], ["w5", "w5"], cache=cache)
    assert [batch.waits_for for batch in plan.cached] == [100, 101]
    assert [[slot.index for slot in batch.documents.slots] for batch in plan.cached] == [[0], [1]]
    cache.put([(cache.key(f"w{i}", "as it is"), embedding(rows=ON_HOST.rows)) for i in range(3)])
    assert len(score(["w3"], ["w0", "w1", "w2"], cache=cache).cached) == 3
    cache.slab = EmbeddingSlab(64, 2, torch.float32, torch.device("cpu"))
    assert len(score(["w3"], ["w0", "w1", "w2"], cache=cache).cached) == 1
    assert IN_SLAB.rows > 3 * ON_HOST.rows
    full = ON_HOST.rows // scorer.ROWS_PER_TOKEN
    for query_rows, rows, expected in (
        (2000, [1280], [(1, 100 + 1)]),
        (2000, [ON_HOST.rows // 20] * 5, [(2, full + 1), (2, full + 1), (1, full // 2 + 1)]),
        (2000, [ON_HOST.rows], [(1, 10 * full + 1)]),
        (200_000, [1] * 3, [(3, 24 + 1)]),
    ):
        assert batches(*rows, query_rows=query_rows) == expected


@pytest.mark.parametrize("task", [LATE_INTERACTION, BI_ENCODER])
def test_documents_beside_a_long_query_cost_more_than_tokens(task: str) -> None:
    usual = int(scorer.ScoringPrice.of(model(score_task=task)).usual_query_rows)
    for length, expected in ((usual - 2, 0), (10 * usual - 2, (10 - 1) * 640 // 128 - 1)):
        (one,) = documents_of(score([words(length)], [words(638)], task=task, max_tokens=10_000))
        assert one.scoring in (expected, expected + 1)
        assert one.price == 640 + one.scoring


def batches(*rows: int, query_rows: int = 32) -> list[tuple[int, int]]:
    """The number of documents of each batch, and its price; of the query 200 rows are usual."""
    documents = [scorer.CachedDocument(ResultSlot(7, i), embedding(rows=n)) for i, n in enumerate(rows)]
    made = list(in_batches(documents, 100, query_rows, scorer.ScoringPrice(200)))
    assert [slot for batch in made for slot in batch.documents.slots] == [one.slot for one in documents]
    return [(len(batch.documents), batch.price) for batch in made]


def test_a_batch_is_full_at_exactly_its_rows_or_documents() -> None:
    half, full = ON_HOST.rows // 2, ON_HOST.rows // scorer.ROWS_PER_TOKEN
    of_half, of_full = full // 2 + 1, full + 1
    rest = scorer.ROWS_PER_TOKEN - scorer.ROWS_PER_TOKEN // scorer.DOCUMENTS_PER_TOKEN
    documents = ON_HOST.documents // scorer.DOCUMENTS_PER_TOKEN
    for rows, expected in (
        *(([], []), ([half, half], [(2, of_full)]), ([half, half, 1], [(2, of_full), (1, 1)])),
        ([half, half + 1], [(1, of_half), (1, of_half)]),
        ([1, ON_HOST.rows + 1, 1], [(1, 1), (1, of_full), (1, 1)]),
        *(([0] * (ON_HOST.documents + 1), [(ON_HOST.documents, documents), (1, 1)]), ([0], [(1, 1)])),
        *(([rest], [(1, 1)]), ([rest + 1], [(1, 2)])),
        ([0] * scorer.DOCUMENTS_PER_TOKEN, [(scorer.DOCUMENTS_PER_TOKEN, 1)]),
        ([0] * (scorer.DOCUMENTS_PER_TOKEN + 1), [(scorer.DOCUMENTS_PER_TOKEN + 1, 2)]),
    ):
        assert batches(*rows) == batches(*rows, query_rows=200) == expected


LONG = words(30)
LONGEST = 20
WINDOWS = Truncation(max_tokens=-1, windows=True)


@pytest.fixture
def cache() -> Iterator[EmbeddingCache]:
    made = small.empty_cache()
    yield made
    made.close()


def looked_up(
    cache: EmbeddingCache | None, document: str, truncation: Truncation = REFUSE_LONG,
    mode: CacheMode = "use", own_length: int | None = None, task: str = "token_embed",
) -> ScorePlan:  # fmt: skip
    described = model(max_tokens=LONGEST, document=RoleRules(max_tokens=own_length), score_task=task)
    made = small.processors(described, overlap=1, cache=cache)
    return made.scores.prepare(small.score_request(["w1"], [document], truncation, cache=mode), request_ids())


def plain(cache: EmbeddingCache, document: str) -> bytes:
    return cache.key(document, "as it is")


def as_requested(cache: EmbeddingCache, document: str, truncation: Truncation) -> bytes:
    return cache.key(document, LongInputs(truncation, LONGEST, 1).signature)


def key_of(plan: ScorePlan) -> bytes | None:
    (key,) = {one.payload.document.cache_key for one in documents_of(plan) if one.payload.document}
    return key


def test_the_key_says_how_a_document_is_read(cache: EmbeddingCache) -> None:
    """Plain is what any request reads alike: it fits, or is cut to the checkpoint's own length as usual. One
    of exactly that length, here 10 tokens with two special ones, may be a longer one that was cut."""
    left = Truncation(max_tokens=9, side="left")
    usual = (Truncation(), CUT_LONG, Truncation(max_tokens=10))
    for document, own_length, plainly, otherwise in (
        ("w2", None, (Truncation(), CUT_LONG, WINDOWS, left), (Truncation(max_document_tokens=5),)),
        (LONG, None, (), (CUT_LONG, left, WINDOWS)),
        (words(7), 10, (*usual, Truncation(side="left"), WINDOWS), ()),
        (words(8), 10, usual, (Truncation(side="left"), WINDOWS)),
        (words(9), 10, usual, (Truncation(side="left"), WINDOWS)),
    ):
        for each in plainly:
            assert key_of(looked_up(cache, document, each, own_length=own_length)) == plain(cache, document)
        for each in otherwise:
            expected = as_requested(cache, document, each)
            assert key_of(looked_up(cache, document, each, own_length=own_length)) == expected
    truncation = Truncation(max_tokens=9, side="left", max_document_tokens=5)
    assert LongInputs(truncation, LONGEST, 1).signature == "('as asked', 9, (True, 'left', 5), False)"
    windows = Truncation(windows=True, window_overlap=2)
    expected = "('as asked', 20, (False, 'right', None), ('at most half', 2))"
    assert LongInputs(windows, LONGEST, 1).signature == expected


def test_hits_and_misses_are_counted_where_there_is_a_cache(cache: EmbeddingCache) -> None:
    cache.put([(plain(cache, "w2"), embedding()), (plain(cache, "w3"), embedding())])
    bypassed = looked_up(cache, "w2", mode="bypass")
    assert (len(bypassed.cached), key_of(bypassed), cache.hits, cache.misses) == (0, None, 0, 0)
    made = small.processors(model(), cache=cache)
    made.scores.prepare(small.score_request(["w1"], ["w2", "w3", "w4", "w2"]), request_ids())
    assert (cache.hits, cache.misses, key_of(looked_up(cache, LONG, WINDOWS, task="embed"))) == (2, 1, None)
    assert key_of(looked_up(cache, LONG, CUT_LONG, task="embed")) == as_requested(cache, LONG, CUT_LONG)


def test_a_refresh_drops_both_entries_and_caches_anew(cache: EmbeddingCache) -> None:
    keys = [plain(cache, "w2"), as_requested(cache, "w2", CUT_LONG)]
    cache.put([(key, embedding()) for key in [*keys, plain(cache, "w3")]])
    refreshed = looked_up(cache, "w2", CUT_LONG, mode="refresh")
    assert not refreshed.cached
    assert (key_of(refreshed), [cache.get(key) for key in keys]) == (keys[0], [None, None])
    assert cache.get(plain(cache, "w3")) is not None
    assert (cache.hits, cache.misses) == (0, 0)


def test_a_plain_entry_is_found_by_whoever_reads_it_alike(cache: EmbeddingCache) -> None:
    cache.put([(plain(cache, "w2"), embedding(tokens=10)), (plain(cache, "w3"), embedding(tokens=9))])
    for found in (Truncation(), CUT_LONG, Truncation(max_tokens=10), WINDOWS):
        assert looked_up(cache, "w2", found).cached
    # Longer than the request allows, or limited by it: read otherwise.
    for missed in (Truncation(max_tokens=9), Truncation(max_document_tokens=100)):
        assert not looked_up(cache, "w2", missed).cached
    # A text of the checkpoint's own length may have been cut at its end.
    for usual in (Truncation(), CUT_LONG, Truncation(max_tokens=10)):
        assert looked_up(cache, "w2", usual, own_length=10).cached
    for otherwise in (Truncation(side="left"), WINDOWS):
        assert not looked_up(cache, "w2", otherwise, own_length=10).cached
        assert looked_up(cache, "w3", otherwise, own_length=10).cached


def test_an_entry_as_requested_is_found_by_the_same_alone(cache: EmbeddingCache) -> None:
    for truncation in (
        CUT_LONG, Truncation(max_tokens=9), Truncation(max_tokens=9, side="left"),
        Truncation(max_tokens=9, windows=True), Truncation(max_tokens=9, windows=True, window_overlap=2),
        Truncation(max_tokens=9, max_document_tokens=6), Truncation(max_tokens=9, max_document_tokens=5),
        Truncation(max_document_tokens=6),
    ):  # fmt: skip
        assert not looked_up(cache, LONG, truncation).cached
        cache.put([(as_requested(cache, LONG, truncation), embedding())])
        assert looked_up(cache, LONG, truncation).cached
    # Limits of queries alone change nothing, nor does an overlap without windows, nor the engine's own.
    for same in (replace(CUT_LONG, max_query_tokens=3), replace(CUT_LONG, window_overlap=5)):
        assert looked_up(cache, LONG, same).cached
    cache.put([(as_requested(cache, LONG, WINDOWS), embedding())])
    assert looked_up(cache, LONG, replace(WINDOWS, window_overlap=1)).cached
