"""What Cohere's routes for vectors answer, beside the engine's results."""

import base64

import numpy as np

from tests.unit.calling_handlers import Caller, RecordingEngine

TEXTS = ["Paris is in France.", "Cats purr."]


async def test_the_first_version_answers_lists_unless_types_are_named(
    caller: Caller, engine: RecordingEngine
) -> None:
    expected = (await engine.embed(TEXTS)).embeddings
    answer = await caller.json("/v1/embed", {"texts": TEXTS})
    np.testing.assert_allclose(answer["embeddings"], expected, atol=1e-6)
    assert (answer["response_type"], answer["texts"]) == ("embeddings_floats", TEXTS)
    assert answer["meta"] == {
        "api_version": {"version": "1"},
        "billed_units": {"input_tokens": (await engine.embed(TEXTS)).usage.prompt_tokens},
    }
    by_type = await caller.json("/v1/embed", {"texts": TEXTS, "embedding_types": ["float"]})
    np.testing.assert_allclose(by_type["embeddings"]["float"], expected, atol=1e-6)
    assert by_type["response_type"] == "embeddings_by_type"


async def test_the_second_version_answers_by_type(caller: Caller, engine: RecordingEngine) -> None:
    expected = (await engine.embed(TEXTS)).embeddings
    plain = await caller.json("/v2/embed", {"texts": TEXTS})
    assert list(plain["embeddings"]) == ["float"]
    body = {"texts": TEXTS, "embedding_types": ["float", "base64", "binary", "ubinary"]}
    found = (await caller.json("/v2/embed", body))["embeddings"]
    np.testing.assert_allclose(found["float"], expected, atol=1e-6)
    decoded = [np.frombuffer(base64.b64decode(each), dtype="<f4") for each in found["base64"]]
    np.testing.assert_allclose(decoded, expected, atol=1e-6)
    bits = np.unpackbits(np.array(found["ubinary"], dtype=np.uint8), axis=1)
    np.testing.assert_array_equal(bits == 1, expected > 0)
    np.testing.assert_array_equal(np.array(found["binary"]) + 128, found["ubinary"])


async def test_inputs_of_content_parts_are_texts(caller: Caller) -> None:
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    answer = await caller.json("/v2/embed", {"inputs": inputs})
    expected = await caller.json("/v2/embed", {"texts": TEXTS})
    assert answer["texts"] == TEXTS
    np.testing.assert_allclose(answer["embeddings"]["float"], expected["embeddings"]["float"], atol=1e-6)


async def test_what_cannot_be_embedded_is_a_400_that_names_the_field(caller: Caller) -> None:
    for body, param in (
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"inputs": []}, "inputs"),
        ({"images": ["data:image/png;base64,xyz"]}, "images"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "inputs"),
        ({"texts": ["a"], "input_type": "image"}, "input_type"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types"),
    ):
        status, error = await caller.error("/v2/embed", body)
        assert (status, error["param"]) == (400, param)


async def test_what_is_cut_is_said(caller: Caller) -> None:
    answer = await caller.json("/v2/embed", {"texts": ["word " * 300]})
    assert answer["warnings"][0].startswith("1 input was longer")
    status, error = await caller.error("/v2/embed", {"texts": ["word " * 300], "truncate": "NONE"})
    assert status == 400
    assert "at most 256" in error["message"]
