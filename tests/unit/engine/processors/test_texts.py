"""Single texts: tokens, prompts, lengths, expansion and pooled tokens; errors and shortest sequences."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maxsimd.engine.checkpoint import ListwiseRules, PairRules, RoleRules
from maxsimd.engine.checkpoint.model import Expansion
from maxsimd.engine.checkpoint.templates import ScoreTemplate
from maxsimd.engine.errors import InvalidRequestError, ModelLoadError
from maxsimd.engine.media import Picture
from maxsimd.engine.processors.embedding import EmbeddingPlan
from maxsimd.engine.processors.pages import OpenContent
from maxsimd.engine.processors.registry import check_room, shortest_sequences
from maxsimd.engine.processors.text.builder import LongInputs, TextBuilder
from maxsimd.engine.processors.text.tokenization import PART_TEXTS, TextTokenizer, longest_first
from maxsimd.engine.requests import CUT_LONG, REFUSE_LONG, EmbedRequest, Truncation
from maxsimd.scheduler import ResultSlot, Role
from tests.unit.engine.processors import small_models as small
from tests.unit.engine.processors.small_models import CLS, MASK, SEP, A, ids, model, refused, tokens_of, words

ROLES = {
    "query": RoleRules(prompt="query: "),
    "document": RoleRules(prompt="passage: "),
    "prompts": {"query": "query: ", "named": "w900 w901 "},
}


def embed(made: Any, texts: Any, truncation: Truncation = REFUSE_LONG, **options: str) -> EmbeddingPlan:
    request = EmbedRequest(texts=tuple(texts), task="embed", truncation=truncation, **options)  # type: ignore[arg-type]
    return made.embedding.prepare(request, small.request_ids())


def one(
    rules: RoleRules, text: str | tuple[int, ...], truncation: Truncation = REFUSE_LONG, max_tokens: int = 64,
    special_tokens: bool = True,
) -> tuple[list[int], list[int] | None, int, int]:  # fmt: skip
    """A text's token ids, the positions that are pooled, how many are attended, and whether it was cut."""
    made = small.processors(model(text=rules, max_tokens=max_tokens), special_tokens=special_tokens)
    plan = embed(made, [text], truncation)
    tokens = plan.sequences[0].tokens
    pooled = None if tokens.pooled_positions is None else tokens.pooled_positions.tolist()
    return tokens.ids.tolist(), pooled, tokens.num_attended, plan.truncated


def test_a_named_prompt_takes_the_place_of_the_roles_own() -> None:
    made = small.processors(model(**ROLES))
    text = ids(2)
    assert tokens_of(embed(made, [words(2)])) == [[CLS, *text, SEP]]
    for input_type, prompt in (("query", small.QUERY_PROMPT), ("document", small.DOCUMENT_PROMPT)):
        assert tokens_of(embed(made, [words(2)], input_type=input_type)) == [[CLS, prompt, *text, SEP]]
    for options in ({}, {"input_type": "document"}):
        named = embed(made, [words(2)], prompt_name="named", **options)
        assert tokens_of(named) == [[CLS, *ids(2, 900), *text, SEP]]
    limited = small.processors(model(query=RoleRules("query: ", max_tokens=5), prompts={"named": "w900 "}))
    plan = embed(limited, [words(9)], input_type="query", prompt_name="named")
    assert tokens_of(plan) == [[CLS, *ids(1, 900), *ids(2), SEP]], "with the other rules of the role"
    for described, named in ((model(**ROLES), "named, query"), (model(), "none")):
        with refused("prompt_name", f"'other'; this model has: {named}"):
            embed(small.processors(described), ["a"], prompt_name="other")


