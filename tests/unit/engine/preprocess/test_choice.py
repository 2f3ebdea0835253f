"""What holds for every way to prepare a request: what an error names, what the device is handed, and the
shortest sequences."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from maxsimd.engine.checkpoint import ListwiseRules, PairRules, RoleRules
from maxsimd.engine.checkpoint.model import Expansion
from maxsimd.engine.checkpoint.score_template import ScoreTemplate
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.media import Picture
from maxsimd.engine.preprocess import check_room
from maxsimd.engine.preprocess.listwise import listwise_prompt
from maxsimd.engine.preprocess.pages import OpenContent
from maxsimd.engine.preprocess.shortest import shortest_sequences
from maxsimd.engine.preprocess.tokenization import TextTokenizer
from maxsimd.engine.requests import EmbedRequest
from maxsimd.scheduler import Sequence
from tests.unit.engine.preprocess.preprocessing import (
    MASK,
    model,
    preprocessor,
    refused,
    request_ids,
    score_request,
    tokenizer,
)

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


def sequences(kind: str, queries: list[str], documents: list[str], **options: str) -> list[Sequence]:
    request = score_request(queries, documents, **options)  # type: ignore[arg-type]
    return preprocessor(model(**MODELS[kind])).score(request, request_ids()).sequences


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("param", ["queries", "documents"])
def test_a_text_that_is_not_unicode_is_refused_by_its_field(kind: str, param: str) -> None:
    texts = {"queries": ["w1", "w2"], "documents": ["w3", "w4"]}
    texts[param][1] = NOT_UNICODE
    with refused(param, f"^{param} holds a text that is not valid"):
        sequences(kind, texts["queries"], texts["documents"])


def test_instructions_and_inputs_not_in_unicode_are_refused() -> None:
    for kind in MODELS.keys() - {"pairs by the tokenizer"}:
        with refused("instruction", r"^instruction holds a text that is not valid"):
            sequences(kind, ["w1"], ["w2"], instruction=NOT_UNICODE)
    with refused("input", r"^input holds a text that is not valid"):
        preprocessor(model()).embed(EmbedRequest(texts=("w1", NOT_UNICODE), task="embed"), request_ids())


def of_int32(made: list[Sequence]) -> None:
    for sequence in made:
        types = sequence.tokens.type_ids
        assert types is not None
        assert len(types) == len(sequence.tokens)
        assert {sequence.tokens.ids.dtype, types.dtype} == {np.dtype(np.int32)}


@pytest.mark.parametrize("kind", MODELS)
def test_token_ids_and_their_types_are_int32(kind: str) -> None:
    of_int32(sequences(kind, ["w1", ""], ["w2 w3", ""]))


def test_token_ids_and_types_of_single_texts_are_int32() -> None:
    for rules in (RoleRules(), QUERY):
        request = EmbedRequest(texts=("w1", (20, 21), ""), task="embed")
        of_int32(preprocessor(model(text=rules)).embed(request, request_ids()).sequences)


def _letters() -> TextTokenizer:
    """One token a character."""
    vocabulary = {token: i for i, token in enumerate(("[UNK]", "[QUERY]", "[DOCUMENT]"))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]"))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("late interaction", {"a query": len(QUERY.prompt) + 1, "a document": 1, "a text": 1}),
        ("pairs by the tokenizer", {"a pair": 2, "a text": 1}),
        ("pairs by a template", {"a pair": len("a passage: a") + len("instruct: w9"), "a text": 1}),
        ("listwise", {"a query with one document": len(listwise_prompt("a", ["a"], None, LISTWISE))}),
    ],
)
def test_the_shortest_texts_have_one_character(kind: str, expected: dict[str, int]) -> None:
    assert shortest_sequences(model(**MODELS[kind]), _letters()) == expected


PROMPTED = model(
    query=RoleRules("query: w1 "),
    document=RoleRules("passage: ", max_tokens=3),
    text=RoleRules(expansion=Expansion(6, MASK, True, fixed=False)),
    max_tokens=6,
)


def test_each_role_has_a_shortest_sequence_of_its_own() -> None:
    assert shortest_sequences(PROMPTED, tokenizer()) == {"a query": 5, "a document": 3, "a text": 6}
    assert shortest_sequences(model(), tokenizer()) == {"a query": 3, "a document": 3, "a text": 3}
    assert shortest_sequences(model(), tokenizer(special_tokens=False))["a text"] == 1
    expanded = model(query=RoleRules("query: w1 ", expansion=Expansion(4, MASK, True, fixed=False)))
    assert shortest_sequences(expanded, tokenizer())["a query"] == 5, "longer than it is filled up to"


@pytest.mark.parametrize(("kind", "more"), [("pairs by a template", 1), ("listwise", 4)])
def test_an_instruction_lengthens_the_shortest_sequence(kind: str, more: int) -> None:
    """Two words, in the place of the template's one, or between two tags."""
    plain, instructed = (
        next(iter(shortest_sequences(model(**MODELS[kind], instruction=own), tokenizer()).values()))
        for own in (None, "w1 w2")
    )
    assert instructed == plain + more


def test_model_and_step_must_hold_the_shortest_sequence() -> None:
    too_long = r"^a text of 'small' has at least 6 tokens .* the longest input is 5 tokens"
    for chunked in (True, False):
        check_room(PROMPTED, tokenizer(), 6, chunked)
        with pytest.raises(ModelLoadError, match=too_long):
            check_room(replace(PROMPTED, max_tokens=5), tokenizer(), 100, chunked)
    check_room(PROMPTED, tokenizer(), 5, chunked=True)
    message = "a step takes no more than 5; raise max_batch_tokens to at least 6"
    with pytest.raises(ModelLoadError, match=message):
        check_room(PROMPTED, tokenizer(), 5, chunked=False)


def test_digests_tell_contents_apart() -> None:
    first, second = (Picture(np.full((4, 6, 3), value, dtype=np.uint8)) for value in (1, 2))
    contents = [
        (first,),
        (second,),
        (first, ""),
        ("", first),
        (first, "a"),
        ("a", first),
        (first, "a", "b"),
        (first, "ab"),
        (first, second),
        (second, first),
        (first, "a", second),
        (first, first),
    ]
    digests = [OpenContent(parts).digest for parts in contents]
    for one, other in combinations(range(len(contents)), 2):
        assert digests[one] != digests[other], (contents[one], contents[other])
    assert OpenContent((first, "a")).digest == OpenContent((first, "a")).digest
