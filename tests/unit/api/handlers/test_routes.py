"""What a route is made of: the methods that it takes, and what comes before its handler."""

from typing import Any

import pytest

from maxsimd.api import wire
from maxsimd.api.answer import Answer
from maxsimd.api.failures import ApiError
from maxsimd.api.handlers.route import LARGE_BODY, delete, get, post
from maxsimd.api.handlers.routes import table
from maxsimd.api.state import ServerState
from maxsimd.engine import EngineNotReadyError
from tests.unit.calling_handlers import Caller, Pieces, RecordingEngine

DONE = Answer(202)


class Handler:
    """Keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def __call__(self, *given: Any) -> Answer:
        self.calls.append(given)
        return DONE


async def test_a_table_has_the_work_of_every_method_of_every_path() -> None:
    async def read(state: ServerState) -> Answer:
        return DONE

    async def write(state: ServerState, request: Any) -> Answer:
        return DONE

    one, two, three = get("/one", read), delete("/one", read), post("/two", wire.TokenizeRequest, write)
    four = post("/one", wire.TokenizeRequest, write)
    assert table((one, two), (), (three, four)) == {
        "/one": {"GET": one.work, "HEAD": one.work, "DELETE": two.work, "POST": four.work},
        "/two": {"POST": three.work},
    }


@pytest.mark.parametrize("route_of", [get, delete])
async def test_a_route_without_a_body_reads_none(engine: RecordingEngine, route_of: Any) -> None:
    state, handler, body = Caller(engine).state, Handler(), Pieces([b"{}"])
    state.draining = True  # when the server is still looked after
    assert await route_of("/new", handler).work(state, body, "") is DONE
    assert handler.calls == [(state,)]
    assert body.read == 0


async def test_a_route_with_a_body_hands_its_handler_the_wire_type(engine: RecordingEngine) -> None:
    state, handler = Caller(engine, max_body_mb=1).state, Handler()
    route = post("/new", wire.TokenizeRequest, handler)
    assert await route.work(state, Pieces([b'{"text":', b' "d"}'.ljust(LARGE_BODY)]), "") is DONE
    assert await route.work(state, Pieces([b'{"model": "all-MiniLM-L6-v2", "text": "e"}']), "") is DONE
    assert handler.calls == [
        (state, wire.TokenizeRequest(text="d")),
        (state, wire.TokenizeRequest(model="all-MiniLM-L6-v2", text="e")),
    ]


async def test_a_handler_is_not_called_with_what_is_refused(engine: RecordingEngine) -> None:
    state, handler = Caller(engine, max_body_mb=1).state, Handler()
    route = post("/new", wire.TokenizeRequest, handler)
    for body, status in ((b'{"model": "nope", "text": "d"}', 404), (b" " * (1024 * 1024 + 1), 413)):
        with pytest.raises(ApiError) as refused:
            await route.work(state, Pieces([body]), "")
        assert refused.value.status == status
    state.draining = True
    unread = Pieces([b'{"text": "d"}'])
    with pytest.raises(EngineNotReadyError):
        await route.work(state, unread, "")
    assert unread.read == 0
    assert handler.calls == []
