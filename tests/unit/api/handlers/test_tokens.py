"""The routes that show how the model reads a text: as tokens, and back."""

import numpy as np

from maxsimd.engine.processors.text.pieces import LONGEST_PIECE
from maxsimd.engine.processors.text.tokenization import MOST_DECODED
from tests.unit.calling_handlers import Caller, RecordingEngine


async def test_text_becomes_tokens(caller: Caller) -> None:
    for name in ("text", "prompt"):
        for shows in (True, False, None):
            answer = await caller.json("/tokenize", {name: "Hello world", "return_token_strs": shows})
            assert answer == {
                "tokens": [101, 7592, 2088, 102],
                "count": 4,
                "max_model_len": 256,
                "token_strs": ["[CLS]", "hello", "world", "[SEP]"] if shows else None,
            }
    answer = await caller.json("/tokenize", {"text": "hello world", "add_special_tokens": False})
    assert answer["tokens"] == [7592, 2088]
    answer = await caller.json("/tokenize", {"text": "", "prompt": "hello"})
    assert answer["count"] == 2, "an empty text is a text, and comes first"


async def test_the_tokens_of_a_long_text_are_those_that_are_run(caller: Caller) -> None:
    """Piece by piece they are written, and one after the other; characters count from the beginning."""
    text = "Hello world. " * 5000
    answer = await caller.json("/tokenize", {"text": text, "return_token_strs": True})
    (tokens,) = caller.engine.tokenizer.encode([text], "text")
    assert answer["tokens"] == [101, *tokens.tolist(), 102]
    assert answer["count"] == 15_002
    assert answer["token_strs"] == ["[CLS]", *["hello", "world", "."] * 5000, "[SEP]"]
    [of_tei] = await caller.json("/tokenize", {"inputs": [text], "add_special_tokens": False})
    pieces = [text[token["start"] : token["stop"]] for token in of_tei]
    assert pieces == [token["text"] for token in of_tei] == ["Hello", "world", "."] * 5000


async def test_a_text_that_cannot_be_tokenised_is_refused_by_its_name(caller: Caller) -> None:
    for name in ("text", "prompt"):
        status, error = await caller.error("/tokenize", {name: "x" * (LONGEST_PIECE + 1)})
        assert (status, error["param"]) == (400, name)


async def test_too_much_text_for_an_answer_is_a_413(caller: Caller) -> None:
    for body in ({"text": "a " * 1_000_001}, {"inputs": ["a " * 500_000, "a " * 500_001]}):
        status, error = await caller.error("/tokenize", body)
        assert status == 413
        assert "has 2,000,002 characters, but at most 2,000,000 become tokens" in error["message"]


async def test_tokens_become_text(caller: Caller) -> None:
    answer = await caller.json("/detokenize", {"tokens": [7592, 2088]})
    assert answer == {"text": "hello world", "prompt": "hello world"}
    assert (await caller.json("/detokenize", {"tokens": []}))["text"] == ""
    size = caller.engine.tokenizer.vocabulary_size
    await caller.json("/detokenize", {"tokens": [0, size - 1]})
    too_many = [101] * (MOST_DECODED + 1)
    for tokens, message in (
        ([0, size], f"tokens must be below {size}"),
        (too_many, f"has {MOST_DECODED + 1} tokens, but at most {MOST_DECODED} are decoded"),
    ):
        status, error = await caller.error("/detokenize", {"tokens": tokens})
        assert (status, error["param"]) == (400, "tokens")
        assert message in error["message"]


async def test_inputs_become_tokens_with_their_characters(caller: Caller) -> None:
    """text-embeddings-inference's shape."""
    text = "Hello world"
    [tokens] = await caller.json("/tokenize", {"inputs": text})
    assert tokens[0] == {"id": 101, "text": "[CLS]", "special": True, "start": None, "stop": None}
    assert tokens[1] == {"id": 7592, "text": "Hello", "special": False, "start": 0, "stop": 5}
    assert tokens[2] == {"id": 2088, "text": "world", "special": False, "start": 6, "stop": 11}
    assert tokens[3]["id"] == 102
    bare = await caller.json("/tokenize", {"inputs": [text, ""], "add_special_tokens": False})
    assert bare == [tokens[1:3], []]


async def test_a_texts_own_token_ids_give_its_vector(engine: RecordingEngine) -> None:
    caller = Caller(engine, accept_token_ids=True)
    ids = (await caller.json("/tokenize", {"text": "hello world"}))["tokens"]
    answer = await caller.json("/v1/embeddings", {"input": ids})
    expected = await caller.json("/v1/embeddings", {"input": "hello world"})
    np.testing.assert_allclose(answer["data"][0]["embedding"], expected["data"][0]["embedding"], atol=1e-6)
