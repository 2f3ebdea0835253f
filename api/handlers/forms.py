"""Requests whose wire type is known only once their fields are: what a route does where one path is for
several kinds of them."""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from maxsimd.api.answer import Answer
from maxsimd.api.failures import too_deep
from maxsimd.api.request_warnings import UnreadField, unread_fields
from maxsimd.api.state import ServerState

# A request as JSON has it.
Fields = dict[str, Any]


class Form(NamedTuple):
    """A kind of request: its wire type, what is read of it, and what answers it."""

    kind: type[Any]
    read: Callable[[Any, int], Any]
    handler: Callable[[ServerState, Any, Any, str], Awaitable[Answer]]


async def answered_as(form: Form, state: ServerState, fields: Fields, tenant: str, path: str) -> Answer:
    """The answer to these fields as a request of this kind, on the route with this path."""
    most = state.config.max_documents

    def read() -> tuple[Any, Any, list[UnreadField]]:
        request = msgspec.convert(fields, type=form.kind, strict=False)
        return request, form.read(request, most), unread_fields(request, fields)

    size = sum(len(value) for value in fields.values() if isinstance(value, str | list))
    try:
        request, found, unread = await state.engine.in_thread(read, size)
    except RecursionError as error:
        raise too_deep() from error
    state.check_model(request.model)
    state = state.telling_of(unread, path)
    with state.bodies.hold() as held:
        if state.reads_pictures:
            found = await state.media.filled(found, held)
        answer = await form.handler(state, request, found, tenant)
    return answer.with_field_warnings(state.field_warnings)
