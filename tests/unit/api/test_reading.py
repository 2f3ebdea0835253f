"""Requests in the engine's terms: functions of the wire types alone."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from maxsimd.api import reading
from maxsimd.api.handlers.classification import PredictRequest, read_sequences
from maxsimd.api.handlers.rerank import RerankRequest, ScoreRequest, texts_to_rank, texts_to_score
from maxsimd.api.reading import content_of, each_picture, has_pictures, with_request_field_names
from maxsimd.engine import CUT_LONG, InvalidRequestError, Truncation
from maxsimd.engine.media import Content, EncodedPicture, PictureUrl

REFUSE = Truncation()
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@contextmanager
def _refused(param: str, message: str) -> Iterator[None]:
    with pytest.raises(InvalidRequestError) as caught:
        yield
    assert (str(caught.value), caught.value.param) == (message, param)


def test_texts_come_under_several_names_of_which_one_is_read() -> None:
    for first, second in (
        ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"),
    ):  # fmt: skip
        body: dict[str, Any] = {first: "q", second: ["d", {"text": "e"}]}
        assert texts_to_score(ScoreRequest(**body), 9) == (["q"], ["d", "e"])
    several = ScoreRequest(queries="q", documents=None, items="i", data_1="1", data_2="2")
    assert texts_to_score(several, 9) == (["q"], ["i"])
    several.documents = "d"
    assert texts_to_score(several, 9) == (["q"], ["d"])
    assert texts_to_rank(RerankRequest(query="q", documents=["d"], texts=["t"]), 9) == ("q", ["t"])


def test_missing_texts_are_told_by_their_field() -> None:
    empty = 'queries[1] is an object without a "text" or "content" string'
    for body, param, message in (
        ({}, "queries", "queries and documents are missing"),
        ({"documents": "d", "data_2": "e"}, "queries", "queries and documents are missing"),
        ({"queries": "q"}, "documents", "documents is missing"),
        ({"data_1": "q"}, "data_2", "data_2 is missing"),
        ({"queries": ["q", {}], "documents": "d"}, "queries", empty),
    ):
        with _refused(param, message):
            texts_to_score(ScoreRequest(**body), 9)
    with _refused("documents", "documents is missing"):
        texts_to_rank(RerankRequest(query="q"), 9)
    records: list[Any] = [{"a": "x"}, {"a": None, "b": "y"}]
    message = "documents[1] has none of the fields that rank_fields names; name at least one that it has"
    with _refused("rank_fields", message):
        texts_to_rank(RerankRequest(query="q", documents=records, rank_fields=["a"]), 9)
    with _refused("documents", 'documents[1] is an object without a "text" or "content" string'):
        texts_to_rank(RerankRequest(query="q", documents=["a", {}]), 9)


def test_a_text_is_a_string_or_an_object_that_holds_one() -> None:
    for content, text in (
        *(("a", "a"), ({"text": "a", "content": "b"}, "a"), ({"content": "b"}, "b")),
        *(({"content": PARTS}, "one\ntwo"), ({"text": PARTS}, "one\ntwo")),
    ):
        assert reading.as_items(content, "documents") == [text]
        assert reading.as_items(["z", content], "documents") == ["z", text]
    for content in ({}, {"text": 7}, {"content": None}):
        with _refused("query", 'query is an object without a "text" or "content" string'):
            reading.as_item(content, "query", "query")
    no_part = "documents[1] has a content part that is not text; only text can be scored"
    text: dict[str, Any] = {"type": "text"}
    for part in ("x", text, text | {"text": 7}, {"type": "other", "text": "x"}, {"text": "x"}, None):
        with _refused("documents", no_part):
            reading.as_items(["a", {"content": [PARTS[0], part]}], "documents")


def test_rank_fields_name_what_is_read_of_a_record() -> None:
    for documents, fields, texts in (
        (["a", {"t": "b"}], ["t"], ["a", "t: b"]),
        ([{"t": "a", "u": None, "v": 0}], ["v", "u", "t", "w", "v"], ["v: 0\nt: a"]),
        ([{"text": "a", "t": "b"}], [], ["a"]),
        ({"text": "a", "t": "b"}, None, ["a"]),
        ([{"n": 1.5, "m": 1e17, "k": -2.5e-07}], ["n", "m", "k"], ["n: 1.5\nm: 1.0e+17\nk: -2.5e-07"]),
        (
            [{"by": [{"name": "Ada", "ok": True}, "Bo: b"], "at": {"x": 1.5, "y": "\u00fc"}, "new": False}],
            ["by", "at", "new"],
            ["by:\n- name: Ada\n  ok: true\n- 'Bo: b'\nat:\n  x: 1.5\n  y: \u00fc\nnew: false"],
        ),
    ):
        request = RerankRequest(query={"text": "q"}, documents=documents, rank_fields=fields)
        assert texts_to_rank(request, 9) == ("q", texts)


def test_many_records_and_many_rank_fields_are_no_product() -> None:
    lookups = [0]

    class Name(str):
        def __hash__(self) -> int:
            lookups[0] += 1
            return super().__hash__()

    records = [{"z": "a", f"f{i}": "b"} for i in range(100)]
    names = [Name(f"f{i}") for i in range(1000)] + ["z"]
    _, texts = texts_to_rank(RerankRequest(query="q", documents=records, rank_fields=names), 100)
    assert lookups[0] < 5 * len(names)
    assert texts[:2] == ["f0: b\nz: a", "f1: b\nz: a"]


def test_rank_fields_have_a_bounded_size_and_depth() -> None:
    def read(*values: Any) -> int:
        records = [{"a": value} for value in values]
        _, texts = texts_to_rank(RerankRequest(query="q", documents=records, rank_fields=["a"]), 99)
        return len(texts)

    def nested(depth: int) -> list[Any]:
        return [nested(depth - 1)] if depth > 1 else []

    # The second is beyond what is left with the first.
    half = [[1] * 4997, dict.fromkeys(map(str, range(2498)), 1)]
    assert (read(*half, *["t"] * 9), read(nested(32))) == (11, 1)
    many = "of documents[%d], the lists and objects that rank_fields names have more than 10000"
    deep = "the field `a` of documents[0] has more than 32 lists and objects within each other; "
    for said, rows in ((many % 1, [half[0], [*half[0], 1]]), (many % 2, [*half, []]), (deep, [nested(400)])):
        with pytest.raises(InvalidRequestError, match=re.escape(said)):
            read(*rows)


def test_teis_words_count_more_than_the_servers_default() -> None:
    for truncate, default, truncation in (
        *((True, default, CUT_LONG) for default in ("truncate", "window", "error")),
        *((False, default, REFUSE) for default in ("truncate", "window", "error")),
    ):
        assert reading.truncation_by_switch(truncate, None, default) == truncation
        assert reading.truncation_by_switch(truncate, "Right", default) == replace(truncation, side="right")


def test_sequences_are_inputs_or_told_by_their_index() -> None:
    for value, texts, pairs, are_many in (
        ("", [""], None, False), (["a", "b"], ["a"], ["b"], False), ([["a"], "b"], ["a", "b"], None, True),
        ([["a", "b"], ["c", "d"]], ["a", "c"], ["b", "d"], True),
    ):  # fmt: skip
        assert read_sequences(PredictRequest(inputs=value), 9) == (texts, pairs, are_many)
    for value, where in (
        (["a"] * 300 + [None] + ["b"] * 210, "input[300] is null: "),
        (["a", 1], "input[1] is a token id, but input[0] is a text: "),
        ([1, True], "input[1] is neither a text nor token ids: "),
        ([[1], [2, "a"]], "input[1] is neither a text nor token ids: "),
        ([], ""),
    ):
        rest = "input must be a text, a list of texts, a list of token ids or a list of those, and not empty"
        with _refused("input", where + rest):
            reading.as_inputs(value, 999)
    with pytest.raises(InvalidRequestError, match=r"^inputs\[1\] is null: inputs must be a text, "):
        read_sequences(PredictRequest(inputs=["a", None]), 9)


def _renamed(error: InvalidRequestError, **names: str) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught, with_request_field_names(**names):
        raise error
    return caught.value


def test_an_error_names_the_fields_that_were_sent() -> None:
    for message, param, said, names in (
        ("queries[7] is long", "queries", "queries[7] is long", "queries"),
        ("windows of documents[1] share", "window_overlap", "windows of items[1] share", "window_overlap"),
        ("it has no scores", None, "it has no scores", None),
    ):
        queries, documents = ScoreRequest(queries="q", items=["d"], text_1="1", text_2="2").field_names
        error = _renamed(InvalidRequestError(message, param), queries=queries, documents=documents)
        assert (str(error), error.param) == (said, names)
    error = InvalidRequestError("documents[0] beside queries[0]", "queries")
    named = _renamed(error, queries="query", documents="texts")
    assert (str(named), named.param) == ("texts[0] beside query", "query")


DATA = "data:image/png;base64,AAAA"
URL = "https://example.com/a.png"
PICTURE, LINK = EncodedPicture(DATA), PictureUrl(URL)


def test_parts_are_read_in_their_order() -> None:
    for content, parts in (
        *(({"image": DATA}, [PICTURE]), ({"image": "AAAA"}, [EncodedPicture("AAAA")])),
        *(({"image": URL}, [LINK]), ({"image": {"url": URL}}, [LINK])),
        ({"image": "file:///a.png"}, [PictureUrl("file:///a.png")]),
        ({"text": "a", "image": DATA}, [PICTURE, "a"]),
        ({"type": "image_url", "image_url": {"url": DATA}}, [PICTURE]),
        ({"type": "input_image", "image_url": DATA}, [PICTURE]),
        ({"content": [{"type": "image_url", "image_url": URL}, {"type": "text", "text": "a"}]}, [LINK, "a"]),
        ({"content": ["a", {"image": DATA}, {"type": "input_text", "text": "b"}]}, ["a", PICTURE, "b"]),
        ({"content": [{"type": "image_base64", "image_base64": DATA}]}, [PICTURE]),
        ({"content": [{"text": "a", "image": "AAAA"}]}, [EncodedPicture("AAAA"), "a"]),
        # A text stays a text even if it looks like something else.
        ({"content": [{"type": "text", "text": URL}, {"image": DATA}]}, [URL, PICTURE]),
    ):
        assert has_pictures(content)
        assert content_of(content, "documents[0]", "documents") == Content.of(parts)
        assert reading.as_items([content], "documents") == [Content.of(parts)]
    for content in ({"text": URL}, {"content": DATA}, {"content": [{"type": "text", "text": "a"}]}):
        assert not has_pictures(content)
    assert reading.as_items([URL, DATA], "documents") == [URL, DATA]


def test_what_is_no_picture_is_refused_by_its_name() -> None:
    for content, message in (
        ({"image": None, "image_url": 7}, "documents[0] has no picture"),
        ({"image": DATA, "image_url": DATA}, "documents[0] has several pictures"),
        ({"image_url": "AAAA"}, "documents[0] has a URL that cannot be read"),
        ({"image": {"url": "AAAA"}}, "documents[0] has a URL that cannot be read"),
        ({"type": "image_url"}, "documents[0] is neither a text nor a picture"),
        ({"type": "video_url", "video_url": URL}, "documents[0] is neither a text nor a picture"),
        ({"content": [{"image": DATA}, 7]}, "documents[0].content[1] is neither a text nor a picture"),
        ({"content": [{"image": DATA}, {"type": "other", "text": "a"}]}, "neither a text nor a picture"),
        ({"image": DATA, "content": []}, "has content parts and something beside them"),
        ({"text": "a", "content": [{"image": DATA}]}, "content parts and something beside"),
        ({"text": "a", "image": DATA, "audio": URL}, "neither a text nor a picture"),
    ):
        with pytest.raises(InvalidRequestError) as raised:
            reading.as_items([content], "documents")
        assert message in str(raised.value)
        assert raised.value.param == "documents"


def test_an_object_of_pictures_alone_stands_for_a_list() -> None:
    two = {"content": [{"image": DATA}, {"type": "image_url", "image_url": {"url": URL}}]}
    assert reading.as_items(two, "documents") == [Content.of([PICTURE]), Content.of([LINK])]
    assert reading.as_items([two], "documents") == [Content.of([PICTURE, LINK])]
    for other in ({"content": [{"image": DATA}]}, {"content": [{"image": DATA}, "a"]}, "a", {"image": DATA}):
        assert each_picture(other) is None
    assert reading.as_inputs(["a", {"image": DATA}], 5) == ["a", Content.of([PICTURE])]
    reading.check_token_ids([Content.of([PICTURE])], accepted=False)
