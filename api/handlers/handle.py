"""One request from its arrival to its answer: id, key, route, errors, timing, log line and metrics."""

import asyncio
import functools
import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from maxsimd.api.answer import Answer, ApiError, LineSender, Sink, WholeAnswer, as_api_error, error_answer
from maxsimd.api.batches import run_batches
from maxsimd.api.handlers import (
    batches,
    classification,
    documents,
    embeddings,
    labels,
    operating,
    rerank,
    tei,
    token_classification,
    tokens,
    vendor_embeddings,
    vendor_reranks,
)
from maxsimd.api.handlers.bodies import Body, refusal
from maxsimd.api.handlers.openapi import openapi_page
from maxsimd.api.handlers.route import Group, Route, Shown, Work, get
from maxsimd.api.logs import printable
from maxsimd.api.pages import Page, docs, playground
from maxsimd.api.state import RequestNotes, ServerState
from maxsimd.engine import EngineDeadError


def _page(path: str, page: Callable[[], Page], summary: str) -> Route:
    async def work(state: ServerState) -> Answer:
        # The first call makes the page.
        made = await asyncio.to_thread(page)
        headers = {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Encoding": "gzip",
            "Content-Security-Policy": made.policy,
            "Cache-Control": "no-cache",
            "Vary": "Accept-Encoding",
        }
        return Answer(200, headers, made.compressed_html)

    return get(path, work, "text/html", shown=Shown(Group.OPERATE, summary))


PAGE_ROUTES = (
    _page("/", playground, "Playground, a page for browsers"),
    _page("/docs", docs, "This reference, a page for browsers"),
)


async def openapi(state: ServerState) -> Answer:
    are_changed = state.models is not None and state.keys.has_admins
    # The first call makes the page, which takes long.
    page = await asyncio.to_thread(description, are_changed)
    return Answer(200, {"Content-Type": "application/json"}, page)


@functools.cache
def description(models_are_changed: bool = False) -> bytes:
    """The page /openapi.json. It has the routes that load and drop models if `models_are_changed`."""
    more = operating.CHANGE_ROUTES if models_are_changed else ()
    return openapi_page((*_ALL, *more, *PAGE_ROUTES), OPEN_ROUTES)


# Load balancers send no key.
OPEN_ROUTES = frozenset({"/health", "/ready", "/ping"})
# Pages hold no data of the model, and ask for the key themselves.
PAGES = frozenset(route.path for route in PAGE_ROUTES)
_ALL = (
    *rerank.ROUTES,
    *documents.ROUTES,
    *vendor_reranks.ROUTES,
    *embeddings.ROUTES,
    *classification.ROUTES,
    *labels.ROUTES,
    *token_classification.ROUTES,
    *tokens.ROUTES,
    *batches.ROUTES,
    *tei.ROUTES,
    *vendor_embeddings.COHERE_ROUTES,
    *vendor_embeddings.VOYAGE_ROUTES,
    *vendor_reranks.INFINITY_ROUTES,
    *vendor_embeddings.OLLAMA_ROUTES,
    *tei.INVOCATION_ROUTES,
    *operating.ROUTES,
    get("/openapi.json", openapi, dict[str, Any], shown=Shown(Group.OPERATE, "OpenAPI description")),
)

# The work for each path and method.
ROUTES: dict[str, dict[str, Work]] = {}
for _route in (*_ALL, *PAGE_ROUTES):
    ROUTES.setdefault(_route.path, {}).update(dict.fromkeys(_route.methods, _route.work))
_CHANGES = {method: route.work for route in operating.CHANGE_ROUTES for method in route.methods}
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
    timeout: float | None = None,
) -> Answer:
    """Answers a request whatever happens. Cancelling it cancels the request's work. An answer that is sent
    while it is made goes to `sink`; the returned answer has been sent then. `timeout` is in seconds, for
    clients that set one outside of the body; text-embeddings-inference's routes hold it.

    `path` has no query string and is percent-decoded, except %2F and %25. `headers` are looked up by names in
    lower case. `body` is read only by handlers that need it, and no further than the limit.
    """
    started = time.perf_counter()
    given = headers.get("x-request-id", "")
    request_id = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
    route, name = route_of(path)
    label = route if method in _works_at(state, route) else "unknown"
    # Stays so if the client has gone away, and the adapter has cancelled this.
    answer, seconds = Answer(499), math.nan
    cross_origin = state.cross_origin.headers(headers.get("origin"))

    def completed(answer: Answer) -> Answer:
        so_far = time.perf_counter() - started if math.isnan(seconds) else seconds
        return answer.completed(request_id, so_far, cross_origin)

    notes = RequestNotes(timeout=timeout)
    whole = WholeAnswer()
    sender = LineSender(sink or whole, completed)
    try:
        work = _answer(state, method, route, name, headers, body, notes, sender)
        answer = await _or_error(state, work, request_id, sender)
    except ConnectionError:
        if not sender.has_begun:
            raise
    finally:
        seconds = time.perf_counter() - started
        state.metrics.note_request(label, answer.status, seconds)
        state.count_usage(notes, answer.status)
        if state.tracing is not None:
            state.tracing.note(method, label, answer, seconds, request_id, headers)
        level = logging.DEBUG if method in ("GET", "HEAD") else logging.INFO
        # Without spaces, it cannot pass for the rest of the line.
        shown = printable(path, _LONGEST_LOGGED_PATH).replace(" ", "%20")
        why, ms = f" why={answer.reason}" if answer.reason else "", seconds * 1e3
        fields = {"method": method, "path": shown, "route": label, "status": answer.status}
        fields |= {"duration_ms": round(ms, 1), "request_id": request_id}
        model = printable(notes.model, _LONGEST_LOGGED_PATH)
        more = {"model": model, "tenant": notes.tenant, "reason": answer.reason}
        fields |= {name: value for name, value in more.items() if value}
        line = "%s %s %d %.1f ms id=%s%s"
        log.log(level, line, method, shown, answer.status, ms, request_id, why, extra={"fields": fields})
    return whole.or_else(completed(answer))


