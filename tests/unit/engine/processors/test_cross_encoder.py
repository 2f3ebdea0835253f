"""Pairs joined by the tokenizer or a template: how they are cut, their windows, and shared prefixes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maxsimd.engine.checkpoint import ListwiseRules, LoadedModel, PairRules
from maxsimd.engine.checkpoint.templates import ScoreTemplate
from maxsimd.engine.errors import InvalidRequestError, RequestTooLargeError
from maxsimd.engine.media import Content
from maxsimd.engine.processors.cross_encoder import PicturePairBuilder, TemplatePairBuilder, shared_tokens
from maxsimd.engine.processors.processor import PrefixSharing, ScorePlan
from maxsimd.engine.processors.text.builder import FittedText, LongInputs
from maxsimd.engine.processors.text.tokenization import Side, longest_first, truncate
from maxsimd.engine.requests import CUT_LONG, REFUSE_LONG, WINDOW_LONG, Truncation
from maxsimd.scheduler import ResultSlot, Role
from tests.checkpoints.tokenizer_kinds import qwen
from tests.unit.engine.processors import small_models as small
from tests.unit.engine.processors.small_models import DOCUMENT, document, ids, refused, tokens_of, words
from tests.unit.engine.processors.split_texts import num_characters, text_tokenizer, tokenized

LONGEST_FIRST = PairRules(truncation="longest_first")
ONLY_SECOND = PairRules(truncation="only_second")
ONLY_FIRST = PairRules(truncation="only_first")
# Segments before, with and after the document; a segment's last token is no part of the prefix.
THREE_SEGMENTS = ScoreTemplate(
    ("instruct: {{ instruction }} query: {{ query }}", "passage: w900 {{ document }} w901", "w902 w903"),
    instruction="w904",
)
INSTRUCTED = ScoreTemplate(("asked: {{ instruction }} query: {{ query }} passage: w900 {{ document }} w901",))


def score(
    queries: list[str], documents: list[str], truncation: Truncation = REFUSE_LONG, *,
    pairs: PairRules = LONGEST_FIRST, max_tokens: int = 64, instruction: str | None = None,
    default: str | None = None, **made: Any,
) -> ScorePlan:  # fmt: skip
    described = small.model(score_task="classify", pairs=pairs, instruction=default, max_tokens=max_tokens)
    request = small.score_request(queries, documents, truncation, instruction=instruction)
    return small.processors(described, **made).scores.prepare(request, small.request_ids())


def ask(*texts: Any, template: ScoreTemplate = THREE_SEGMENTS, **options: Any) -> ScorePlan:
    return score(*texts, pairs=PairRules(template=template), **options)


def pair(query: list[int], read: list[int]) -> list[int]:
    return [small.CLS, *query, small.SEP, *read, small.SEP]


def asked(query: list[int], read: list[int], instruction: int = 904) -> list[int]:
    before = [small.INSTRUCT, *ids(1, instruction), small.QUERY_PROMPT, *query]
    return [*before, small.DOCUMENT_PROMPT, *ids(1, 900), *read, *ids(3, 901)]


JOINED_BY = pytest.mark.parametrize(("score", "joined"), [(score, pair), (ask, asked)])
Score = Callable[..., ScorePlan]
Joined = Callable[[list[int], list[int]], list[int]]


@JOINED_BY
def test_one_query_joins_every_document_and_n_each_its_own(score: Score, joined: Joined) -> None:
    one = score([words(2)], [document(3), document(1)])
    assert tokens_of(one) == [joined(ids(2), ids(3, DOCUMENT)), joined(ids(2), ids(1, DOCUMENT))]
    assert [sequence.payload.slot for sequence in one.sequences] == [ResultSlot(7, 0), ResultSlot(7, 1)]
    assert one.raw_scores([1.0, 3.0]).tolist() == [1, 3]
    two = score(["w1", "w2"], [document(3), document(1)])
    assert tokens_of(two) == [joined(ids(1, 1), ids(3, DOCUMENT)), joined(ids(1, 2), ids(1, DOCUMENT))]
    types = two.sequences[0].tokens.type_ids
    assert types is not None
    assert types.tolist() == ([0] * 3 + [1] * 4 if joined is pair else [0] * 12)
    usage = two.usage
    assert usage.prompt_tokens == sum(len(tokens) for tokens in tokens_of(two))
    assert (usage.cached_tokens, usage.cached_documents) == (0, 0)


@JOINED_BY
def test_a_pair_that_does_not_fit_is_refused_or_cut(score: Score, joined: Joined) -> None:
    most = len(joined(ids(4), ids(5)))
    assert tokens_of(score([words(4)], [document(5)], max_tokens=most)) == [joined(ids(4), ids(5, DOCUMENT))]
    assert score([words(4)], [document(5)], CUT_LONG, max_tokens=most).truncated == 0
    with refused("documents", rf"^documents\[1\] has {most + 1} tokens, but at most {most} can be run"):
        score([words(4)], [document(5), document(6)], max_tokens=most)
    cut = score([words(4)], [document(5), document(6), document(7)], CUT_LONG, max_tokens=most)
    assert (tokens_of(cut), cut.truncated) == ([joined(ids(4), ids(5, DOCUMENT))] * 3, 2)
    left = score([words(4)], [document(9)], Truncation(max_tokens=most, side="left"))
    assert tokens_of(left) == [joined(ids(4), ids(5, DOCUMENT + 4))]


@JOINED_BY
def test_the_requests_limits_cut_both_texts_and_are_counted(score: Score, joined: Joined) -> None:
    limits = Truncation(max_query_tokens=2, max_document_tokens=4)
    plan = score([words(3)], [document(4), document(5), document(6)], limits)
    assert tokens_of(plan) == [joined(ids(2), ids(4, DOCUMENT))] * 3
    assert plan.truncated == 3, "the query once, and two documents"
    left = Truncation(max_query_tokens=2, max_document_tokens=4, side="left")
    assert tokens_of(score([words(3)], [document(6)], left)) == [joined(ids(2, 1), ids(4, DOCUMENT + 2))]
    assert score([words(2)], [document(4)], limits).truncated == 0
    assert tokens_of(score([words(1)], [""], limits)) == [joined(ids(1), [])], "nothing to limit"
    assert score([words(3)] * 3, [document(5)] * 3, limits).truncated == 6, "each query that is cut counts"
    # A limited document that is cut again counts once.
    twice = Truncation(max_tokens=len(joined(ids(3), ids(4))), max_document_tokens=9)
    assert score([words(3)], [document(20)], twice).truncated == 1


@JOINED_BY
def test_windows_stand_where_the_document_does(score: Score, joined: Joined) -> None:
    truncation = Truncation(max_tokens=len(joined(ids(2), ids(4))), windows=True)
    plan = score([words(2)], [document(9), document(4), document(5)], truncation, overlap=1)
    windows = [(0, 4), (3, 4), (6, 3), (0, 4), (0, 4), (3, 2)]
    assert tokens_of(plan) == [joined(ids(2), ids(n, DOCUMENT + first)) for first, n in windows]
    assert (plan.truncated, plan.num_values) == (0, 6)
    assert plan.raw_scores([1, 2, 3, -9, 5, 4]).tolist() == [3, -9, 5]
    assert plan.documents_of(range(6)) == [0, 0, 0, 1, 2, 2]
    assert plan.usage.prompt_tokens == sum(len(sequence) for sequence in plan.sequences)


def test_a_pair_that_cannot_be_made_is_refused_by_its_field() -> None:
    windows = Truncation(max_tokens=16, windows=True)
    assert score([words(11)], [document(9)], windows).num_values == 5
    with pytest.raises(InvalidRequestError, match=r"documents\[0\] .* windows of 1 tokens beside 15 others"):
        score([words(12)], [document(9)], windows)
    with refused("documents", r"^documents\[1\] and its query have no tokens; leave them out$"):
        score(["", ""], ["w1", ""], special_tokens=False)
    for instruction in ("w1", ""):
        with refused("instruction", r"^this model takes no instruction; leave"):
            score(["a"], ["b"], instruction=instruction)
    with refused("max_tokens", r"^2 tokens leave no room beside 3 special tokens$"):
        score(["w1"], ["w2"], Truncation(max_tokens=2))
    around = len(asked(ids(2), []))
    exact = ask([words(2)], [document(9)], CUT_LONG, max_tokens=around + 1)
    assert tokens_of(exact) == [asked(ids(2), ids(1, DOCUMENT))]
    with refused("queries", rf"^{around} tokens stand around documents\[0\] and leave no room for it"):
        ask([words(2)], [document(9)], CUT_LONG, max_tokens=around)
    # A model that cuts only documents reads the whole query.
    full = score([words(9)], [document(2)], CUT_LONG, pairs=ONLY_SECOND, max_tokens=12)
    assert tokens_of(full) == [pair(ids(9), [])], "nothing of the document is left"
    with refused("queries", r"^the query has 10 tokens and leaves no room for documents\[1\]"):
        score(["w1", words(10)], ["w2", document(2)], CUT_LONG, pairs=ONLY_SECOND, max_tokens=12)
    # And one that cuts only queries the whole document.
    cut_query = score([words(9)], [document(7)], CUT_LONG, pairs=ONLY_FIRST, max_tokens=12)
    assert tokens_of(cut_query) == [pair(ids(2), ids(7, DOCUMENT))]
    with refused("documents", r"^documents\[0\] has 10 tokens and leaves no room for the query"):
        score(["w1"], [document(10)], CUT_LONG, pairs=ONLY_FIRST, max_tokens=12)


def test_what_pairs_have_in_common_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = tokenized(monkeypatch, small.tokenizer(True))
    queries, instruction = [f"w{i}" for i in range(100)], words(1000)
    for template in (THREE_SEGMENTS, INSTRUCTED):
        encoded.clear()
        together = ask(queries, ["w1"] * 100, template=template, instruction=instruction, max_tokens=2000)
        assert num_characters(encoded) < 5 * len(instruction)
        alone = ask(["w99"], ["w1"], template=template, instruction=instruction, max_tokens=2000)
        assert tokens_of(together)[99] == tokens_of(alone)[0]
    encoded = tokenized(monkeypatch, text_tokenizer(qwen))
    query = "what is it? " * 500
    plan = score_long(long_model(JUDGED), [query], [f"document {i}" for i in range(1000)])
    assert len(plan.sequences) == 1000
    assert num_characters(encoded) < 10 * len(query)


def test_a_request_too_large_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, each = 20, len(asked(ids(1), ids(1)))
    described = small.model(score_task="classify", pairs=PairRules(template=THREE_SEGMENTS))
    request = small.score_request(["w1"] * pairs, ["w2"] * pairs)
    exact = small.request_ids(most_tokens=pairs * each)
    assert len(small.processors(described).scores.prepare(request, exact).sequences) == pairs
    made: list[int] = []
    build = TemplatePairBuilder.build

    def counting(*given: Any) -> Iterator[Any]:
        for pair in build(*given):
            made.append(1)
            yield pair

    monkeypatch.setattr(TemplatePairBuilder, "build", counting)
    with pytest.raises(RequestTooLargeError, match=rf"more than the {3 * each} tokens .* raise max_"):
        small.processors(described).scores.prepare(request, small.request_ids(most_tokens=3 * each))
    assert len(made) == 4


def test_the_requests_instruction_goes_before_the_checkpoints() -> None:
    for sent, default, read in (("w10", "w11", 10), (None, "w11", 11), ("", "w11", 11), (None, None, 904)):
        plan = ask(["w1"], ["w2"], instruction=sent, default=default)
        assert tokens_of(plan) == [asked(ids(1, 1), ids(1, 2), read)], (sent, default)
    template = ScoreTemplate(("{{ instruction }} {{ query }} {{ document }}",))
    assert template.frames("q", "fine\ue0a2")
    for character in ("\ue0a0", "\ue0a1"):
        with refused("instruction", "private use"):
            template.frames("q", f"a{character}b")


@pytest.mark.parametrize(
    "segment",
    [
        "{{ query }} {{ document }} {{ instruction }} {{ 1 / (instruction | length - 2) }}",
        "{{ query }} {{ document[:40] }} {{ instruction }}"
        "{% if instruction ~ document == 'w10' %}{{ 1 / 0 }}{% endif %}",
    ],
    ids=["each pair", "the end of pairs that are cut"],
)
def test_an_instruction_the_template_cannot_take_is_refused(segment: str) -> None:
    template = ScoreTemplate((segment,))
    with refused("instruction", "^the instruction: .*division by zero; change it"):
        ask(["w1"], [document(9)], CUT_LONG, template=template, instruction="w1", max_tokens=8)


def test_texts_by_pictures_the_template_cannot_take_are_refused() -> None:
    template = ScoreTemplate(("{{ query }} {{ document }} {% if 'w1' in query %}{{ 1 / 0 }}{% endif %}",))
    pages: Any = SimpleNamespace(image_token="<image>", split=lambda *given: (["w1", None], []))
    pages.opened = pages.check_texts = lambda *given: None
    builder = PicturePairBuilder(small.tokenizer(), template, None, pages, 64)
    query = FittedText(np.empty(0, dtype=np.int32))
    request = replace(small.score_request(["q"], ["d"]), queries=(Content(("w1",)),))
    with refused("documents", r"^documents\[0\] and its query: .*division by zero"):
        list(builder.build(request, [query], LongInputs(REFUSE_LONG, 64, 0)))


def test_a_token_shared_with_the_template_is_not_cut() -> None:
    template = ScoreTemplate(("query: {{ query }} passage: {{ document }}/end w1",))
    whole = [small.QUERY_PROMPT, *ids(1), small.DOCUMENT_PROMPT, *ids(2, DOCUMENT), small.UNKNOWN, *ids(1, 1)]
    assert tokens_of(ask(["w0"], [document(3)], template=template)) == [whole]
    cut = ask(["w0"], [document(3)], Truncation(max_document_tokens=2), template=template)
    assert (tokens_of(cut), cut.truncated) == ([[*whole[:5], *whole[6:]]], 1)


def split(plan: ScorePlan) -> list[tuple[int, list[int]]]:
    """Each pair's prefix, by the prefix's id (0 for none), and the pair's tokens."""
    return [
        (sequence.waits_for or 0, sequence.tokens.ids.tolist())
        for sequence in plan.sequences
        if sequence.payload.role is Role.PAIR
    ]