def test_texts_and_token_ids_come_out_in_their_order() -> None:
    plan = embed(small.processors(model()), [words(1), (5, 6, 7), words(3)], input_type="document")
    assert tokens_of(plan) == [[CLS, *ids(1), SEP], [5, 6, 7], [CLS, *ids(3), SEP]]
    assert [sequence.payload.slot for sequence in plan.sequences] == [ResultSlot(7, i) for i in range(3)]
    assert (plan.num_values, plan.truncated, plan.usage.prompt_tokens) == (3, 0, 11)
    assert replace(plan, found={1: small.embedding()}).input_of(1) == "input[2]"
    for input_type, role in (("document", Role.DOCUMENT), ("query", Role.QUERY), (None, Role.TEXT)):
        plan = embed(small.processors(model()), ["a"], input_type=input_type)  # type: ignore[arg-type]
        assert plan.sequences[0].payload.role is role
    given_ids = tuple(range(20, 29))
    assert one(RoleRules(prompt="query: "), given_ids) == (list(given_ids), None, 9, 0)
    assert one(RoleRules(max_tokens=6), given_ids) == (list(given_ids[:6]), None, 6, 0)
    with pytest.raises(InvalidRequestError, match="has 9 tokens, but at most 8"):
        one(RoleRules(), given_ids, max_tokens=8)
    cut = one(RoleRules(), given_ids, Truncation(max_tokens=8, side="left"))
    assert cut == (list(given_ids[1:]), None, 8, 1)
    assert one(RoleRules(), (0, small.VOCABULARY - 1))[0] == [0, small.VOCABULARY - 1]
    for wrong in ((), (-1,), (small.VOCABULARY,), (5, small.VOCABULARY), (5, -1, 6), (2**70,)):
        with refused("input", rf"^input\[0\] must .* from 0 to {small.VOCABULARY - 1}$"):
            one(RoleRules(), wrong)


def test_a_text_that_does_not_fit_is_refused_or_cut() -> None:
    for taken, longest in ((10, 12), (12, 10)):
        made = small.processors(model(max_tokens=taken), longest=longest)
        for truncation in (REFUSE_LONG, CUT_LONG):
            fits = embed(made, [words(8)], truncation)
            assert (tokens_of(fits), fits.truncated) == ([[CLS, *ids(8), SEP]], 0)
        with refused("input", r"^input\[1\] has 11 tokens, but at most 10 can"):
            embed(made, ["a", words(9)])
        right = embed(made, [words(9)], CUT_LONG)
        assert (tokens_of(right), right.truncated) == ([[CLS, *ids(8), SEP]], 1)
        left = embed(made, [words(9), "w0", words(20)], Truncation(max_tokens=-1, side="left"))
        assert tokens_of(left) == [[CLS, *ids(8, 1), SEP], [CLS, *ids(1), SEP], [CLS, *ids(8, 12), SEP]]
        assert left.truncated == 2
        with refused("max_tokens", "is 11, more than the 10 tokens"):
            embed(made, ["a"], Truncation(max_tokens=11))
        assert tokens_of(embed(made, [words(5)], Truncation(max_tokens=3))) == [[CLS, *ids(1), SEP]]
        with refused("max_tokens", r"^2 tokens leave no room beside 2 special tokens$"):
            embed(made, [words(5)], Truncation(max_tokens=2))
    rules = RoleRules(max_tokens=6)
    assert one(rules, words(4)) == ([CLS, *ids(4), SEP], None, 6, 0)
    assert one(rules, words(5)) == ([CLS, *ids(4), SEP], None, 6, 0)
    # Tokens that the request cuts off beyond that do count.
    assert one(rules, words(9), Truncation(max_tokens=5)) == ([CLS, *ids(3), SEP], None, 5, 1)
    assert one(rules, words(9), Truncation(max_tokens=6)) == ([CLS, *ids(4), SEP], None, 6, 0)
    assert one(RoleRules(max_tokens=1), words(9)) == ([CLS, SEP], None, 2, 0)