async def watch(state: ServerState) -> None:
    """Does all that goes on beside requests, until cancelled: watches files and runs batch jobs."""
    if state.batches is None:
        await state.watch()
        return
    ask = functools.partial(batches.ask_as, ROUTES, state)
    async with asyncio.TaskGroup() as both:
        both.create_task(state.watch())
        both.create_task(run_batches(state.batches, ask, lambda: state.is_ready))


def route_of(path: str) -> tuple[str, str]:
    """The route that a path means, and the model's name in it. Clients add a slash at the end, or a whole
    path behind a base URL that has one, such as /v1/v2/rerank or /infinity/embeddings. In names they may
    write a slash as %2F and must write % as %25."""
    if path in ROUTES and path not in _AROUND_NAME:
        return path, ""
    plain = path.rstrip("/")
    for base in ("", *_BASES):
        if not plain.startswith(f"{base}/"):
            continue
        rest = plain.removeprefix(base)
        for route, (before, behind) in _AROUND_NAME.items():
            name = rest.removeprefix(before).removesuffix(behind)
            if name and rest == before + name + behind:
                return route, re.sub("%2f", "/", name, flags=re.IGNORECASE).replace("%25", "%").rstrip("/")
        if rest in ROUTES:
            return rest, ""
    return plain, ""


def _works_at(state: ServerState, route: str) -> Mapping[str, Work]:
    """The work of a route for each method. Only a server of several models loads and drops some."""
    works = ROUTES.get(route, {})
    has_more = state.models is not None and route == operating.MODEL_PATH
    return works | _CHANGES if has_more else works


async def _answer(
    state: ServerState,
    method: str,
    route: str,
    name: str,
    headers: Mapping[str, str],
    body: Body,
    notes: RequestNotes,
    sender: LineSender,
) -> Answer:
    # Browsers send no key with this question.
    preflight = state.cross_origin.preflight(method, headers, METHODS)
    if preflight is not None:
        return preflight
    # Posts to the pages' paths need a key.
    is_open = route in OPEN_ROUTES or (route in PAGES and method in ("GET", "HEAD"))
    notes.tenant = "" if is_open else _tenant_of(state, headers)
    notes.is_admin = route in operating.USAGE and state.keys.is_admin(headers.get("authorization", ""))
    works = _works_at(state, route)
    if not works or (route in _AROUND_NAME and not name):
        raise ApiError(404, "there is no such route; GET /docs has those there are")
    if method not in works:
        allowed = ", ".join(sorted(works if state.keys.has_admins else ROUTES[route]))
        raise ApiError(405, f"this route takes {allowed}", headers={"Allow": allowed})
    if works[method] in _CHANGES.values():
        operating.check_allowed(state, headers)
    most_bytes = state.max_body_bytes
    if route == batches.FILES and state.batches is not None:
        most_bytes = state.batches.most_file_bytes + batches.FORM_BYTES
    refused = refusal(headers, most_bytes) if method == "POST" else None
    if refused is not None:
        raise refused
    answer = await works[method](state.for_request(notes, name), body)
    answer = answer.readable_with(headers.get("accept-encoding", ""))
    if answer.lines is not None:
        await sender.send(answer)
    return answer


async def _or_error(
    state: ServerState, work: Coroutine[Any, Any, Answer], request_id: str, sender: LineSender
) -> Answer:
    """The answer, or that to an error."""
    try:
        async with state.in_flight():
            return await work
    except Exception as error:
        if sender.has_begun and isinstance(error, ConnectionError):
            raise
        failure = as_api_error(error)
        if isinstance(error, EngineDeadError) and state.comes_back:
            message = "the engine has failed and is being restarted; send the request again shortly"
            failure = ApiError(503, message, retry_after=5)
        if failure.status == 500:
            fields = {"request_id": request_id}
            log.exception("request %s failed", request_id, exc_info=error, extra={"fields": fields})
        if sender.has_begun:
            await sender.fail(failure)
        return error_answer(failure)


def _tenant_of(state: ServerState, headers: Mapping[str, str]) -> str:
    """The tenant, by the request's key alone."""
    if not state.keys.are_asked_for:
        _refuse_foreign_host(state, headers.get("host", ""))
        return ""
    tenant = state.keys.accept(headers.get("authorization", ""))
    if tenant is None:
        raise ApiError(
            401, "send a valid key as Authorization: Bearer KEY", headers={"WWW-Authenticate": "Bearer"}
        )
    return tenant


# Names below these are not in the public DNS.
_PRIVATE = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".test")


def _refuse_foreign_host(state: ServerState, host: str) -> None:
    """Raises ApiError (403) where a server that only this machine can reach is asked by a name of the public
    DNS: by a web page whose name was pointed at this machine (DNS rebinding), which a browser would let read
    the answers."""
    name = host.partition(":")[0].rstrip(".").lower()
    is_public = "." in name and not name.endswith(_PRIVATE) and not name.replace(".", "").isdecimal()
    if state.is_on_loopback and is_public and not state.cross_origin.has_host(host.lower()):
        raise ApiError(
            403,
            f"without API keys, this server answers to names of this machine, not to {printable(name, 100)}; "
            "set an API key, or name the site with --cors-origin",
        )
