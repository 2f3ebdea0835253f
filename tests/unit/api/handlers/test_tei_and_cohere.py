"""Answers in the shapes of text-embeddings-inference, Cohere and others, and texts as tokens and back."""

import base64
import json
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from maxsimd.api.answer import ApiError
from maxsimd.api.handlers.rerank import RANK
from maxsimd.api.handlers.route import answered_as
from maxsimd.engine import EngineConfig
from maxsimd.engine.processors.text.breaks import LONGEST_PIECE
from maxsimd.engine.processors.text.tokenization import MOST_DECODED
from tests.nearly import nearly
from tests.unit.calling_handlers import Caller, RecordingEngine, error_of

TEXTS = ["Paris is in France.", "Berlin is in Germany.", "Cats purr."]
SENTENCES = {"source_sentence": "Where is Paris?", "sentences": TEXTS}


async def test_vectors_and_similarities_are_bare_lists(caller: Caller, engine: RecordingEngine) -> None:
    for path in ("/embed", "/"):
        expected = (await engine.embed(TEXTS)).embeddings
        answer = np.array(await caller.json(path, {"inputs": TEXTS}))
        np.testing.assert_allclose(answer, expected / np.linalg.norm(expected, axis=1)[:, None], atol=1e-6)
        np.testing.assert_allclose(await caller.json(path, {"inputs": TEXTS[0]}), answer[:1], atol=1e-5)
    answer = await caller.post("/embed", {"inputs": TEXTS, "normalize": False})
    assert json.loads(answer.body) == await caller.json("/embed", {"inputs": TEXTS})
    assert "has no effect" in answer.headers["x-maxsimd-warnings"]
    answer = await caller.json("/embed_all", {"inputs": TEXTS[:2]})
    expected = (await engine.embed_tokens(TEXTS[:2])).embeddings
    for given, right in zip(answer, expected, strict=True):
        np.testing.assert_allclose(given, right, atol=1e-5)
    for path in ("/similarity", "/"):
        answer = await caller.json(path, {"inputs": SENTENCES})
        first, *others = (await engine.embed([SENTENCES["source_sentence"], *TEXTS])).embeddings
        cosines = [first @ each / np.linalg.norm(first) / np.linalg.norm(each) for each in others]
        assert answer == pytest.approx(cosines, abs=1e-5)
        options = {"truncate": False}
        for one, other, where in (("a", "b " * 300, "sentences[0]"), ("a " * 300, "b", "source_sentence")):
            body = {"inputs": {"source_sentence": one, "sentences": [other]}, "parameters": options}
            await caller.refused(path, body, 400, "inputs", f"inputs.{where} has")
        empty = {"inputs": {"source_sentence": "a", "sentences": []}}
        await caller.refused(path, empty, 400, says="inputs.sentences is empty; give at least one text")


async def test_ollamas_shape(caller: Caller) -> None:
    body = {"model": "all-MiniLM-L6-v2", "input": ["one", "two"], "dimensions": 3}
    answer = await caller.json("/api/embed", body)
    plain = await caller.json("/v1/embeddings", body)
    assert answer["embeddings"] == nearly([each["embedding"] for each in plain["data"]])
    assert answer["prompt_eval_count"] == plain["usage"]["prompt_tokens"]
    assert (answer["model"], answer["load_duration"]) == ("all-MiniLM-L6-v2", 0)
    assert answer["total_duration"] > 1_000
    assert (await caller.ask("GET", "/api/version")).body == (await caller.ask("GET", "/version")).body


async def test_tokens_become_text(caller: Caller) -> None:
    ids = (await caller.json("/tokenize", {"text": "hello world"}))["tokens"]
    assert await caller.json("/decode", {"ids": ids}) == ["hello world"]
    assert await caller.json("/decode", {"ids": [ids, ids]}) == ["hello world"] * 2
    with_special = await caller.json("/decode", {"ids": ids, "skip_special_tokens": False})
    assert with_special == ["[CLS] hello world [SEP]"]
    assert await caller.json("/decode", {"ids": []}) == [""]
    await caller.refused("/decode", {"ids": [[1], [99_999_999]]}, 400, "ids")
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
        await caller.refused("/detokenize", {"tokens": tokens}, 400, "tokens", message)


async def test_a_trailing_slash_or_a_base_is_ignored(engine: RecordingEngine) -> None:
    body = {"query": "q", "documents": ["d"], "input": "d", "inputs": "d"}
    for given, meant in (
        ("/rerank/", "/rerank"), ("/v1/v2/rerank", "/v2/rerank"), ("/v1/v1/embeddings", "/v1/embeddings"),
        ("/v1/embed_all", "/embed_all"), ("/infinity/embeddings", "/embeddings"),
        ("/infinity/v1/rerank/", "/infinity/v1/rerank"), ("/infinity/v1/embed_all", "/embed_all"),
    ):  # fmt: skip
        caller = Caller(engine)
        answer, expected = await caller.json(given, body), await caller.json(meant, body)
        assert len(answer) == len(expected)
        assert caller.metric("maxsimd_http_requests_total", route=meant, status="200") == 2


