"""Every error's answer, and what all answers are made of."""

import json
import threading

import msgspec

from maxsimd.api import answer as answers
from maxsimd.api.answer import Answer, ApiError, as_api_error, error_answer
from maxsimd.api.handlers.rerank import Score
from maxsimd.engine import errors

BAD, BUSY, INTERNAL = "BadRequestError", "ServiceUnavailableError", "InternalServerError"
STARTING = "the server is starting or shutting down; try again shortly"
DEAD = "the engine has died and the server must be restarted"
UNEXPECTED = "internal error; the log has it under this request's id"


def test_every_class_of_error_has_its_answer() -> None:
    for error, status, kind, message, param, retry_after in (
        (ApiError(418, "no", "pot", retry_after=1.5, kind="Tea"), 418, "Tea", "no", "pot", "2"),
        (errors.InvalidRequestError("wrong", "top_n"), 400, BAD, "wrong", "top_n", None),
        (msgspec.DecodeError("cut"), 400, BAD, "the body is not valid JSON: cut", None, None),
        (msgspec.ValidationError("Is bad - at `$.a[0].b`"), 400, BAD, "a[0].b: is bad", "a", None),
        (errors.QueueFullError("full", 1.2), 429, "QueueFullError", "full", None, "2"),
        (errors.QueueFullError("slow", 3.0, "rate"), 429, "RateLimitError", "slow", None, "3"),
        (errors.RequestTooLargeError("too much"), 413, "RequestTooLargeError", "too much", None, None),
        (errors.RequestTimeoutError("late"), 504, "TimeoutError", "late", None, None),
        (errors.EngineNotReadyError("x"), 503, BUSY, STARTING, None, "5"),
        (errors.EngineDeadError("x"), 503, BUSY, DEAD, None, "30"),
        (errors.RequestFailedError("failed"), 500, INTERNAL, "failed", None, None),
        (RuntimeError("inside"), 500, INTERNAL, UNEXPECTED, None, None),
    ):
        answer = error_answer(as_api_error(error))
        assert answer.status == status
        assert json.loads(answer.body) == {
            "error": {"message": message, "type": kind, "param": param, "code": status},
            "detail": message,
        }
        json_alone = {"Content-Type": "application/json"}
        assert answer.headers == json_alone | ({"Retry-After": retry_after} if retry_after else {})


async def test_large_answers_are_encoded_in_a_thread() -> None:
    for items, characters, in_thread in (
        (500, 0, False), (501, 0, True), (1, 100_199, False), (1, 100_200, True),
    ):  # fmt: skip
        threads = []

        def build(threads: list[int] = threads) -> list[Score]:
            threads.append(threading.get_ident())
            return [Score(1, 0.5)]

        answer = await answers.wire_answer(build, items, characters)
        assert (threads != [threading.get_ident()]) == in_thread, (items, characters)
        body = b'[{"index":1,"score":0.5,"object":"score"}]'
        assert answer == Answer(200, {"Content-Type": "application/json"}, body)