def test_a_text_without_any_token_is_refused() -> None:
    assert one(RoleRules(), "")[0] == [CLS, SEP]
    for truncation in (Truncation(), Truncation(windows=True)):
        builder = TextBuilder(small.tokenizer(False), RoleRules(), LongInputs(truncation, 9, 0), "documents")
        with refused("documents", r"^documents\[3\] has no tokens; leave it out$"):
            builder.windows(builder.encode([""])[0], 3)


@pytest.mark.parametrize("attended", [True, False])
def test_a_query_is_filled_up_to_the_length_of_its_expansion(attended: bool) -> None:
    rules = RoleRules(expansion=Expansion(6, MASK, attended, fixed=False))
    assert one(rules, words(2)) == ([CLS, *ids(2), SEP, MASK, MASK], None, 6 if attended else 4, 0)
    assert one(rules, words(3)) == ([CLS, *ids(3), SEP, MASK], None, 6 if attended else 5, 0)
    assert one(rules, words(4)) == ([CLS, *ids(4), SEP], None, 6, 0)
    assert one(rules, words(5)) == ([CLS, *ids(5), SEP], None, 7, 0)
    # Texts that the request truncates are filled up all the same, as are token ids.
    cut = one(rules, words(9), Truncation(max_tokens=5))
    assert cut == ([CLS, *ids(3), SEP, MASK], None, 6 if attended else 5, 1)
    assert one(rules, (20, 21))[0] == [20, 21, MASK, MASK, MASK, MASK]
    types = embed(small.processors(model(text=rules)), ["a"]).sequences[0].tokens.type_ids
    assert types is not None
    assert types.tolist() == [0] * 6


def test_what_is_not_pooled() -> None:
    rules = RoleRules(skipped_ids=np.array([*ids(1, 1), SEP]))
    assert one(rules, words(4)) == ([CLS, *ids(4), SEP], [0, 1, 3, 4], 6, 0)
    assert one(RoleRules(skipped_ids=np.array([MASK])), words(4))[1] is None
    rules = RoleRules(prompt="query: ", pool_prompt=False, skipped_ids=np.array([SEP]))
    assert one(rules, words(2))[1] == [2, 3], "beside a prompt that is not pooled"
    rules = RoleRules(prompt="query: w900 ", pool_prompt=False)
    assert one(rules, words(2)) == ([CLS, small.QUERY_PROMPT, *ids(1, 900), *ids(2), SEP], [3, 4, 5], 6, 0)
    assert one(RoleRules(prompt="query: w900 "), words(2))[1] is None
    assert one(RoleRules(pool_prompt=False), words(2))[1] is None, "without a prompt everything is pooled"
    # Token ids are the caller's own: they have no prompt.
    assert one(rules, (20, 21, 22, 23, 24))[1] is None
    rules = RoleRules(prompt="query: w900 w901 ", pool_prompt=False)
    # [CLS] and three tokens of the prompt leave nothing to pool but [SEP].
    assert one(rules, words(2), Truncation(max_tokens=5))[1] == [4]
    bare = {"special_tokens": False}
    assert one(rules, words(2), Truncation(max_tokens=4), **bare)[1] == [3]  # type: ignore[arg-type]
    assert one(rules, words(2), Truncation(max_tokens=3), **bare)[1] is None  # type: ignore[arg-type]


def windows_of(rules: RoleRules, length: int, truncation: Truncation, max_tokens: int | None = None) -> Any:
    made = small.tokenizer()
    limited = replace(truncation, max_document_tokens=max_tokens)
    builder = TextBuilder(made, rules, LongInputs(limited, 64, 0), "documents")
    built = builder.windows(builder.encode([words(length)])[0], 0)
    return [(window.tokens.ids.tolist(), window.truncated) for window in built]