async def test_a_model_has_a_card_under_each_of_its_names(engine: RecordingEngine) -> None:
    caller = Caller(engine, served_model_name=("mine", "org/other"))
    listed = json.loads((await caller.ask("GET", "/v1/models")).body)["data"]
    assert [card["id"] for card in listed] == ["mine", "org/other"]
    for name in ("mine", "org/other"):
        for base in ("", "/v1", "/infinity", "/infinity/v1"):
            answer = await caller.ask("GET", f"{base}/v1/models/{name}")
            assert json.loads(answer.body)["id"] == name
        assert (await caller.post("/rerank", {"model": name, "query": "q", "documents": ["d"]})).status == 200
    answer = await caller.ask("GET", "/v1/models/nope")
    message = "The model `nope` does not exist; served here: `mine`, `org/other`."
    assert (answer.status, error_of(answer)["message"]) == (404, message)
    assert (await caller.ask("POST", "/v1/models/mine")).status == 405
    assert caller.metric("maxsimd_http_requests_total", route="/v1/models/{name}", status="200") == 8


async def test_coheres_shapes(caller: Caller, engine: RecordingEngine) -> None:
    expected = (await engine.embed(TEXTS)).embeddings
    answer = await caller.json("/v1/embed", {"texts": TEXTS})
    np.testing.assert_allclose(answer["embeddings"], expected, atol=1e-6)
    assert (answer["response_type"], answer["texts"]) == ("embeddings_floats", TEXTS)
    billed = {"input_tokens": (await engine.embed(TEXTS)).usage.prompt_tokens}
    assert answer["meta"] == {"api_version": {"version": "1"}, "billed_units": billed}
    by_type = await caller.json("/v1/embed", {"texts": TEXTS, "embedding_types": ["float"]})
    np.testing.assert_allclose(by_type["embeddings"]["float"], expected, atol=1e-6)
    assert by_type["response_type"] == "embeddings_by_type"
    assert list((await caller.json("/v2/embed", {"texts": TEXTS}))["embeddings"]) == ["float"]
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    body = {"inputs": inputs, "embedding_types": ["float", "base64", "binary", "ubinary"]}
    answer = await caller.json("/v2/embed", body)
    assert answer["texts"] == TEXTS
    found = answer["embeddings"]
    np.testing.assert_allclose(found["float"], expected, atol=1e-6)
    decoded = [np.frombuffer(base64.b64decode(each), dtype="<f4") for each in found["base64"]]
    np.testing.assert_allclose(decoded, expected, atol=1e-6)
    np.testing.assert_array_equal(np.unpackbits(np.uint8(found["ubinary"]), axis=1), expected > 0)
    np.testing.assert_array_equal(np.array(found["binary"]) + 128, found["ubinary"])
    body = {"inputs": inputs, "encoding_format": "base64", "output_dtype": "ubinary"}
    voyage = await caller.json("/v1/multimodalembeddings", body)
    assert [[*base64.b64decode(each["embedding"])] for each in voyage["data"]] == found["ubinary"]
    tokens = dict.fromkeys(("prompt_tokens", "total_tokens", "text_tokens"), billed["input_tokens"])
    assert voyage["usage"] == tokens | {"image_pixels": 0, "video_pixels": 0}


RANKING: dict[str, dict[str, Any]] = {
    "/rerank": {"query": "q", "documents": TEXTS, "top_n": "1"},
    "/v1/rerank": {"query": "q", "texts": TEXTS},
    "/score": {"queries": "q", "documents": TEXTS},
    "/v1/score": {"text_1": "q", "text_2": TEXTS},
}
VECTORS: dict[str, dict[str, Any]] = {
    "/embed": {"inputs": TEXTS}, "/similarity": {"inputs": SENTENCES}, "/v1/embeddings": {"input": TEXTS},
    "/pooling": {"input": TEXTS, "task": "embed"},
}  # fmt: skip
LABELS: dict[str, dict[str, Any]] = {
    "/predict": {"inputs": TEXTS[0]}, "/classify": {"input": TEXTS},
    "/pooling": {"input": TEXTS, "task": "classify"},
}  # fmt: skip


def _without_what_changes(body: bytes) -> Any:
    answer = json.loads(body)
    if isinstance(answer, dict):
        for name in ("id", "created", "usage", "meta"):
            answer.pop(name, None)
    return answer


async def _compare(caller: Caller, route: str, bodies: dict[str, dict[str, Any]]) -> None:
    for path, body in bodies.items():
        expected = await caller.ask("POST", path, body)
        answer = await caller.ask("POST", route, body)
        assert (expected.status, answer.status) == (200, 200), answer.body
        assert _without_what_changes(answer.body) == _without_what_changes(expected.body), path


