"""One request from its arrival to its answer: id, key, route, errors, timing, log line and metrics."""

import asyncio
import functools
import ipaddress
import logging
import math
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxsimd.api.answer import (
    Answer,
    ApiError,
    LineSender,
    Sink,
    WholeAnswer,
    WrongMethodError,
    as_api_error,
    error_answer,
    unavailable,
)
from maxsimd.api.handlers import (
    classification,
    embeddings,
    operating,
    rerank,
    tei,
    tokens,
    vendor_embeddings,
    vendor_reranks,
)
from maxsimd.api.handlers.openapi import openapi_page
from maxsimd.api.handlers.route import Body, Group, Route, Shown, Work, get, refusal
from maxsimd.api.logs import printable
from maxsimd.api.pages import Page, docs, playground
from maxsimd.api.state import RequestNotes, ServerState, TracedRequest
from maxsimd.engine import EngineDeadError


async def playground_page(state: ServerState) -> Answer:
    return _page_answer(playground())


async def docs_page(state: ServerState) -> Answer:
    # The first call makes the page.
    return _page_answer(await asyncio.to_thread(docs))


def _page_answer(page: Page) -> Answer:
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Encoding": "gzip",
        "Content-Security-Policy": page.policy,
        "Cache-Control": "no-cache",
        "Vary": "Accept-Encoding",
    }
    return Answer(200, headers, page.compressed_html)


PAGE_ROUTES = (
    get("/", playground_page, "text/html", shown=Shown(Group.OPERATE, "Playground, a page for browsers")),
    get("/docs", docs_page, "text/html", shown=Shown(Group.OPERATE, "This reference, a page for browsers")),
)


async def openapi(state: ServerState) -> Answer:
    are_changed = state.models is not None and state.keys.has_admins
    return Answer(200, {"Content-Type": "application/json"}, description(are_changed))


@functools.cache
def description(models_are_changed: bool = False) -> bytes:
    """The page /openapi.json. It has the routes that load and drop models if `models_are_changed`."""
    more = operating.CHANGE_ROUTES if models_are_changed else ()
    return openapi_page((*_ALL, *more, *PAGE_ROUTES), OPEN_ROUTES)


def _works_by_path(*groups: tuple[Route, ...]) -> dict[str, dict[str, Work]]:
    """The work for each path and method."""
    works: dict[str, dict[str, Work]] = {}
    for route in (route for group in groups for route in group):
        for method in route.methods:
            works.setdefault(route.path, {})[method] = route.work
    return works


# Load balancers send no key.
OPEN_ROUTES = frozenset({"/health", "/ready", "/ping"})
# Pages hold no data of the model, and ask for the key themselves. Posts to their paths need a key.
PAGES = frozenset(route.path for route in PAGE_ROUTES)
_ALL = (
    *rerank.ROUTES,
    *vendor_reranks.ROUTES,
    *embeddings.ROUTES,
    *classification.ROUTES,
    *tokens.ROUTES,
    *tei.ROUTES,
    *vendor_embeddings.COHERE_ROUTES,
    *vendor_embeddings.VOYAGE_ROUTES,
    *vendor_reranks.INFINITY_ROUTES,
    *vendor_embeddings.OLLAMA_ROUTES,
    *tei.INVOCATION_ROUTES,
    *operating.ROUTES,
    get("/openapi.json", openapi, dict[str, Any], shown=Shown(Group.OPERATE, "OpenAPI description")),
)

ROUTES = _works_by_path(_ALL, PAGE_ROUTES)
METHODS = frozenset(method for methods in ROUTES.values() for method in methods)


log = logging.getLogger("maxsimd.http")

# Ends of base URLs to which clients append whole paths.
_BASES = ("/v1", "/v2", vendor_reranks.INFINITY, f"{vendor_reranks.INFINITY}/v1")
# The text before and after `{name}` in each route that has a model name.
_AROUND_NAME = {path: tuple(path.split("{name}")) for path in ROUTES if "{name}" in path}
_LONGEST_LOGGED_PATH = 100
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")