def test_every_window_stands_behind_the_prompt() -> None:
    truncation = Truncation(max_tokens=9, windows=True, window_overlap=1)
    for length, own_length, bodies in (
        (12, None, [(0, 5), (4, 9), (8, 12)]), (13, None, [(0, 5), (4, 9), (8, 13)]),
        (12, 8, [(0, 4), (3, 7), (6, 10), (9, 12)]), (5, None, [(0, 5)]), (0, None, [(0, 0)]),
    ):  # fmt: skip
        rules = RoleRules(words(2, 900) + " ", max_tokens=own_length)
        expected = [[CLS, *ids(2, 900), *ids(stop - start, start), SEP] for start, stop in bodies]
        assert windows_of(rules, length, truncation) == [(tokens, False) for tokens in expected]


def test_windows_read_no_more_than_is_wanted() -> None:
    through_windows = Truncation(max_tokens=6, windows=True)
    first = ([CLS, *ids(4), SEP], True)
    for length, truncation, most, expected in (
        (20, through_windows, 6, [first, ([CLS, *ids(2, 4), SEP], True)]),
        (20, through_windows, 4, [first]),
        (4, through_windows, 4, [([CLS, *ids(4), SEP], False)]),
        (20, Truncation(max_tokens=6), None, [first]),
    ):
        assert windows_of(RoleRules(), length, truncation, most) == expected
    rules = RoleRules(prompt=words(4, 900) + " ")
    assert len(windows_of(rules, 3, Truncation(max_tokens=7, windows=True))) == 3
    with pytest.raises(InvalidRequestError, match=r"documents\[0\] .* windows of 0 tokens beside 6 others"):
        windows_of(rules, 3, Truncation(max_tokens=6, windows=True))


@settings(max_examples=60)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 50))
@example(9, 9, 5)
def test_longest_first_cuts_as_the_tokenizers_library_does(first: int, second: int, room: int) -> None:
    library = small.fast_tokenizer(special_tokens=False).backend_tokenizer
    library.enable_truncation(room, strategy="longest_first")
    encoding = library.encode("a " * first, "b " * second)
    assert longest_first(first, second, room) == (encoding.ids.count(A), encoding.ids.count(small.B))


def test_texts_become_tokens_and_tokens_texts() -> None:
    made = small.tokenizer()
    [(start, encoding)] = made.read("w0 w1", "text")
    assert (start, encoding.ids, encoding.tokens) == (0, ids(2), ["w0", "w1"])
    assert made.decode([small.QUERY_MARKER, *ids(2)]) == "[QUERY] w0 w1", "special tokens included"
    known = made.token(CLS), made.token_id("w0"), made.vocabulary_size
    assert known == ("[CLS]", ids(1)[0], small.VOCABULARY)
    in_two_parts = made.encode(words(PART_TEXTS + 1).split(), "documents")
    assert np.concatenate(in_two_parts).tolist() == ids(PART_TEXTS + 1)
    original = small.fast_tokenizer()
    original.backend_tokenizer.enable_padding(length=9)
    original.backend_tokenizer.enable_truncation(4)
    made = TextTokenizer(original)
    assert [len(tokens) for tokens in made.encode(["w0", words(7)], "documents")] == [1, 7]
    assert made.single.special_tokens == 2
    with pytest.raises(InvalidRequestError, match="object has no fast tokenizer"):
        TextTokenizer(object())


NOT_UNICODE = "broken \ud800"
# The document is in the first segment, so that no tokens stand before it.
TEMPLATE = ScoreTemplate(("{{ document }} passage: {{ query }}", "instruct: {{ instruction }}"), "w9")
LISTWISE = ListwiseRules("[QUERY]", "[DOCUMENT]", context=1000)
QUERY = RoleRules("Instruct: w8\nQuery: ", expansion=Expansion(12, MASK, attended=True, fixed=False))

MODELS: dict[str, dict[str, Any]] = {
    "late interaction": {"query": QUERY},
    "bi-encoder": {"query": QUERY, "score_task": "embed"},
    "pairs by the tokenizer": {"score_task": "classify"},
    "pairs by a template": {"score_task": "classify", "pairs": PairRules(template=TEMPLATE)},
    "listwise": {"score_task": "rank", "listwise": LISTWISE, "max_tokens": 1000},
}


