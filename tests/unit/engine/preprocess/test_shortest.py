"""A model that cannot run even the shortest request is refused when it loads."""

import pytest

from maxsimd.engine.checkpoint import LoadedModel, RoleRules
from maxsimd.engine.checkpoint.model import Expansion
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.preprocess import check_room
from maxsimd.engine.preprocess.shortest import shortest_sequences
from tests.unit.engine.preprocess.preprocessing import MASK, model, tokenizer

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


def changed(max_tokens: int) -> LoadedModel:
    return model(query=PROMPTED.query, document=PROMPTED.document, text=PROMPTED.text, max_tokens=max_tokens)


def test_the_model_must_take_the_shortest_sequence() -> None:
    for chunked in (True, False):
        check_room(changed(6), tokenizer(), 6, chunked)
        with pytest.raises(
            ModelLoadError, match=r"^a text of 'small' has at least 6 tokens .* the longest input is 5 tokens"
        ):
            check_room(changed(5), tokenizer(), 100, chunked)


def test_a_step_must_hold_the_shortest_sequence() -> None:
    check_room(PROMPTED, tokenizer(), 5, chunked=True)
    with pytest.raises(
        ModelLoadError, match="a step takes no more than 5; raise max_batch_tokens to at least 6"
    ):
        check_room(PROMPTED, tokenizer(), 5, chunked=False)