def test_tokens_before_the_document_are_run_once_for_all_pairs() -> None:
    # instruct: w904 query: + 4 of the query + passage: = 8, and w900 may merge with the document.
    plan = ask([words(4)], [document(3), document(2)], sharing=PrefixSharing())
    prefix, *pairs = plan.sequences
    assert prefix.tokens.ids.tolist() == asked(ids(4), [])[:8]
    assert prefix.tokens.type_ids is not None
    assert prefix.tokens.type_ids.tolist() == [0] * 8
    assert (prefix.sequence_id, prefix.request_id, prefix.num_consumers) == (100, 7, 2)
    assert split(plan) == [(100, asked(ids(4), ids(3, DOCUMENT))), (100, asked(ids(4), ids(2, DOCUMENT)))]
    assert [pair.shared_prefix_len for pair in pairs] == [8, 8]
    assert [pair.payload.slot for pair in pairs] == [ResultSlot(7, 0), ResultSlot(7, 1)]
    # The usage counts both pairs whole, of which the prefix was run for one.
    usage = plan.usage
    assert (usage.prompt_tokens, usage.cached_tokens, plan.num_values) == (15 + 14, 8, 2)
    # A prefix of 7 is too short to be worth it.
    assert len(ask([words(3)], [document(3)], sharing=PrefixSharing()).sequences) == 1
    assert len(ask([words(4)], [document(3)], sharing=None).sequences) == 1


