"""Late chunking over HTTP: a vector for each chunk of a document."""

import numpy as np

from tests.unit.calling_handlers import Caller, RecordingEngine

CHUNKS = ["Berlin is the capital of Germany. ", "It lies on the Spree", " and has many lakes."]


async def test_chunks_come_as_texts_or_by_their_characters(caller: Caller) -> None:
    ends = np.cumsum([len(chunk) for chunk in CHUNKS]).tolist()
    spans = [*zip([0, *ends], ends, strict=False)]
    by_text = await caller.json("/v1/embeddings", {"input": CHUNKS, "late_chunking": True})
    by_character = await caller.json(
        "/v1/embeddings", {"input": "".join(CHUNKS), "late_chunking": True, "chunks": spans}
    )
    whole = await caller.json("/v1/embeddings", {"input": "".join(CHUNKS)})
    alone = await caller.json("/v1/embeddings", {"input": CHUNKS, "late_chunking": False})
    vectors = [np.array([item["embedding"] for item in answer["data"]]) for answer in (by_text, by_character)]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)
    assert [item["index"] for item in by_text["data"]] == [0, 1, 2]
    assert by_text["usage"] == whole["usage"]
    assert np.abs(vectors[0] - [item["embedding"] for item in alone["data"]]).max() > 0.01
    short = await caller.json("/v1/embeddings", {"input": CHUNKS, "late_chunking": True, "dimensions": 8})
    cut = vectors[0][:, :8]
    expected = cut / np.linalg.norm(cut, axis=1, keepdims=True)
    np.testing.assert_allclose([item["embedding"] for item in short["data"]], expected, atol=1e-6)


async def test_a_wrong_request_is_refused(caller: Caller) -> None:
    for path, more, param in (
        ("/v1/embeddings", {"input": ["a", "b"], "chunks": [[0, 1]]}, "chunks"),
        ("/v1/embeddings", {"input": "ab", "chunks": [[0, 1]], "late_chunking": False}, "chunks"),
        ("/v1/embeddings", {"input": "ab", "chunks": [[0, 3]], "late_chunking": True}, "chunks"),
        ("/v1/embeddings", {"input": "ab", "chunks": [], "late_chunking": True}, "chunks"),
        ("/v1/embeddings", {"input": ["a", " "], "late_chunking": True}, "input"),
        ("/v1/embeddings", {"input": "word " * 300, "late_chunking": True}, "input"),
        (
            "/v1/embeddings",
            {"input": "a b", "late_chunking": True, "truncate_prompt_tokens": 10},
            "truncate_prompt_tokens",
        ),
        ("/v1/multi-vector", {"input": "ab", "late_chunking": True}, "late_chunking"),
        ("/pooling", {"input": "ab", "late_chunking": True, "task": "token_embed"}, "late_chunking"),
    ):
        status, error = await caller.error(path, more)
        assert (status, error["param"]) == (400, param)


async def test_more_chunks_than_texts_may_be_sent_are_refused(engine: RecordingEngine) -> None:
    caller = Caller(engine, max_documents=2)
    body = {"input": "a b c", "late_chunking": True, "chunks": [[0, 1], [2, 3], [4, 5]]}
    status, _ = await caller.error("/v1/embeddings", body)
    assert status == 413
