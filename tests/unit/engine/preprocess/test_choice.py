"""What holds for every way to prepare a request: what an error names, what the device is handed, and the
shortest sequences."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from maxsimd.engine.checkpoint import ListwiseRules, PairRules, RoleRules
from maxsimd.engine.checkpoint.model import Expansion
from maxsimd.engine.checkpoint.score_template import ScoreTemplate
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.media import Picture
from maxsimd.engine.preprocess import check_room
from maxsimd.engine.preprocess.pages import OpenContent
from maxsimd.engine.preprocess.shortest import shortest_sequences
from maxsimd.engine.requests import EmbedRequest
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


def prepare(kind: str, queries: list[str], documents: list[str], **options: str) -> None:
    request = score_request(queries, documents, **options)  # type: ignore[arg-type]
    preprocessor(model(**MODELS[kind])).score(request, request_ids())


@pytest.mark.parametrize("kind", MODELS)
def test_a_text_that_is_not_unicode_is_refused_by_its_field(kind: str) -> None:
    for param, queries, documents in (
        ("queries", ["w1", NOT_UNICODE], ["w3", "w4"]),
        ("documents", ["w1", "w2"], ["w3", NOT_UNICODE]),
    ):
        with refused(param, f"^{param} holds a text that is not valid"):
            prepare(kind, queries, documents)
    if kind != "pairs by the tokenizer":
        with refused("instruction", r"^instruction holds a text that is not valid"):
            prepare(kind, ["w1"], ["w2"], instruction=NOT_UNICODE)
    with refused("input", r"^input holds a text that is not valid"):
        preprocessor(model()).embed(EmbedRequest(texts=("w1", NOT_UNICODE), task="embed"), request_ids())


PROMPTED = model(
    query=RoleRules("query: w1 "),
    document=RoleRules("passage: ", max_tokens=3),
    text=RoleRules(expansion=Expansion(6, MASK, True, fixed=False)),
    max_tokens=6,
)


def test_each_role_has_a_shortest_sequence_of_its_own() -> None:
    expanded = RoleRules("query: w1 ", expansion=Expansion(4, MASK, True, fixed=False))
    # Of a template without an instruction of its own, and of one with two words in its place.
    templated = MODELS["pairs by a template"]
    for described, expected in (
        (PROMPTED, {"a query": 5, "a document": 3, "a text": 6}),
        (model(), {"a query": 3, "a document": 3, "a text": 3}),
        (
            model(query=expanded),
            {"a query": 5, "a document": 3, "a text": 3},
        ),  # longer than it is filled up to
        (model(score_task="classify"), {"a pair": 5, "a text": 3}),
        (model(**templated), {"a pair": 5, "a text": 3}),
        (model(**templated, instruction="w1 w2"), {"a pair": 6, "a text": 3}),
    ):
        assert shortest_sequences(described, tokenizer()) == expected
    assert shortest_sequences(model(), tokenizer(special_tokens=False))["a text"] == 1
    plain, instructed = (
        shortest_sequences(model(**MODELS["listwise"], instruction=own), tokenizer())
        for own in (None, "w1 w2")
    )
    assert instructed["a query with one document"] == plain["a query with one document"] + 4


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
    one, two = (Picture(np.full((4, 6, 3), value, dtype=np.uint8)) for value in (1, 2))
    contents: list[tuple[Picture | str, ...]] = [
        *((one,), (two,), (one, ""), ("", one), (one, "a"), ("a", one), (one, "a", "b"), (one, "ab")),
        *((one, two), (two, one), (one, "a", two), (one, one)),
    ]
    digests = [OpenContent(parts).digest for parts in contents]
    for first, second in combinations(range(len(contents)), 2):
        assert digests[first] != digests[second], (contents[first], contents[second])
    assert OpenContent((one, "a")).digest == OpenContent((one, "a")).digest