def prepare(kind: str, queries: list[str], documents: list[str], **options: str) -> None:
    request = small.score_request(queries, documents, **options)  # type: ignore[arg-type]
    small.processors(model(**MODELS[kind])).scores.prepare(request, small.request_ids())


@pytest.mark.parametrize("kind", MODELS)
def test_a_text_that_is_not_unicode_is_refused_by_its_field(kind: str) -> None:
    for param, queries, documents in (
        ("queries", ["w1", NOT_UNICODE], ["w3", "w4"]),
        ("documents", ["w1", "w2"], ["w3", NOT_UNICODE]),
    ):
        with refused(param, rf"^{param}\[1\] has half of a character"):
            prepare(kind, queries, documents)
    if kind != "pairs by the tokenizer":
        with refused("instruction", "^instruction has half of a character"):
            prepare(kind, ["w1"], ["w2"], instruction=NOT_UNICODE)
    with refused("input", r"^input\[1\] has half of a character"):
        request = EmbedRequest(texts=("w1", NOT_UNICODE), task="embed")
        small.processors(model()).embedding.prepare(request, small.request_ids())


PROMPTED = model(
    query=RoleRules("query: w1 "),
    document=RoleRules("passage: ", max_tokens=3),
    text=RoleRules(expansion=Expansion(6, MASK, True, fixed=False)),
    max_tokens=6,
)


def test_model_and_step_must_hold_the_shortest_sequences() -> None:
    expanded = RoleRules("query: w1 ", expansion=Expansion(4, MASK, True, fixed=False))
    # A template without an instruction of its own, and one with two words in its place.
    templated = MODELS["pairs by a template"]
    for described, expected in (
        (PROMPTED, {"a query": 5, "a document": 3, "a text": 6}),
        (model(), {"a query": 3, "a document": 3, "a text": 3}),
        # Longer than it is filled up to.
        (model(query=expanded), {"a query": 5, "a document": 3, "a text": 3}),
        (model(score_task="classify"), {"a pair": 5, "a text": 3}),
        (model(**templated), {"a pair": 5, "a text": 3}),
        (model(**templated, instruction="w1 w2"), {"a pair": 6, "a text": 3}),
    ):
        assert shortest_sequences(described, small.tokenizer()) == expected
    assert shortest_sequences(model(), small.tokenizer(special_tokens=False))["a text"] == 1
    plain, instructed = (
        shortest_sequences(model(**MODELS["listwise"], instruction=own), small.tokenizer())
        for own in (None, "w1 w2")
    )
    assert instructed["a query with one document"] == plain["a query with one document"] + 4
    too_long = r"^a text of 'small' has at least 6 tokens .* input is 5 tokens; raise max_model_len if it"
    for chunked in (True, False):
        check_room(PROMPTED, small.tokenizer(), 6, chunked)
        with pytest.raises(ModelLoadError, match=too_long):
            check_room(replace(PROMPTED, max_tokens=5), small.tokenizer(), 100, chunked)
    check_room(PROMPTED, small.tokenizer(), 5, chunked=True)
    with pytest.raises(ModelLoadError, match="takes no more than 5; raise max_batch_tokens to at least 6"):
        check_room(PROMPTED, small.tokenizer(), 5, chunked=False)


def test_digests_tell_contents_apart() -> None:
    one, two = (Picture(np.full((4, 6, 3), value, dtype=np.uint8)) for value in (1, 2))
    contents: list[tuple[Picture | str, ...]] = [
        *((one,), (two,), (one, ""), ("", one), (one, "a"), ("a", one), (one, "a", "b"), (one, "ab")),
        *((one, two), (two, one), (one, "a", two), (one, one)),
    ]
    digests = [OpenContent(parts).digest for parts in contents]
    for first, second in combinations(range(len(contents)), 2):
        assert digests[first] != digests[second], (contents[first], contents[second])
    assert OpenContent((one, "a")).digest == OpenContent((one, "a")).digest