async def handle(
    state: ServerState,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: Body,
    sink: Sink | None = None,
) -> Answer:
    """Answers a request whatever happens. Cancelling it cancels the request's work. An answer that is sent
    while it is made goes to `sink`; the returned answer has been sent then.

    `path` has no query string and is percent-decoded, except %2F and %25. `headers` are looked up by names in
    lower case. `body` is read only by handlers that need it, and no further than the limit.
    """
    started = time.perf_counter()
    given = headers.get("x-request-id", "")
    request_id = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
    route = route_of(path)
    is_known = method in ROUTES.get(route, {}) or _is_model_change(state, method, route)
    label = route if is_known else "unknown"
    status, seconds, reason, timings = 499, math.nan, "", None
    cross_origin = state.cross_origin.headers(headers.get("origin"))

    def completed(answer: Answer) -> Answer:
        so_far = time.perf_counter() - started if math.isnan(seconds) else seconds
        return answer.completed(request_id, so_far, cross_origin)

    notes = RequestNotes()
    whole = WholeAnswer()
    sender = LineSender(sink or whole, completed)
    try:
        answer = await _answer(state, _Incoming(method, path, headers, body, notes), request_id, sender)
        status, reason, timings = answer.status, answer.reason, answer.timings
    except ConnectionError:
        if not sender.has_begun:
            raise
        # The client has gone away.
        answer = Answer(status)
    finally:
        # Without an answer, the client has gone away and the adapter has cancelled this.
        seconds = time.perf_counter() - started
        state.metrics.note_request(label, status, seconds)
        if state.tracing is not None:
            state.tracing.note(TracedRequest(method, label, status, seconds, request_id, timings), headers)
        level = logging.DEBUG if method == "GET" else logging.INFO
        # Without spaces, it cannot pass for the rest of the line.
        shown = printable(path, _LONGEST_LOGGED_PATH).replace(" ", "%20")
        why = f" why={reason}" if reason else ""
        fields = {
            "method": method,
            "path": shown,
            "route": label,
            "status": status,
            "duration_ms": round(seconds * 1e3, 1),
            "request_id": request_id,
            **({"model": printable(notes.model, _LONGEST_LOGGED_PATH)} if notes.model else {}),
            **({"tenant": notes.tenant} if notes.tenant else {}),
            **({"reason": reason} if reason else {}),
        }
        ms = seconds * 1e3
        line = "%s %s %d %.1f ms id=%s%s"
        log.log(level, line, method, shown, status, ms, request_id, why, extra={"fields": fields})
    return whole.or_else(completed(answer))


def route_of(path: str) -> str:
    """The route that a path means. Clients add a slash at the end, or a whole path behind a base URL that has
    one, such as /v1/v2/rerank or /infinity/embeddings."""
    return _split(path)[0]


def _split(path: str) -> tuple[str, str]:
    """The route that a path means, and the path without a base before it and slashes at its end."""
    if path in ROUTES:
        return path, path
    plain = path.rstrip("/")
    for base in ("", *_BASES):
        if not plain.startswith(f"{base}/"):
            continue
        rest = plain.removeprefix(base)
        for route, (before, behind) in _AROUND_NAME.items():
            if rest.startswith(before) and rest.endswith(behind) and len(rest) > len(before) + len(behind):
                return route, rest
        if rest in ROUTES:
            return rest, rest
    return plain, plain


@dataclass(frozen=True, slots=True)
class _Incoming:
    method: str
    path: str
    headers: Mapping[str, str]
    body: Body
    notes: RequestNotes