def test_equal_queries_share_a_prefix_and_others_have_their_own() -> None:
    queries = [words(5), words(4) + " w9", words(5), "w1"]
    plan = ask(queries, [document(i + 1) for i in range(4)], sharing=PrefixSharing())
    prefixes = [sequence for sequence in plan.sequences if sequence.is_prefix]
    assert [(prefix.sequence_id, prefix.num_consumers) for prefix in prefixes] == [(100, 2), (101, 1)]
    assert [prefix for prefix, _ in split(plan)] == [100, 101, 100, 0]
    firsts = [plan.sequences.index(prefix) for prefix in prefixes]
    assert firsts == [0, 2], "each before the first pair that begins with it"
    # All windows of a document share one.
    truncation = Truncation(max_tokens=len(asked(ids(4), [])) + 4, windows=True)
    plan = ask([words(4)], [document(9), document(2)], truncation, sharing=PrefixSharing())
    assert (plan.sequences[0].num_consumers, [prefix for prefix, _ in split(plan)]) == (4, [100] * 4)


# Tokens that launching takes, of the prefix, consumers and their own tokens, and whether it is shared.
WORTH = [
    (None, 8, 1, 9, True),  # nothing is replayed, so that nothing is lost
    (1000, 100, 1, 5000, False),  # nothing is saved
    (1000, 100, 2, 899, True),  # 100 saved, and 1 lost: 999 of the 1,000 tokens for which launching takes
    (1000, 100, 2, 800, False),  # 100 saved and 100 lost
    (1000, 100, 10, 1, True),  # 900 saved, 899 lost
    (1000, 100, 10, 0, False),
    (1000, 100, 2, 5000, True),  # the host launches while the device still computes
]


