"""Loading and dropping models while the server runs, for whoever has an admin's key."""

from collections.abc import Mapping

import msgspec

from maxsimd.api.answer import Answer, json_page
from maxsimd.api.failures import (
    ApiError,
    body_not_unicode,
    in_printable_name,
    model_is_not_loadable,
    no_such_model,
    too_deep,
)
from maxsimd.api.flags import in_flags
from maxsimd.api.handlers.operating import MODEL_PATH, card
from maxsimd.api.handlers.route import Body, Route, Work, read_body
from maxsimd.api.models.routing import served
from maxsimd.api.models.several import LastModelError, SeveralModels
from maxsimd.api.request_warnings import UnreadField, unread_fields
from maxsimd.api.state import ServerState

METHODS = ("POST", "DELETE")


def changing(method: str, name: str) -> Work:
    """What loads a model or drops it."""

    async def work(state: ServerState, body: Body, tenant: str) -> Answer:
        models = state.models
        assert models is not None
        with state.bodies.hold() as held:
            given = await read_body(state, body, held)
        state = state.telling_of(_fields_in(given), MODEL_PATH)
        is_load = method == "POST"
        answer = await (_load(state, models, name) if is_load else _drop(models, name))
        return answer.with_field_warnings(state.field_warnings)

    return work


class _NoFields(msgspec.Struct):
    """How a model runs is for the server's configuration to say."""


def _fields_in(body: bytes | bytearray) -> list[UnreadField]:
    """Returns the unread fields of an optional body, which are all of its fields. Raises ApiError (400) for
    names that are not UTF-8 and for bodies that are nested too deeply."""
    try:
        return unread_fields(_NoFields(), msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
    except msgspec.DecodeError:
        return []
    except UnicodeDecodeError as error:
        raise body_not_unicode(error.reason) from error
    except RecursionError as error:
        raise too_deep() from error


def check_allowed(state: ServerState, headers: Mapping[str, str]) -> None:
    """Raises ApiError (403) for whoever may not change what is served."""
    if state.keys.is_admin(headers.get("authorization", "")):
        return
    if state.keys.has_admins:
        message = "this key may not load or drop models; send one that the file of keys gives admin=yes"
    else:
        message = (
            "models are loaded and dropped only where the file of keys (--api-key-file) gives a key admin=yes"
        )
    raise ApiError(403, "PermissionDeniedError", message)


async def _load(state: ServerState, models: SeveralModels, name: str) -> Answer:
    """Answers when the model is served, or cannot be."""
    if not models.may_load(name):
        raise model_is_not_loadable(name)
    state.check_ready()
    try:
        await models.load(name)
    except Exception as error:
        reason = in_flags(str(error)) or type(error).__name__
        raise ApiError(
            422, "ModelLoadError", f"the model `{in_printable_name(name)}` cannot be loaded: {reason}", "name"
        ) from error
    return json_page(card(state, name))


async def _drop(models: SeveralModels, name: str) -> Answer:
    """Answers when the model is gone."""
    if name not in models.names:
        raise no_such_model(name, served(models))
    try:
        await models.drop(name)
    except LastModelError:
        message = "this is the last model that is served; load another first, or stop the server"
        raise ApiError(409, "ConflictError", message, "name") from None
    return Answer(204)


async def _unused(state: ServerState, body: Body, tenant: str) -> Answer:
    raise AssertionError("the work depends on the name")


# As /openapi.json describes them, where there are admins.
ROUTES = (
    Route(MODEL_PATH, ("POST",), _unused),
    Route(MODEL_PATH, ("DELETE",), _unused, answers=(), status=204),
)