async def _answer(state: ServerState, incoming: _Incoming, request_id: str, sender: LineSender) -> Answer:
    method, path, headers = incoming.method, incoming.path, incoming.headers
    try:
        async with state.in_flight():
            # Browsers send no key with this question.
            preflight = state.cross_origin.preflight(method, headers, METHODS)
            if preflight is not None:
                return preflight
            tenant = "" if _is_open(method, path) else _tenant_of(state, headers)
            incoming.notes.tenant = tenant
            work = _work_of(state, method, path, headers)
            refused = refusal(headers, state.max_body_bytes) if method == "POST" else None
            if refused is not None:
                raise refused
            if method == "POST" and not _is_model_change(state, method, route_of(path)):
                state = state.for_request(incoming.notes, _model_in(path))
            answer = (await work(state, incoming.body, tenant)).readable_with(
                headers.get("accept-encoding", "")
            )
            if answer.lines is not None:
                await sender.send(answer)
            return answer
    except Exception as error:
        if sender.has_begun and isinstance(error, ConnectionError):
            raise
        is_over_soon = isinstance(error, EngineDeadError) and state.comes_back
        failure = as_api_error(error)
        if is_over_soon:
            failure = unavailable(
                "the engine has failed and is being restarted; send the request again shortly"
            )
        if failure.status == 500:
            fields = {"request_id": request_id}
            log.exception("request %s failed", request_id, exc_info=error, extra={"fields": fields})
        if sender.has_begun:
            await sender.fail(failure)
        return error_answer(failure)


def _is_open(method: str, path: str) -> bool:
    """Whether this needs no key."""
    route = route_of(path)
    return route in OPEN_ROUTES or (route in PAGES and method in ("GET", "HEAD"))


def _tenant_of(state: ServerState, headers: Mapping[str, str]) -> str:
    """The tenant, by the request's key alone."""
    if not state.keys.are_asked_for:
        _refuse_foreign_host(state, headers.get("host", ""))
        return ""
    tenant = state.keys.accept(headers.get("authorization", ""))
    if tenant is None:
        raise ApiError(401, "AuthenticationError", "send a valid key as Authorization: Bearer KEY")
    return tenant


# Names below these are not in the public DNS.
_PRIVATE = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".test")


def _refuse_foreign_host(state: ServerState, host: str) -> None:
    """Raises ApiError (403) where a server that only this machine can reach is asked by a name of the public
    DNS: by a web page whose name was pointed at this machine (DNS rebinding), which a browser would let read
    the answers."""
    name = host.partition(":")[0].rstrip(".").lower()
    if not state.is_on_loopback or "." not in name or name.endswith(_PRIVATE) or _is_ipv4(name):
        return
    if not state.cross_origin.has_host(host.lower()):
        said = (
            f"without API keys, this server answers to names of this machine, not to {printable(name, 100)}"
        )
        remedy = "set an API key, or name the site with --cors-origin"
        raise ApiError(403, "PermissionDeniedError", f"{said}; {remedy}")


def _is_ipv4(name: str) -> bool:
    try:
        ipaddress.IPv4Address(name)
    except ValueError:
        return False
    return True


def _is_model_change(state: ServerState, method: str, route: str) -> bool:
    """Whether the request loads or drops a model. A server of one model does not."""
    return state.models is not None and route == operating.MODEL_PATH and method in operating.CHANGE_METHODS


def _model_change_methods(state: ServerState, route: str) -> tuple[str, ...]:
    """The methods that load and drop models, if some key may do that."""
    is_changed = state.models is not None and route == operating.MODEL_PATH and state.keys.has_admins
    return operating.CHANGE_METHODS if is_changed else ()


def _model_in(path: str) -> str:
    """The model's name in the path. Clients may write a slash as %2F and must write % as %25. A path may end
    in a slash, a name does not."""
    route, rest = _split(path)
    before, behind = _AROUND_NAME.get(route, (rest, ""))
    name = rest.rstrip("/").removesuffix(behind)[len(before) :]
    return re.sub(
        "%(2f|25)", lambda found: "%" if found[1] == "25" else "/", name, flags=re.IGNORECASE
    ).rstrip("/")


def _work_of(state: ServerState, method: str, path: str, headers: Mapping[str, str]) -> Work:
    route = route_of(path)
    methods = ROUTES.get(route)
    if methods is None or (route in _AROUND_NAME and not _model_in(path)):
        raise ApiError(404, "NotFoundError", "there is no such route; GET /docs has those there are")
    if _is_model_change(state, method, route):
        operating.check_allowed(state, headers)
        return operating.changing(method, _model_in(path))
    if method not in methods:
        raise WrongMethodError({*methods, *_model_change_methods(state, route)})
    return operating.model(_model_in(path)) if route == operating.MODEL_PATH else methods[method]