def test_a_prefix_is_shared_where_that_is_worth_it() -> None:
    for launch_tokens, *counts, is_shared in WORTH:
        assert PrefixSharing(launch_tokens).is_worth(*counts) is is_shared, (launch_tokens, counts)
    asked_for = [words(4)], [document(3), document(2)]
    assert len(ask(*asked_for, sharing=PrefixSharing(28)).sequences) == 3
    plan = ask(*asked_for, sharing=PrefixSharing(29))
    assert ([prefix for prefix, _ in split(plan)], plan.usage.cached_tokens) == ([0, 0], 0)
    # One of two queries may share its prefix, and the other not.
    plan = ask([words(5), words(5), words(4) + " w9"], [document(3)] * 3, sharing=PrefixSharing(20))
    assert [prefix for prefix, _ in split(plan)] == [100, 100, 0]
    plan = score([words(6)], [document(3), document(2)], sharing=PrefixSharing())
    prefix = plan.sequences[0]
    assert (prefix.is_prefix, prefix.tokens.ids.tolist()) == (True, [small.CLS, *ids(6), small.SEP])
    # One token of the query fewer, and the prefix is too short to be worth it.
    assert len(score([words(5)], [document(3)], sharing=PrefixSharing()).sequences) == 1
    # A pair with a truncated query begins otherwise.
    cut = score([words(30)], [document(30)], CUT_LONG, sharing=PrefixSharing(), max_tokens=40)
    assert [prefix for prefix, _ in split(cut)] == [0]


