"""Every error's answer, and what all answers are made of."""

import json
import re
import threading
import time

import msgspec
import pytest

from maxsimd.api import answer as answers
from maxsimd.api import failures, wire
from maxsimd.api.answer import Answer
from maxsimd.api.failures import ApiError, as_api_error, error_answer
from maxsimd.engine import (
    EngineDeadError,
    EngineNotReadyError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    RequestTimeoutError,
    RequestTooLargeError,
    Usage,
)

BAD, BUSY, INTERNAL = "BadRequestError", "ServiceUnavailableError", "InternalServerError"
STARTING = "the server is starting or shutting down; try again shortly"
DEAD = "the engine has died and the server must be restarted"
UNEXPECTED = "internal error; the log has it under this request's id"


def test_every_class_of_error_has_its_answer() -> None:
    for error, status, kind, message, param, retry_after in (
        (ApiError(418, "Teapot", "is short", "pot", 1.5), 418, "Teapot", "is short", "pot", "2"),
        (ApiError(418, "Teapot", "is stout"), 418, "Teapot", "is stout", None, None),
        (InvalidRequestError("wrong", "top_n"), 400, BAD, "wrong", "top_n", None),
        (InvalidRequestError("wrong"), 400, BAD, "wrong", None, None),
        (msgspec.DecodeError("cut"), 400, BAD, "the body is not valid JSON: cut", None, None),
        (msgspec.ValidationError("Is bad - at `$.a[0].b`"), 400, BAD, "a[0].b: is bad", "a", None),
        (msgspec.ValidationError("Is bad - at `$.X`"), 400, BAD, "X: is bad", "X", None),
        (QueueFullError("full", 1.2), 429, "QueueFullError", "full", None, "2"),
        (QueueFullError("full", 3.0), 429, "QueueFullError", "full", None, "3"),
        (QueueFullError("slow", 3.0, "rate"), 429, "RateLimitError", "slow", None, "3"),
        (RequestTooLargeError("too much"), 413, "RequestTooLargeError", "too much", None, None),
        (RequestTimeoutError("late"), 504, "TimeoutError", "late", None, None),
        (EngineNotReadyError("x"), 503, BUSY, STARTING, None, "5"),
        (EngineDeadError("x"), 503, BUSY, DEAD, None, "30"),
        (RequestFailedError("failed"), 500, INTERNAL, "failed", None, None),
        (RuntimeError("inside"), 500, INTERNAL, UNEXPECTED, None, None),
    ):
        answer = error_answer(as_api_error(error))
        assert answer.status == status
        assert json.loads(answer.body) == {
            "error": {"message": message, "type": kind, "param": param, "code": status}
        }
        json_alone = {"Content-Type": "application/json"}
        assert answer.headers == json_alone | ({"Retry-After": retry_after} if retry_after else {})


class Inner(msgspec.Struct):
    size: int


class Outer(msgspec.Struct, kw_only=True):
    count: int
    inner: Inner | None = None
    rows: list[list[int]] = []


def test_a_wrong_body_is_told_where_and_what() -> None:
    bad: list[tuple[bytes, str, str | None]] = [
        (b"{}", "count is missing", "count"),
        (b'{"count": 1, "inner": {}}', "inner.size is missing", "inner"),
        (b'{"count": "x"}', "count: expected `int`, got `str`", "count"),
        (b'{"count": 1, "inner": {"size": "x"}}', "inner.size: expected `int`, got `str`", "inner"),
        (b'{"count": 1, "rows": [[1], [2, "x"]]}', "rows[1][1]: expected `int`, got `str`", "rows"),
        (b"[]", "the body is wrong: Expected `object`, got `array`", None),
        (b"3", "the body is wrong: Expected `object`, got `int`", None),
    ]
    for body, message, param in bad:
        with pytest.raises(msgspec.ValidationError) as raised:
            msgspec.json.decode(body, type=Outer)
        error = as_api_error(raised.value)
        assert (error.status, error.kind, str(error), error.param) == (400, BAD, message, param)


def test_what_is_refused_before_a_handler_says_what_to_do() -> None:
    too_large = "the body is too large; send fewer documents at a time, or raise --max-body-mb"
    odd = "the body is not what its headers say, or not all of it; check Content-Encoding and Content-Length"
    not_utf8 = "the body is not valid JSON: a string is not UTF-8 (odd byte)"
    no_route = "there is no such route; GET /docs has those there are"
    no_key = "send a valid key as Authorization: Bearer KEY"
    other_encoding = "this Content-Encoding is not taken; use gzip, deflate, or none"
    wrong_method = failures.WrongMethodError(["POST", "GET"])
    for error, status, kind, message in (
        (failures.no_such_route(), 404, "NotFoundError", no_route),
        (wrong_method, 405, "MethodNotAllowedError", "this route takes GET, POST"),
        (failures.no_valid_key(), 401, "AuthenticationError", no_key),
        (failures.body_too_large(), 413, "RequestTooLargeError", too_large),
        (failures.body_not_unicode("odd byte"), 400, BAD, not_utf8),
        (failures.unreadable_body(), 400, BAD, odd),
        (failures.unknown_encoding(), 415, "UnsupportedMediaTypeError", other_encoding),
    ):
        found = (error.status, error.kind, str(error), error.param, error.retry_after)
        assert found == (status, kind, message, None, None)


def test_headers_are_added_and_the_rest_stays() -> None:
    plain = Answer(404, {"Content-Type": "a", "X-Id": "b"}, b"body")
    added = plain.with_headers(Retry_After="5", X_Id="c")
    headers = {"Content-Type": "a", "X-Id": "b", "Retry-After": "5"} | {"X-Id": "c"}
    assert added == Answer(404, headers, b"body")
    assert plain.headers == {"Content-Type": "a", "X-Id": "b"}


def test_a_page_is_json_that_people_read() -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert answers.json_page({"a": [1]}) == Answer(200, headers, b'{"a": [1]}')
    assert answers.json_page("dead", status=503) == Answer(503, headers, b'"dead"')


def test_usage_tells_of_the_cache_where_it_helped() -> None:
    assert answers.usage_of(Usage(9, 0, 0)) == wire.Usage(9, 9, None)
    details = wire.TokensDetails(cached_tokens=7, cached_documents=2)
    assert answers.usage_of(Usage(9, 7, 2)) == wire.Usage(9, 9, details)


def test_ids_are_new_each_time_and_times_are_the_clocks() -> None:
    first, second = answers.new_id("embd"), answers.new_id("embd")
    assert re.fullmatch("embd-[0-9a-f]{32}", first)
    assert first != second
    now = answers.now()
    assert type(now) is int
    assert abs(now - time.time()) < 5


async def test_large_answers_are_encoded_in_a_thread() -> None:
    for items, characters, in_thread in (
        (500, 0, False),
        (501, 0, True),
        (1, 100_199, False),
        (1, 100_200, True),
    ):
        threads = []

        def build(threads: list[int] = threads) -> list[wire.Score]:
            threads.append(threading.get_ident())
            return [wire.Score(1, 0.5)]

        answer = await answers.wire_answer(build, items, characters)
        assert (threads != [threading.get_ident()]) == in_thread, (items, characters)
        body = b'[{"index":1,"score":0.5,"object":"score"}]'
        assert answer == Answer(200, {"Content-Type": "application/json"}, body)
