"""The texts of requests in all the shapes that clients send, on their way to the engine."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from maxsimd.engine import EngineConfig
from tests.unit.calling_handlers import Caller, RecordingEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[RecordingEngine]:
    async with RecordingEngine(EngineConfig(dtype="float32", threads=1)) as engine:
        yield engine


@pytest.fixture
def caller(engine: RecordingEngine) -> Caller:
    return Caller(engine)


NAMES = [("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(("first", "second"), NAMES)
async def test_score_takes_every_pair_of_names(caller: Caller, path: str, first: str, second: str) -> None:
    for queries, documents in (("q", "d"), (["q"], ["d"]), ("q", ["d", "e"]), (["p", "q"], ["d", "e"])):
        caller.engine.calls.clear()
        await caller.json(path, {first: queries, second: documents})
        (call,) = caller.engine.calls
        assert call[1] == (
            [queries] if isinstance(queries, str) else queries,
            [documents] if isinstance(documents, str) else documents,
        )


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({}, "queries and documents are missing", "queries"),
        ({"documents": "d"}, "queries and documents are missing", "queries"),
        ({"queries": "q"}, "documents is missing", "documents"),
        ({"data_1": "q"}, "data_2 is missing", "data_2"),
        ({"text_1": "q"}, "text_2 is missing", "text_2"),
        ({"queries": [], "documents": "d"}, "queries is empty; give at least one text", "queries"),
        ({"queries": "q", "documents": []}, "documents is empty; give at least one text", "documents"),
        (
            {"queries": ["q", "r"], "documents": ["b", "c", "d"]},
            "Input lengths must be either 1:1, 1:N or N:N; there are 2 queries and 3 documents",
            "documents",
        ),
        (
            {"queries": "q", "items": [{"title": "x"}]},
            'items[0] is an object without a "text" or "content" string',
            "items",
        ),
        (
            {"data_1": ["q", {"text": 1}], "data_2": "d"},
            'data_1[1] is an object without a "text" or "content" string',
            "data_1",
        ),
    ],
)
async def test_texts_to_score_that_make_no_sense_are_refused(
    caller: Caller, body: dict[str, Any], message: str, param: str
) -> None:
    status, error = await caller.error("/score", body)
    assert (status, error["message"], error["param"]) == (400, message, param)


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
CONTENTS: list[tuple[Any, str]] = [
    ("a", "a"),
    ("", ""),
    ({"text": "a"}, "a"),
    ({"text": ""}, ""),
    ({"content": "a"}, "a"),
    ({"content": "a", "text": "b"}, "b"),
    ({"content": PARTS}, "one\ntwo"),
    ({"text": PARTS[:1]}, "one"),
]


@pytest.mark.parametrize(("content", "text"), CONTENTS)
async def test_a_text_may_be_an_object_or_content_parts(caller: Caller, content: Any, text: str) -> None:
    await caller.json("/score", {"queries": content, "documents": [content, "z"]})
    await caller.json("/rerank", {"query": content, "documents": ["z", content]})
    texts = [call[1] for call in caller.engine.calls if call[0] == "rerank" or call[1][0] == [text]]
    assert texts[0] == ([text], [text, "z"])
    assert texts[1] == (text, ["z", text])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, 'documents[1] is an object without a "text" or "content" string'),
        ({"text": 7}, 'documents[1] is an object without a "text" or "content" string'),
        (
            {"content": [{"type": "other", "text": "x"}]},
            "documents[1] has a content part that is not text; only text can be scored",
        ),
        (
            {"content": [PARTS[0], {"type": "text"}]},
            "documents[1] has a content part that is not text; only text can be scored",
        ),
        (
            {"content": ["x"]},
            "documents[1] has a content part that is not text; only text can be scored",
        ),
    ],
)
async def test_content_that_is_no_text_is_refused(caller: Caller, content: Any, message: str) -> None:
    status, error = await caller.error("/rerank", {"query": "q", "documents": ["d", content]})
    assert (status, error["message"], error["param"]) == (400, message, "documents")
    body = {"query": content, "documents": ["d"]}
    status, error = await caller.error("/rerank", body)
    assert (status, error["param"]) == (400, "query")
    assert error["message"] == message.replace("documents[1]", "query")


@pytest.mark.parametrize(
    ("documents", "fields", "texts"),
    [
        (["a", {"t": "b"}], ["t"], ["a", "t: b"]),
        ([{"t": "a", "u": "b", "v": 1}], ["v", "t"], ["v: 1\nt: a"]),
        ([{"t": "a", "u": None}], ["t", "u", "w"], ["t: a"]),
        ([{"t": "a", "u": "b"}], ["u", "t", "u"], ["u: b\nt: a"]),
        ([{"text": "a", "t": "b"}], ["t"], ["t: b"]),
        ([{"text": "a", "t": "b"}], [], ["a"]),
        ([{"text": "a", "t": "b"}], None, ["a"]),
        ([{"t": 0}], ["t"], ["t: 0"]),
        ({"t": "a"}, ["t"], ["t: a"]),
    ],
)
async def test_rank_fields_say_which_fields_of_a_record_are_read(
    caller: Caller, documents: Any, fields: list[str] | None, texts: list[str]
) -> None:
    await caller.json("/rerank", {"query": "q", "documents": documents, "rank_fields": fields})
    assert caller.engine.calls[0][1] == ("q", texts)


async def test_a_record_without_any_of_the_rank_fields_is_refused(caller: Caller) -> None:
    body = {"query": "q", "documents": [{"a": "x"}, {"b": "y", "a": None}], "rank_fields": ["a"]}
    status, error = await caller.error("/rerank", body)
    message = "documents[1] has none of the fields that rank_fields names; name at least one that it has"
    assert (status, error["message"], error["param"]) == (400, message, "rank_fields")


async def test_texts_come_before_documents(caller: Caller) -> None:
    answer = await caller.json("/rerank", {"query": "q", "documents": ["d"], "texts": ["t", "u"]})
    assert isinstance(answer, list)
    assert caller.engine.calls[0][1] == ("q", ["t", "u"])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/classify"])
@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        (["a", "b"], ["a", "b"]),
    ],
)
async def test_input_is_a_text_or_texts(caller: Caller, path: str, given: Any, read: Any) -> None:
    await caller.post(path, {"input": given})
    assert caller.engine.calls[0][1] == (read,)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/classify"])
@pytest.mark.parametrize("given", [[101, 102], [[101], [101, 102]]])
async def test_token_ids_are_taken_only_where_the_server_is_started_for_them(
    engine: RecordingEngine, path: str, given: Any
) -> None:
    caller = Caller(engine)
    status, error = await caller.error(path, {"input": given})
    assert (status, error["param"]) == (400, "input")
    assert "--accept-token-ids" in error["message"]
    assert caller.engine.calls == []
    accepting = Caller(engine, accept_token_ids=True)
    await accepting.post(path, {"input": given})
    assert accepting.engine.calls[0][1] == (given if isinstance(given[0], list) else [given],)


async def test_a_texts_own_token_ids_give_its_vector(engine: RecordingEngine) -> None:
    caller = Caller(engine, accept_token_ids=True)
    ids = (await caller.json("/tokenize", {"text": "hello world"}))["tokens"]
    answer = await caller.json("/v1/embeddings", {"input": ids})
    expected = await caller.json("/v1/embeddings", {"input": "hello world"})
    np.testing.assert_allclose(answer["data"][0]["embedding"], expected["data"][0]["embedding"], atol=1e-6)


@pytest.mark.parametrize(
    ("given", "texts", "pairs"),
    [
        ("a", ["a"], None),
        (["a"], ["a"], None),
        (["a", "b"], ["a"], ["b"]),
        ([["a"], ["b"]], ["a", "b"], None),
        ([["a", "b"]], ["a"], ["b"]),
        ([["a", "b"], ["c", "d"]], ["a", "c"], ["b", "d"]),
        ([["a"], "b"], ["a", "b"], None),
    ],
)
async def test_inputs_are_texts_or_pairs_of_texts(
    caller: Caller, given: Any, texts: list[str], pairs: list[str] | None
) -> None:
    await caller.post("/predict", {"inputs": given})
    method, given_texts, options = caller.engine.calls[0]
    assert (method, given_texts, options["text_pairs"]) == ("classify", (texts,), pairs)