def test_a_pair_that_begins_otherwise_is_run_whole() -> None:
    prefix = np.arange(8, dtype=np.int32)
    assert shared_tokens(np.arange(9, dtype=np.int32), prefix) == 8
    assert shared_tokens(np.arange(8, dtype=np.int32), prefix) == 0, "it has no token of its own"
    assert shared_tokens(np.array([*range(7), 99, 8, 9], dtype=np.int32), prefix) == 0
    # Here the last word of the template and the document's first are one token.
    template = ScoreTemplate((words(9, 800) + " {{ query }} passage:{{ document }} w1",))
    plan = ask(["w0"], [document(2), ""], template=template, sharing=PrefixSharing())
    shared = [*ids(9, 800), *ids(1)]
    assert plan.sequences[0].tokens.ids.tolist() == shared
    assert split(plan) == [
        (100, [*shared, small.UNKNOWN, *ids(1, DOCUMENT + 1), *ids(1, 1)]),
        (100, [*shared, small.DOCUMENT_PROMPT, *ids(1, 1)]),
    ]


# Long queries, documents and instructions, with a published kind of tokenizer.
JUDGED = ScoreTemplate(
    (
        "<|im_start|>Judge: {{ instruction }}\n<Query>: {{ query }}\n"
        "<Document>: {{ document }}<|im_end|>\n<think>",
    ),
    instruction="is it relevant?",
)
MERGING = ScoreTemplate(("a{{ query }}b", "{{ query }}{{ document }}{{ query }}", "{{ query }}"))


