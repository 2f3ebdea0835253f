"""The texts of requests on their way to the engine. How each is read: `tests/unit/api/test_reading.py`."""

from typing import Any

import numpy as np

from tests.unit.calling_handlers import Caller, RecordingEngine

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


async def test_score_takes_every_pair_of_names(caller: Caller) -> None:
    for path in ("/score", "/v1/score"):
        for names in (
            ("queries", "documents"),
            ("queries", "items"),
            ("text_1", "text_2"),
            ("data_1", "data_2"),
        ):
            await caller.json(path, dict(zip(names, ("q", ["d", "e"]), strict=True)))
            assert caller.engine.calls[-1][1] == (["q"], ["d", "e"])
    await caller.json("/score", {"queries": ["p", "q"], "documents": ["d", "e"]})
    assert caller.engine.calls[-1][1] == (["p", "q"], ["d", "e"])


async def test_texts_that_make_no_sense_are_refused(caller: Caller) -> None:
    no_text, no_part = 'an object without a "text" or "content" string', "a content part that is not text"
    bad: list[tuple[str, dict[str, Any], str, str]] = [
        ("/score", {}, "queries and documents are missing", "queries"),
        ("/score", {"data_1": "q"}, "data_2 is missing", "data_2"),
        ("/score", {"queries": [], "documents": "d"}, "queries is empty; give at least one text", "queries"),
        ("/score", {"queries": "q", "documents": []}, "documents is empty; give at least one", "documents"),
        ("/score", {"text_1": ["q", "r"], "text_2": ["b"] * 3}, "there are 2 queries and 3", "text_2"),
        ("/score", {"queries": "q", "items": [{"title": "x"}]}, f"items[0] is {no_text}", "items"),
        ("/rerank", {"query": {}, "documents": ["d"]}, f"query is {no_text}", "query"),
        ("/rerank", {"query": "q", "documents": ["d", {}]}, f"documents[1] is {no_text}", "documents"),
        ("/rerank", {"query": "q", "documents": [{"content": ["x"]}]}, f"has {no_part}", "documents"),
        (
            "/rerank",
            {"query": "q", "documents": [{"a": "x"}, {"b": "y"}], "rank_fields": ["a"]},
            "documents[1] has none of the fields that rank_fields names",
            "rank_fields",
        ),
    ]
    for path, body, message, param in bad:
        status, error = await caller.error(path, body)
        assert (status, error["param"]) == (400, param), body
        assert message in error["message"]


async def test_a_text_may_be_an_object_or_content_parts(caller: Caller) -> None:
    for content, text in (({"text": "a"}, "a"), ({"content": PARTS}, "one\ntwo")):
        await caller.json("/score", {"queries": content, "documents": [content, "z"]})
        assert caller.engine.calls[-1][1] == ([text], [text, "z"])
        await caller.json("/rerank", {"query": content, "documents": ["z", content]})
        assert caller.engine.calls[-1][1] == (text, ["z", text])


async def test_rank_fields_name_what_is_read_of_a_record(caller: Caller) -> None:
    records = [{"t": "a", "u": "b", "v": 1}]
    await caller.json("/rerank", {"query": "q", "documents": records, "rank_fields": ["v", "t"]})
    assert caller.engine.calls[0][1] == ("q", ["v: 1\nt: a"])


async def test_texts_come_before_documents(caller: Caller) -> None:
    answer = await caller.json("/rerank", {"query": "q", "documents": ["d"], "texts": ["t", "u"]})
    assert isinstance(answer, list)
    assert caller.engine.calls[0][1] == ("q", ["t", "u"])


async def test_token_ids_need_a_server_that_accepts_them(engine: RecordingEngine) -> None:
    caller, accepting = Caller(engine), Caller(engine, accept_token_ids=True)
    for path in ("/v1/embeddings", "/pooling", "/classify"):
        for given in ("a", ["a", "b"]):
            await caller.post(path, {"input": given})
            assert engine.calls[-1][1] == ([given] if isinstance(given, str) else given,)
        for ids in ([101, 102], [[101], [101, 102]]):
            engine.calls.clear()
            status, error = await caller.error(path, {"input": ids})
            assert (status, error["param"], engine.calls) == (400, "input", [])
            assert "--accept-token-ids" in error["message"]
            await accepting.post(path, {"input": ids})
            assert engine.calls[0][1] == (ids if isinstance(ids[0], list) else [ids],)


async def test_a_texts_own_token_ids_give_its_vector(engine: RecordingEngine) -> None:
    caller = Caller(engine, accept_token_ids=True)
    ids = (await caller.json("/tokenize", {"text": "hello world"}))["tokens"]
    answer = await caller.json("/v1/embeddings", {"input": ids})
    expected = await caller.json("/v1/embeddings", {"input": "hello world"})
    np.testing.assert_allclose(answer["data"][0]["embedding"], expected["data"][0]["embedding"], atol=1e-6)


async def test_inputs_are_texts_or_pairs_of_texts(caller: Caller) -> None:
    for given, texts, pairs in (
        ("a", ["a"], None),
        (["a", "b"], ["a"], ["b"]),
        ([["a"], ["b"]], ["a", "b"], None),
        ([["a", "b"], ["c", "d"]], ["a", "c"], ["b", "d"]),
    ):
        await caller.post("/predict", {"inputs": given})
        method, read, options = caller.engine.calls[-1]
        assert (method, read, options["text_pairs"]) == ("classify", (texts,), pairs)