async def _kind(caller: Caller) -> Any:
    return json.loads((await caller.ask("GET", "/info")).body)["model_type"]


async def test_info_by_kind(caller: Caller, bert_cross_encoder: str, three_label_classifier: str) -> None:
    info = json.loads((await caller.ask("GET", "/info")).body)
    assert (info["model_id"], info["max_input_length"]) == ("all-MiniLM-L6-v2", 256)
    # Dify's plugin looks at the first key alone.
    assert list(info["model_type"]) == ["reranker", "embedding"]
    assert (info["model_type"]["embedding"], info["auto_truncate"]) == ({"pooling": "mean"}, True)
    assert (info["model_dtype"], info["max_batch_tokens"]) == ("float32", 2048)
    await _compare(caller, "/invocations", RANKING | VECTORS)
    options: dict[str, Any] = {"dtype": "float32", "threads": 1}
    async with RecordingEngine(EngineConfig(model=bert_cross_encoder, **options)) as engine:
        reranker = Caller(engine)
        assert list(await _kind(reranker)) == ["reranker"]
        await _compare(reranker, "/", {"/rerank": {"query": "q", "texts": ["a", "b"]}})
        await _compare(reranker, "/invocations", RANKING | LABELS)
    async with RecordingEngine(EngineConfig(model=three_label_classifier, **options)) as engine:
        classifier = Caller(engine)
        assert list(await _kind(classifier)) == ["classifier"]
        await _compare(classifier, "/", {"/predict": {"inputs": "a"}})


async def test_what_is_no_request_is_refused(caller: Caller) -> None:
    for body, message in (
        ({}, "query and documents to rank"),
        ([], "Expected"),
        ({"query": "q", "documents": []}, "documents is empty"),
        ({"queries": "q"}, "documents is missing"),
    ):
        await caller.refused("/invocations", body, 400, says=message)
    await caller.refused("/invocations", {"input": "a", "model": "none"}, 404, "model")
    failing = RANK._replace(read=Mock(side_effect=RecursionError))
    with pytest.raises(ApiError, match="arrays and objects in the body are nested too deeply"):
        await answered_as(failing, caller.state, {"query": "q"}, "/")


async def test_text_becomes_tokens(caller: Caller) -> None:
    for name in ("text", "prompt"):
        for shows in (True, False, None):
            answer = await caller.json("/tokenize", {name: "Hello world", "return_token_strs": shows})
            strings = ["[CLS]", "hello", "world", "[SEP]"] if shows else None
            counts = {"count": 4, "max_model_len": 256}
            assert answer == counts | {"tokens": [101, 7592, 2088, 102], "token_strs": strings}
    answer = await caller.json("/tokenize", {"text": "hello world", "add_special_tokens": False})
    assert answer["tokens"] == [7592, 2088]
    assert (await caller.json("/tokenize", {"text": "", "prompt": "hello"}))["count"] == 2, "the empty text"
    text = "Hello world. " * 5000
    answer = await caller.json("/tokenize", {"text": text, "return_token_strs": True})
    (tokens,) = caller.engine.tokenizer.encode([text], "text")
    assert (answer["tokens"], answer["count"]) == ([101, *tokens.tolist(), 102], 15_002)
    assert answer["token_strs"] == ["[CLS]", *["hello", "world", "."] * 5000, "[SEP]"]
    [of_tei] = await caller.json("/tokenize", {"inputs": [text], "add_special_tokens": False})
    pieces = [text[token["start"] : token["stop"]] for token in of_tei]
    assert pieces == [token["text"] for token in of_tei] == ["Hello", "world", "."] * 5000


async def test_what_is_too_long_is_refused_by_its_name(caller: Caller, engine: RecordingEngine) -> None:
    for name in ("text", "prompt"):
        await caller.refused("/tokenize", {name: "x" * (LONGEST_PIECE + 1)}, 400, name)
    for body in ({"text": "a " * 1_000_001}, {"inputs": ["a " * 500_000, "a " * 500_001]}):
        says = "has 2,000,002 characters, but at most 2,000,000 become tokens"
        await caller.refused("/tokenize", body, 413, says=says)
    small = Caller(engine, max_bodies_mb=1, max_body_mb=1)
    for body in ({"text": "a " * 5000}, {"inputs": ["a " * 4000] * 2}):
        await small.refused("/tokenize", body, 413, says="more than the 4369 tokens that an answer has room")
    for path, body, name in (
        ("/v1/embeddings", {"input": "a"}, "input_type"),
        ("/v1/embeddings", {"input": "a"}, "prompt_name"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "model"),
        ("/v2/embed", {"texts": ["a"]}, "input_type"),
    ):
        error = await caller.refused(path, {**body, name: "x" * 4097}, 400, name, "4096")
        assert "xx" not in error["message"]
    await Caller(engine, max_documents=3).refused("/decode", {"ids": [[101]] * 4}, 413, says="ids")


async def test_inputs_become_tokens_with_their_characters(caller: Caller) -> None:
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
