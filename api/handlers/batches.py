"""The routes of OpenAI's files and batch jobs."""

import asyncio
import logging
import mmap
from collections.abc import AsyncIterator, Callable
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec

from maxsimd.api.answer import Answer, ApiError, as_api_error, error_answer, wire_answer
from maxsimd.api.batches import MOST_LINES, RETRIED, Batch, BatchStore, FileInfo
from maxsimd.api.handlers.bodies import Body, parse_body, read_body
from maxsimd.api.handlers.route import Group, Route, Shown, Work, no_texts
from maxsimd.api.reading import UnreadField
from maxsimd.api.state import RequestNotes, ServerState
from maxsimd.api.wire import AlwaysList, about

log = logging.getLogger("maxsimd.batches")

# The routes whose requests a job may have.
ENDPOINTS = frozenset(
    {"/v1/embeddings", "/v1/multi-vector", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"}
    | {"/classify", "/pooling", "/v1/token-classify"}
)
FILES, BATCHES = "/v1/files", "/v1/batches"
# Bytes that a form has beside its file, at most; of the headers of a part, and of a boundary; parts.
FORM_BYTES = 64 * 1024
_LONGEST_HEADER, _LONGEST_BOUNDARY, _MOST_PARTS = 16 * 1024, 200, 100
_LONGEST_NAME = 255
# Writing a row of a list takes as long as so many scores.
_WORK_OF_ROW = 20
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
        with store.uploading(tenant, room) as count:
            with form.open("wb") as file:
                async for chunk in body:
                    size += len(chunk)
                    count(len(chunk))
                    if size > store.most_file_bytes + FORM_BYTES:
                        message = "the file is too large; send it in parts, or raise --limit batch_file_mb"
                        raise ApiError(413, message, "file")
                    await asyncio.to_thread(file.write, chunk)
            read = await asyncio.to_thread(_read_form, form, content)
            state = state.warning_about([UnreadField(name, None) for name in read.others], FILES)
            info = await asyncio.to_thread(store.add_file, tenant, content, read.file_name)
        return (await _json(info)).with_field_warnings(state.field_warnings)
    except OSError as error:
        log.warning("an upload cannot be written: %s", error)
        message = "the file cannot be written now; try again later, or send a smaller one"
        raise ApiError(503, message, retry_after=30) from error
    finally:
        form.unlink(missing_ok=True)
        content.unlink(missing_ok=True)


class _Form(NamedTuple):
    """The name of a form's file, and the fields that are not read."""

    file_name: str
    others: list[str]


def _read_form(form: Path, content: Path) -> _Form:
    """Copies the file of a form (RFC 7578). Raises ApiError for a form without a file or for another
    purpose."""
    file_name, purpose, others = None, "", []
    with form.open("rb") as file, content.open("wb") as copy:
        if not form.stat().st_size:
            raise _not_a_form()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
            for header, start, stop in _parts(whole):
                try:
                    field = str(header.get_param("name", header="content-disposition"))
                    given = header.get_filename()
                except (ValueError, LookupError):  # a name in an unknown character set
                    raise _not_a_form() from None
                if field == "purpose" and stop - start < _LONGEST_NAME:
                    purpose = whole[start:stop].decode(errors="replace").strip()
                elif field == "file":
                    # Halves of characters cannot be written.
                    file_name = (given or "file").encode(errors="replace").decode()[:_LONGEST_NAME]
                    copy.seek(0)
                    copy.truncate()
                    for at in range(start, stop, _PART):
                        copy.write(whole[at : min(at + _PART, stop)])
                else:
                    others.append(field)
    if file_name is None:
        raise ApiError(400, "file is missing; send a form with a file of requests", "file")
    if purpose != "batch":
        raise ApiError(400, 'purpose must be "batch"', "purpose")
    return _Form(file_name, others)


def _parts(form: mmap.mmap) -> list[tuple[Message, int, int]]:
    """The headers of each part of a form, and where its content begins and ends."""
    end = form.find(b"\r\n", 0, _LONGEST_BOUNDARY)
    boundary = form[: max(0, end)]
    if len(boundary) < 3 or not boundary.startswith(b"--"):
        raise _not_a_form()
    found: list[tuple[Message, int, int]] = []
    at = end + 2
    while len(found) < _MOST_PARTS:
        behind = form.find(b"\r\n\r\n", at, at + _LONGEST_HEADER)
        stop = -1 if behind < 0 else form.find(b"\r\n" + boundary, behind + 2)
        if stop < 0:
            raise _not_a_form()
        header = message_from_string(form[at:behind].decode(errors="replace"))
        found.append((header, behind + 4, max(stop, behind + 4)))
        at = stop + 2 + len(boundary)
        if form[at : at + 2] == b"--":
            return found
        at += 2
    raise _not_a_form()


def _not_a_form() -> ApiError:
    message = "the body is not a whole form; send multipart/form-data with file and purpose"
    return ApiError(400, message, "file")


async def _json(value: Any, items: int = 1) -> Answer:
    return await wire_answer(lambda: value, items)


Read: TypeAlias = Callable[[BatchStore, str, str], Any]


def _get(path: str, read: Read, kind: Any, summary: str) -> Route:
    """A route that reads the tenant's files or jobs, or the one by the id in the path."""

    async def work(state: ServerState, body: Body) -> Answer:
        store = state.batches_of_tenant()
        found = await asyncio.to_thread(read, store, state.tenant, state.name_in_path)
        if kind not in (FilePage, BatchPage):
            return await _json(found)
        ids = [each.id for each in found] or [None]
        page = kind(data=found, first_id=ids[0], last_id=ids[-1])
        return await _json(page, _WORK_OF_ROW * len(found))

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


async def create_batch(state: ServerState, body: Body) -> Answer:
    store = state.batches_of_tenant()
    with state.held as held:
        given = await read_body(state, body, held)
        request, _, unread = await parse_body(state, given, held, BatchRequest, no_texts)
    state = state.warning_about(unread, BATCHES)
    if request.endpoint not in ENDPOINTS:
        message = f"endpoint must be one of {', '.join(sorted(ENDPOINTS))}"
        raise ApiError(400, message, "endpoint")
    if request.completion_window != "24h":
        raise ApiError(400, "completion_window must be 24h", "completion_window")
    asked = request.endpoint, request.input_file_id, request.metadata
    batch = await asyncio.to_thread(store.add_batch, state.tenant, *asked)
    return (await _json(batch)).with_field_warnings(state.field_warnings)


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
    if answer.status not in RETRIED:
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
    Route(BATCHES, ("POST",), create_batch, _shown("Begin a batch job", _BATCH), (BatchRequest,), (Batch,)),
    _get(BATCHES, lambda store, tenant, id: store.batches(tenant), BatchPage, "List the batch jobs"),
    Route(f"{BATCHES}/{{name}}/cancel", ("POST",), cancel, _shown("Cancel a batch job"), answers=(Batch,)),
    _get(f"{BATCHES}/{{name}}", lambda store, tenant, id: store.batch(tenant, id), Batch, _DESCRIBE),
)  # fmt: skip