def score_long(
    described: LoadedModel, queries: list[str], documents: list[str], truncation: Truncation = REFUSE_LONG
) -> ScorePlan:
    made = small.processors(described, text_tokenizer=text_tokenizer(qwen), longest=100_000)
    return made.scores.prepare(small.score_request(queries, documents, truncation), small.request_ids())


def long_model(template: ScoreTemplate, max_tokens: int = 100_000) -> LoadedModel:
    return small.model(score_task="classify", pairs=PairRules(template=template), max_tokens=max_tokens)


WRITTEN = st.sampled_from(["a", "b ", " c", ",", ".\n", "\n", "d,e", "\u6f22", "  ", "1"])
TEXTS = st.lists(WRITTEN).map("".join)


@pytest.mark.parametrize("template", [JUDGED, MERGING], ids=["instructed", "merging"])
@settings(max_examples=40)
@given(pairs=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3), one_query=st.booleans())
@example(pairs=[("a b, c d.\n", "e f, g"), ("a b, c", "")], one_query=True)
@example(pairs=[("a b, c d.\n", "e f, g"), ("a b, c", "")], one_query=False)
@example(pairs=[(" c", ""), (" c", ""), ("", "")], one_query=False)
def test_pairs_have_segments(template: ScoreTemplate, pairs: list[tuple[str, str]], one_query: bool) -> None:
    documents = [text for _, text in pairs]
    queries = [pairs[0][0]] if one_query else [query for query, _ in pairs]
    expected = []
    for query, text in zip(queries * len(pairs), documents, strict=False):
        segments = [
            frame.before if frame.after is None else frame.before + text + frame.after
            for frame in template.frames(query, None) or []
        ]
        expected.append(np.concatenate(text_tokenizer(qwen).encode(segments, "x")).tolist())
    assert tokens_of(score_long(long_model(template), queries, documents)) == expected


def test_pairs_hold_their_query_once() -> None:
    for described, held in (
        (long_model(JUDGED), 1000),
        (small.model(score_task="classify", max_tokens=100_000), 1000),
        (small.model(score_task="classify", max_tokens=100), 80),  # cut for each
    ):
        plan = score_long(described, ["what is it? " * 500], [f"document {i}" for i in range(5)], CUT_LONG)
        longest = [max(each.tokens.parts, key=len) for each in plan.sequences]  # type: ignore[union-attr]
        assert all(np.shares_memory(part, longest[0]) for part in longest)
        assert len(longest[0]) > held


LENGTHS = st.integers(0, 400)


@settings(max_examples=40)
@given(LENGTHS, LENGTHS, st.integers(4, 120), st.sampled_from(["left", "right"]), st.none() | LENGTHS)
@example(301, 300, 103, "right", None)
@example(300, 301, 103, "right", None)
def test_pairs_are_cut_as_whole(query: int, document: int, limit: int, side: Side, most: int | None) -> None:
    truncation = Truncation(max_tokens=limit, side=side, max_document_tokens=most)
    made = small.processors(small.model(score_task="classify", max_tokens=limit))
    texts = small.score_request([words(query)], [words(document, DOCUMENT)], truncation, explain=1)
    plan = made.scores.prepare(texts, small.request_ids())
    limited = document if most is None else min(document, most)
    first, second = longest_first(query, limited, limit - 3)
    wanted = truncate(np.array(ids(document, DOCUMENT), np.int32), limited, side)
    read = truncate(wanted, second, side).tolist()
    assert tokens_of(plan) == [pair(truncate(np.array(ids(query), np.int32), first, side).tolist(), read)]
    assert plan.truncated == (limited < document or query + limited > limit - 3)
    span = plan.explanations([0.5], [0])[0].read_span
    assert (span is None) != plan.truncated
    assert span is None or texts.document_texts[0][slice(*span)] == small.tokenizer().decode(read)


def test_an_instruction_that_fills_a_sequence_is_refused() -> None:
    described = long_model(JUDGED, max_tokens=50)
    made = small.processors(described, text_tokenizer=text_tokenizer(qwen), longest=100_000)
    for length, is_refused in ((49, False), (50, True), (100_000, True)):
        request = small.score_request(["a"], ["b"], instruction="a" + " a" * (length - 1))
        with pytest.raises(InvalidRequestError) as error:
            made.scores.prepare(request, small.request_ids())
        assert (error.value.param == "instruction") == is_refused
    said = "instruction has 50 tokens or more, and no more can be run in a sequence; shorten it"
    assert str(error.value) == said


