"""The routes of OpenAI's files and batch jobs."""

import asyncio
import logging
import mmap
from collections.abc import AsyncIterator, Callable
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from maxsimd.api.answer import Answer, ApiError, as_api_error, error_answer, wire_answer
from maxsimd.api.batches import MOST_LINES, Batch, BatchStore, FileInfo
from maxsimd.api.handlers.bodies import Body, read_body, wrong_bodies_refused
from maxsimd.api.handlers.route import Group, Route, Shown, Work
from maxsimd.api.state import RequestNotes, ServerState
from maxsimd.api.wire import AlwaysList, about

log = logging.getLogger("maxsimd.batches")

# The routes whose requests a job may have.
ENDPOINTS = frozenset(
    {"/v1/embeddings", "/v1/multi-vector", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"}
    | {"/classify", "/pooling"}
)
FILES = "/v1/files"
_FORM_HEADERS, _LONGEST_BOUNDARY = 16 * 1024, 200
_LONGEST_NAME = 255
_PART = 256 * 1024


class BatchRequest(msgspec.Struct, kw_only=True):
    """A job: all requests of a file."""

    input_file_id: Annotated[str, about("Id of a file of requests.", "file-6b1c")]
    endpoint: Annotated[str, about("Route that all its requests are for.", "/v1/embeddings")]
    completion_window: Annotated[str, about("Always 24h.", "24h")] = "24h"
    metadata: Annotated[dict[str, Any] | None, about("Anything, for the client.", {"job": "nightly"})] = None


class Page(msgspec.Struct, kw_only=True):
    object: AlwaysList = "list"
    has_more: Annotated[bool, about("Always false: the list is whole.", False)] = False
    first_id: Annotated[str | None, about("Id of the first.", "file-6b1c0e")] = None
    last_id: Annotated[str | None, about("Id of the last.", "file-1262c2")] = None


class FilePage(Page):
    data: Annotated[list[FileInfo], about("The files, the newest first.")]


class BatchPage(Page):
    data: Annotated[list[Batch], about("The batch jobs, the newest first.")]


class Deleted(msgspec.Struct):
    id: Annotated[str, about("Id of the file.", "file-6b1c0e")]
    object: Annotated[str, about("Always `file`.", "file")] = "file"
    deleted: Annotated[bool, about("Always true.", True)] = True


async def upload(state: ServerState, body: Body) -> Answer:
    """Takes a form with a `file` of requests and its `purpose`."""
    store, tenant = state.batches_of_tenant(), state.tenant
    room = await asyncio.to_thread(store.room, tenant)
    form, content = store.new_path(), store.new_path()
    try:
        size = 0
        with form.open("wb") as file, store.uploading(tenant) as count:
            async for chunk in body:
                size += len(chunk)
                if count(len(chunk)) > room + _FORM_HEADERS:
                    raise store.too_much()
                if size > store.most_file_bytes + _FORM_HEADERS:
                    message = "the file is too large; send it in parts, or raise --limit batch_file_mb"
                    raise ApiError(413, message, "file")
                await asyncio.to_thread(file.write, chunk)
        name, purpose = await asyncio.to_thread(_read_form, form, content)
        if purpose != "batch":
            raise ApiError(400, 'purpose must be "batch"', "purpose")
        info = await asyncio.to_thread(store.add_file, tenant, content, name, purpose)
        return await _json(info)
    finally:
        form.unlink(missing_ok=True)
        content.unlink(missing_ok=True)


def _read_form(form: Path, content: Path) -> tuple[str, str]:
    """Copies the file of a form (RFC 7578). Returns its name, and the field `purpose`."""
    name, purpose = None, ""
    with form.open("rb") as file, content.open("wb") as copy:
        if not form.stat().st_size:
            raise _not_a_form()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
            for header, start, stop in _parts(whole):
                field = header.get_param("name", header="content-disposition")
                if field == "purpose" and stop - start < _LONGEST_NAME:
                    purpose = whole[start:stop].decode(errors="replace").strip()
                elif field == "file":
                    name = (header.get_filename() or "file")[:_LONGEST_NAME]
                    copy.seek(0)
                    copy.truncate()
                    for at in range(start, stop, _PART):
                        copy.write(whole[at : min(at + _PART, stop)])
    if name is None:
        raise ApiError(400, "file is missing; send a form with a file of requests", "file")
    return name, purpose


def _parts(form: mmap.mmap) -> list[tuple[Message, int, int]]:
    """The headers of each part of a form, and where its content begins and ends."""
    end = form.find(b"\r\n", 0, _LONGEST_BOUNDARY)
    boundary = form[:end]
    if end < 3 or not boundary.startswith(b"--"):
        raise _not_a_form()
    found: list[tuple[Message, int, int]] = []
    at = end + 2
    while len(found) < 100:
        behind = form.find(b"\r\n\r\n", at, at + _FORM_HEADERS)
        stop = -1 if behind < 0 else form.find(b"\r\n" + boundary, behind + 2)
        if stop < 0:
            raise _not_a_form()
        found.append((message_from_bytes(form[at:behind]), behind + 4, max(stop, behind + 4)))
        at = stop + 2 + len(boundary)
        if form[at : at + 2] == b"--":
            return found
        at += 2
    raise _not_a_form()


def _not_a_form() -> ApiError:
    return ApiError(
        400, "the body is not a whole form; send multipart/form-data with file and purpose", "file"
    )


async def _json(value: Any) -> Answer:
    return await wire_answer(lambda: value, 1)


Read: TypeAlias = Callable[[BatchStore, str, str], Any]


def _get(path: str, read: Read, kind: Any, summary: str) -> Route:
    """A route that reads the tenant's files or jobs, or the one by the id in the path."""

    async def work(state: ServerState, body: Body) -> Answer:
        store = state.batches_of_tenant()
        found = await asyncio.to_thread(read, store, state.tenant, state.name_in_path)
        if kind in (FilePage, BatchPage):
            ids = [each.id for each in found] or [None]
            found = kind(data=found, first_id=ids[0], last_id=ids[-1])
        return await _json(found)

    return Route(path, ("GET",), work, _shown(summary), answers=(kind,))


async def content(state: ServerState, body: Body) -> Answer:
    store = state.batches_of_tenant()
    path = await asyncio.to_thread(store.path_of, state.tenant, state.name_in_path)
    try:
        file = await asyncio.to_thread(path.open, "rb")
    except FileNotFoundError:
        raise ApiError(404, "there is no such file", "id") from None

    async def parts() -> AsyncIterator[bytes]:
        with file:
            while part := await asyncio.to_thread(file.read, _PART):
                yield part

    whole = parts()
    first = await anext(whole, b"")
    return Answer(200, {"Content-Type": _LINES}, first, whole)  # type: ignore[arg-type]


async def delete(state: ServerState, body: Body) -> Answer:
    store, id = state.batches_of_tenant(), state.name_in_path
    await asyncio.to_thread(store.delete_file, state.tenant, id)
    return await _json(Deleted(id))


async def begin(state: ServerState, body: Body) -> Answer:
    store = state.batches_of_tenant()
    with state.held as held:
        given = await read_body(state, body, held)
    with wrong_bodies_refused():
        request = msgspec.json.decode(given, type=BatchRequest)
    if request.endpoint not in ENDPOINTS:
        message = f"endpoint must be one of {', '.join(sorted(ENDPOINTS))}"
        raise ApiError(400, message, "endpoint")
    if request.completion_window != "24h":
        raise ApiError(400, "completion_window must be 24h", "completion_window")
    asked = request.endpoint, request.input_file_id, request.metadata
    return await _json(await asyncio.to_thread(store.add_batch, state.tenant, *asked))


async def cancel(state: ServerState, body: Body) -> Answer:
    store = state.batches_of_tenant()
    return await _json(await asyncio.to_thread(store.cancel, state.tenant, state.name_in_path))


async def ask_as(
    works: dict[str, dict[str, Work]], state: ServerState, tenant: str, path: str, body: bytes
) -> Answer:
    """Answers a request of a job, for the tenant that began it."""
    notes = RequestNotes(tenant)

    async def whole() -> AsyncIterator[bytes]:
        yield body

    try:
        answer = await works[path]["POST"](state.for_request(notes, ""), whole())
    except Exception as error:
        answer = error_answer(as_api_error(error))
        if answer.status == 500:
            log.exception("a request of a batch to %s failed", path, exc_info=error)
    state.count_usage(notes, answer.status)
    return answer


def _shown(summary: str, example: Any = None) -> Shown:
    return Shown(Group.BATCHES, summary, example)


_DESCRIBE = "Describe a batch job"
_LINES = "application/jsonl"
_BATCH = {"input_file_id": "file-6b1c", "endpoint": "/v1/embeddings", "completion_window": "24h"}
# Longer paths come first: an id could have a slash.
ROUTES = (
    Route(FILES, ("POST",), upload, _shown(f"Upload a file of up to {MOST_LINES:,} requests, a line each"),
          answers=(FileInfo,)),
    _get(FILES, lambda store, tenant, id: store.files(tenant), FilePage, "List the files"),
    Route(f"{FILES}/{{name}}/content", ("GET",), content, _shown("Read a file"), answers=(_LINES,)),
    _get(f"{FILES}/{{name}}", lambda store, tenant, id: store.file(tenant, id), FileInfo, "Describe a file"),
    Route(f"{FILES}/{{name}}", ("DELETE",), delete, _shown("Delete a file"), answers=(Deleted,)),
    Route("/v1/batches", ("POST",), begin, _shown("Begin a batch job", _BATCH), (BatchRequest,), (Batch,)),
    _get("/v1/batches", lambda store, tenant, id: store.batches(tenant), BatchPage, "List the batch jobs"),
    Route("/v1/batches/{name}/cancel", ("POST",), cancel, _shown("Cancel a batch job"), answers=(Batch,)),
    _get("/v1/batches/{name}", lambda store, tenant, id: store.batch(tenant, id), Batch, _DESCRIBE),
)  # fmt: skip