def test_what_a_listwise_model_does_not_read_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked_by = ListwiseRules("[QUERY]", "[DOCUMENT]", 1000, max_query_tokens=6, max_document_tokens=10)
    described = small.model(score_task="rank", listwise=ranked_by, max_tokens=10_000)
    tokenizer = small.tokenizer()
    encoded = tokenized(monkeypatch, tokenizer)
    text = f"{words(100)} " * 500
    made = small.processors(described, text_tokenizer=tokenizer)
    # Its own length is no reason to refuse a text.
    for request in (small.score_request([text], [text, text], CUT_LONG), small.score_request(["a"], [text])):
        encoded.clear()
        made.scores.prepare(request, small.request_ids())
        assert num_characters(encoded) < 10_000


@pytest.mark.parametrize(
    ("segment", "is_plain"),
    [
        ("{{ query }}: {{ document }}", True),
        ("{% if instruction %}{{ instruction }} {% endif %}{{ query ~ ': ' + document }}", True),
        ("{% for m in messages %}{{ m.role }}: {{ m['content'] }}{% if not loop.last %};{% endif %}"
         "{% endfor %}", True),
        ("{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first "
         "| default('') }}", True),
        ("{% for m in messages if m.role in ('query', 'document') %}{{ m.content }}{% endfor %}", True),
        *(("{{ document | trim }}", False), ("{{ document.strip() }}", False), ("{{ document[:9] }}", False)),
        *(("{{ messages[1].content[0] }}", False), ("{{ document or query }}", False)),
        ("{% if document %}{{ document }}{% endif %}", False),
        ("{% if 'w1' in document %}{{ document }}{% endif %}", False),
        ("{% set d = document %}{{ d if d != 'w1' else query }}", False),
        ("{% for word in document %}{{ word }}{% endfor %}", False),
        ("{% for letter in document | reverse %}{{ letter }}{% endfor %}", False),
        ("{% filter upper %}{{ document }}{% endfilter %}", False),
        ("{{ messages | map(attribute='content') | map('upper') | first }}", False),
        ("{{ messages | map(attribute='content') | first | first }}", False),
        ("{{ messages | selectattr('content', 'eq', 'w1') | map(attribute='role') | first }}", False),
        ("{{ document | default('none', true) }}", False),
        ("{% generation %}{{ document }}{% endgeneration %}", False),
    ],
)  # fmt: skip
def test_a_plain_template_cannot_see_into_texts(segment: str, is_plain: bool) -> None:
    assert ScoreTemplate((segment,)).is_plain is is_plain


@pytest.mark.parametrize(
    "template",
    [
        ScoreTemplate(("query: {{ query }} passage: {{ document[:8] }}",)),
        ScoreTemplate(("passage: {{ document }} query: {{ query }} passage: {{ document }}",)),
        ScoreTemplate(("query: {{ query }} passage: {{ document if 'w7' in document else query }}",)),
    ],
)
def test_pairs_have_the_tokens_of_what_is_written(template: ScoreTemplate) -> None:
    documents = ["w5", "w6 w7 w8", ""]
    written = [template.written("w1", each, None)[0] for each in documents]
    expected = [found.tolist() for found in small.tokenizer(False).encode(written, "x")]
    found = score(["w1"] * 3, documents, pairs=PairRules(template=template))
    assert tokens_of(found) == expected
    with refused("documents", r"^documents\[0\] has [0-9]+ tokens, but at most 5 can be run"):
        score(["w1"], ["w7 w8 w9 w10"], pairs=PairRules(template=template), max_tokens=5)
    with refused("documents", "cannot be read through windows"):
        score(["w1"], ["w7 w8 w9 w10"], WINDOW_LONG, pairs=PairRules(template=template), max_tokens=5)
    ended = PairRules(template=replace(template, trailing_ids=(small.A, small.B)))
    for most in (1, 2):
        with refused("max_tokens", f"^{most} tokens leave no room beside 2 special tokens"):
            score(["w1"], ["w7 w8 w9 w10"], Truncation(max_tokens=most), pairs=ended)
