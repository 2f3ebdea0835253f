"""Batch jobs, as OpenAI's: files of requests that run behind interactive work, resumable, and their results.

A folder holds the files, and a database of files and jobs that processes share: one of them runs a job, and
another one takes it over when that one is silent."""

import asyncio
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from maxsimd.api.answer import Answer, ApiError
from maxsimd.api.config import ServerConfig, SetupError
from maxsimd.api.wire import AlwaysList, about

log = logging.getLogger("maxsimd.batches")

# Sends one request for a tenant to a route: tenant, path, body.
Ask: TypeAlias = Callable[[str, str, bytes], Awaitable[Answer]]
Status: TypeAlias = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]

# As OpenAI's.
MOST_LINES = 50_000
WINDOW_SECONDS = 24 * 3600
_MIB = 1024 * 1024
# Files and jobs of one tenant.
_MOST_KEPT = 1000
# Errors of a file that are named, and metadata of a job in JSON.
_MOST_ERRORS, _LONGEST_METADATA = 100, 16 * 1024
# Requests of one job at a time: enough for full steps. Jobs of one process, and of one tenant everywhere.
_AT_ONCE, _MOST_JOBS, _MOST_OF_TENANT = 16, 8, 2
# A job of a process that has been silent so long goes to another one.
_SILENT_SECONDS, _LOOK_SECONDS, _LOOKS_BETWEEN_DROPS = 30.0, 1.0, 600
# Wait before a request that the server had no room for is sent again.
_LEAST_WAIT, _LONGEST_WAIT = 1.0, 30.0
_RETRIED = frozenset({429, 503})


_Id = Annotated[str, about("Id.", "file-6b1c0e")]
_Time = Annotated[int, about("Unix time, in seconds.", 1767225600)]
_MaybeTime = Annotated[int | None, about("Unix time of this status; null before.", 1767225600)]


class FileInfo(msgspec.Struct, kw_only=True):
    """A file of requests or of results."""

    id: _Id
    bytes: Annotated[int, about("Size of the file.", 6566)]
    created_at: _Time
    filename: Annotated[str, about("Name that the client gave.", "requests.jsonl")]
    purpose: Annotated[str, about("`batch`, or `batch_output` for results.", "batch")]
    expires_at: _Time
    object: Annotated[str, about("Always `file`.", "file")] = "file"
    status: Annotated[str, about("Always `processed`.", "processed")] = "processed"


class BatchError(msgspec.Struct, kw_only=True):
    code: Annotated[str, about("Kind of error.", "invalid_request")]
    message: Annotated[str, about("What is wrong.", "method must be POST, not 'GET'")]
    line: Annotated[int | None, about("Line of the file, from 1.", 3)] = None
    param: Annotated[None, about("Always null.", None)] = None


class BatchErrors(msgspec.Struct):
    data: Annotated[list[BatchError], about("The errors, at most 100.")]
    object: AlwaysList = "list"


class RequestCounts(msgspec.Struct):
    total: Annotated[int, about("Requests of the file.", 50)] = 0
    completed: Annotated[int, about("Requests answered.", 49)] = 0
    failed: Annotated[int, about("Requests with an error.", 1)] = 0


class Batch(msgspec.Struct, kw_only=True):
    """A batch job."""

    id: Annotated[str, about("Id.", "batch_44ab6e")]
    endpoint: Annotated[str, about("Route of its requests.", "/v1/embeddings")]
    input_file_id: _Id
    created_at: _Time
    expires_at: _Time
    metadata: Annotated[dict[str, Any] | None, about("As the client gave it.", {"job": "nightly"})] = None
    completion_window: Annotated[str, about("Always 24h.", "24h")] = "24h"
    object: Annotated[str, about("Always `batch`.", "batch")] = "batch"
    status: Annotated[Status, about("Status.", "completed")] = "validating"
    errors: Annotated[BatchErrors | None, about("Why it failed; null if it did not.")] = None
    output_file_id: Annotated[str | None, about("File of the answers.", "file-1262c2")] = None
    error_file_id: Annotated[str | None, about("File of the failed requests.", "file-9481cc")] = None
    in_progress_at: _MaybeTime = None
    finalizing_at: _MaybeTime = None
    completed_at: _MaybeTime = None
    failed_at: _MaybeTime = None
    expired_at: _MaybeTime = None
    cancelling_at: _MaybeTime = None
    cancelled_at: _MaybeTime = None
    request_counts: Annotated[RequestCounts, about("How far it is.")] = msgspec.field(
        default_factory=RequestCounts
    )

    @property
    def is_over(self) -> bool:
        return self.status in ("failed", "completed", "expired", "cancelled")

    def become(self, status: Status) -> None:
        self.status = status
        if status != "validating":
            setattr(self, f"{status}_at", int(time.time()))


class Line(msgspec.Struct, kw_only=True):
    """A line of a job's file: a request."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: Any


class _Result(msgspec.Struct, kw_only=True):
    id: str
    custom_id: str
    response: _Response | None
    error: dict[str, str] | None = None


class _Seen(msgspec.Struct):
    custom_id: str


_TABLES = (
    "CREATE TABLE IF NOT EXISTS files (id TEXT PRIMARY KEY, tenant TEXT, created REAL, expires REAL, "
    "bytes INTEGER, info TEXT)",
    "CREATE TABLE IF NOT EXISTS batches (id TEXT PRIMARY KEY, tenant TEXT, created REAL, expires REAL, "
    "is_over INTEGER, wants_end INTEGER, owner TEXT, seen REAL, info TEXT)",
)


class BatchStore:
    """The files and jobs of all tenants in a folder. Methods may wait for the disk. Raises SetupError for a
    folder that cannot be used, and ApiError (404) for what a tenant does not have."""

    def __init__(self, folder: Path, config: ServerConfig) -> None:
        self._folder = folder
        self.most_file_bytes = config.batch_file_mb * _MIB
        self._most_bytes = config.batch_mb * _MIB
        self._days = config.batch_days
        self._database = folder / "batches.sqlite3"
        self._uploads: dict[str, int] = {}
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._database, os.O_RDWR | os.O_CREAT, 0o600))
            with self._change() as connection:
                for table in _TABLES:
                    connection.execute(table)
        except (OSError, sqlite3.Error) as error:
            raise SetupError(
                f"the folder of batches {str(folder)!r} cannot be used: {error}; name another (--batch-dir)"
            ) from error

    # Files.

    def new_path(self) -> Path:
        """A new file that only this user may read."""
        path = self._folder / f"upload-{uuid.uuid4().hex}"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        return path

    @contextmanager
    def uploading(self, tenant: str) -> Iterator[Callable[[int], int]]:
        """For one upload: a function that counts more of its bytes, and returns those of all uploads of the
        tenant to this process."""
        own = 0

        def count(more: int) -> int:
            nonlocal own
            own += more
            self._uploads[tenant] = self._uploads.get(tenant, 0) + more
            return self._uploads[tenant]

        try:
            yield count
        finally:
            if count(-own) == 0:
                del self._uploads[tenant]

    def room(self, tenant: str) -> int:
        """Bytes that the tenant's files may still take."""
        with self._change() as connection:
            query = "SELECT COALESCE(SUM(bytes), 0) FROM files WHERE tenant = ?"
            used: int = connection.execute(query, (tenant,)).fetchone()[0]
        return self._most_bytes - used

    def too_much(self) -> ApiError:
        message = (
            f"your files would have more than {self._most_bytes // _MIB} MiB (--limit batch_mb); delete some"
        )
        return ApiError(413, message, "file")

    def add_file(self, tenant: str, path: Path, name: str, purpose: str) -> FileInfo:
        """Takes a file over."""
        size, now = path.stat().st_size, time.time()
        info = FileInfo(
            id=f"file-{uuid.uuid4().hex}",
            bytes=size,
            created_at=int(now),
            filename=name,
            purpose=purpose,
            expires_at=int(now + self._days * 86_400),
        )
        with self._change() as connection:
            query = "SELECT COUNT(*) FROM files WHERE tenant = ?"
            number = connection.execute(query, (tenant,)).fetchone()[0]
            if purpose == "batch" and number >= _MOST_KEPT:
                raise ApiError(413, f"you have {number} files, and no more are kept; delete some", "file")
            os.replace(path, self._path(info.id))
            row = (info.id, tenant, now, info.expires_at, size, _encoded(info))
            connection.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", row)
        return info

    def file(self, tenant: str, id: str) -> FileInfo:
        with self._change() as connection:
            found = connection.execute(
                "SELECT info FROM files WHERE id = ? AND tenant = ?", (id, tenant)
            ).fetchone()
        if found is None:
            raise ApiError(404, "there is no such file", "id")
        return msgspec.json.decode(found[0], type=FileInfo)

    def files(self, tenant: str) -> list[FileInfo]:
        """The newest first."""
        with self._change() as connection:
            query = "SELECT info FROM files WHERE tenant = ? ORDER BY created DESC"
            return [
                msgspec.json.decode(info, type=FileInfo) for (info,) in connection.execute(query, (tenant,))
            ]

    def path_of(self, tenant: str, id: str) -> Path:
        return self._path(self.file(tenant, id).id)

    def delete_file(self, tenant: str, id: str) -> None:
        """A job that runs goes on with what it has read."""
        self.file(tenant, id)
        with self._change() as connection:
            connection.execute("DELETE FROM files WHERE id = ?", (id,))
        self._path(id).unlink(missing_ok=True)

    # Jobs.

    def add_batch(self, tenant: str, endpoint: str, file: str, metadata: dict[str, Any] | None) -> Batch:
        if metadata is not None and len(msgspec.json.encode(metadata)) > _LONGEST_METADATA:
            raise ApiError(400, f"metadata has more than {_LONGEST_METADATA} characters", "metadata")
        info = self.file(tenant, file)
        if info.purpose != "batch":
            message = 'the file is not one of requests; upload it with the purpose "batch"'
            raise ApiError(400, message, "input_file_id")
        now = int(time.time())
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=endpoint,
            input_file_id=file,
            created_at=now,
            expires_at=now + WINDOW_SECONDS,
            metadata=metadata,
        )
        with self._change() as connection:
            of_tenant = "FROM batches WHERE tenant = ? AND is_over ="
            if connection.execute(f"SELECT COUNT(*) {of_tenant} 0", (tenant,)).fetchone()[0] >= _MOST_KEPT:
                raise ApiError(
                    413, f"{_MOST_KEPT} of your batches are not over; wait for some, or cancel them"
                )
            # Older ones that are over make room.
            latest = f"SELECT id {of_tenant} 1 ORDER BY created DESC LIMIT {_MOST_KEPT - 1}"
            query = f"DELETE {of_tenant} 1 AND id NOT IN ({latest})"
            connection.execute(query, (tenant, tenant))
            expires = now + self._days * 86_400
            row = (batch.id, tenant, time.time(), expires, 0, 0, None, 0.0, _encoded(batch))
            connection.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        return batch

    def batch(self, tenant: str, id: str) -> Batch:
        with self._change() as connection:
            return self._batch(connection, tenant, id)

    def batches(self, tenant: str) -> list[Batch]:
        """The newest first."""
        with self._change() as connection:
            query = "SELECT info FROM batches WHERE tenant = ? ORDER BY created DESC"
            return [msgspec.json.decode(info, type=Batch) for (info,) in connection.execute(query, (tenant,))]

    def cancel(self, tenant: str, id: str) -> Batch:
        """Whoever runs the job ends it shortly."""
        with self._change() as connection:
            batch = self._batch(connection, tenant, id)
            if batch.is_over:
                message = f"the batch is {batch.status} already"
                raise ApiError(409, message, "id")
            if batch.status != "cancelling":
                batch.become("cancelling")
            query = "UPDATE batches SET wants_end = 1, info = ? WHERE id = ?"
            connection.execute(query, (_encoded(batch), id))
        return batch

    def _batch(self, connection: sqlite3.Connection, tenant: str, id: str) -> Batch:
        query = "SELECT info FROM batches WHERE id = ? AND tenant = ?"
        found = connection.execute(query, (id, tenant)).fetchone()
        if found is None:
            raise ApiError(404, "there is no such batch", "id")
        return msgspec.json.decode(found[0], type=Batch)

    # For the process that runs a job.

    def claim(self, owner: str) -> tuple[str, Batch] | None:
        """The oldest job that nobody runs, of tenants with few running jobs, and its tenant. From now on
        `owner` runs it."""
        now = time.time()
        with self._change() as connection:
            alive = "b.is_over = 0 AND b.owner IS NOT NULL AND b.seen >= ?"
            query = (
                "SELECT id, tenant, info FROM batches AS a WHERE is_over = 0 AND (owner IS NULL OR seen < ?) "
                f"AND (SELECT COUNT(*) FROM batches AS b WHERE b.tenant = a.tenant AND {alive}) < ? "
                "ORDER BY created LIMIT 1"
            )
            silent = now - _SILENT_SECONDS
            found = connection.execute(query, (silent, silent, _MOST_OF_TENANT)).fetchone()
            if found is None:
                return None
            connection.execute("UPDATE batches SET owner = ?, seen = ? WHERE id = ?", (owner, now, found[0]))
        return found[1], msgspec.json.decode(found[2], type=Batch)

    def note(self, owner: str, batch: Batch) -> bool:
        """Writes what a job has come to, if `owner` still runs it. Returns whether somebody wants its end."""
        with self._change() as connection:
            query = "SELECT owner, wants_end, info FROM batches WHERE id = ?"
            found = connection.execute(query, (batch.id,)).fetchone()
            if found is None or found[0] != owner:
                raise LostJobError(batch.id)
            if found[1] and not batch.is_over and batch.status != "cancelling":
                batch.status = "cancelling"
                batch.cancelling_at = msgspec.json.decode(found[2], type=Batch).cancelling_at
            query = "UPDATE batches SET info = ?, is_over = ?, seen = ? WHERE id = ?"
            connection.execute(query, (_encoded(batch), batch.is_over, time.time(), batch.id))
            return bool(found[1])

    def leave(self, owner: str) -> None:
        """Lets others run the jobs of `owner`."""
        with self._change() as connection:
            connection.execute("UPDATE batches SET owner = NULL WHERE owner = ?", (owner,))

    def results(self, batch: Batch) -> tuple[Path, Path]:
        """The files of a job's answers and errors, while it runs."""
        return self._folder / f"{batch.id}.output", self._folder / f"{batch.id}.errors"

    def drop_expired(self) -> None:
        """Drops the files and ended jobs whose time is over, and uploads that never ended."""
        now = time.time()
        with self._change() as connection:
            query = "SELECT id FROM files WHERE expires < ?"
            gone = [id for (id,) in connection.execute(query, (now,)).fetchall()]
            connection.execute("DELETE FROM files WHERE expires < ?", (now,))
            connection.execute("DELETE FROM batches WHERE is_over = 1 AND expires < ?", (now,))
        for id in gone:
            self._path(id).unlink(missing_ok=True)
        for path in self._folder.glob("upload-*"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < now - 3600:
                    path.unlink()

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}.jsonl"

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._database, timeout=10, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")


class LostJobError(Exception):
    """Another process runs the job now."""


def _encoded(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()


async def run_batches(store: BatchStore, ask: Ask, is_ready: Callable[[], bool]) -> None:
    """Runs jobs until cancelled; those that are not done then go on later, here or in another process."""
    owner = uuid.uuid4().hex
    looks = 0
    jobs: set[asyncio.Task[None]] = set()
    try:
        while True:
            try:
                if looks % _LOOKS_BETWEEN_DROPS == 0:
                    await asyncio.to_thread(store.drop_expired)
                looks += 1
                while len(jobs) < _MOST_JOBS and is_ready():
                    claimed = await asyncio.to_thread(store.claim, owner)
                    if claimed is None:
                        break
                    job = asyncio.create_task(_Job(store, owner, *claimed, ask).run(), name="maxsimd-batch")
                    jobs.add(job)
                    job.add_done_callback(jobs.discard)
            except (OSError, sqlite3.Error) as error:
                log.warning("the folder of batches cannot be read or written, and is tried again: %s", error)
            await asyncio.sleep(_LOOK_SECONDS)
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        with suppress(sqlite3.Error):
            store.leave(owner)


class _Job:
    """One job that this process runs."""

    def __init__(self, store: BatchStore, owner: str, tenant: str, batch: Batch, ask: Ask) -> None:
        self._store, self._owner, self._tenant, self.batch = store, owner, tenant, batch
        self._ask = ask
        self._must_end = asyncio.Event()
        self._end: Status = "completed"
        self._output, self._errors = store.results(batch)

    async def run(self) -> None:
        """Ends the job, or leaves it to another process."""
        try:
            await self._run()
        except LostJobError:
            log.warning("another process has taken over the batch %s", self.batch.id)
        except Exception:
            log.exception("the batch %s cannot be run now; it is tried again", self.batch.id)

    async def _run(self) -> None:
        if self.batch.status == "validating" and not await self._validate():
            return
        done = await asyncio.to_thread(self._resume)
        beating = asyncio.create_task(self._beat())
        try:
            await self._run_lines(done)
        finally:
            beating.cancel()
            beaten = await asyncio.gather(beating, return_exceptions=True)
        if isinstance(beaten[0], Exception):
            raise beaten[0]
        await self._finish()

    async def _validate(self) -> bool:
        batch = self.batch
        errors, total = await asyncio.to_thread(self._wrong_lines)
        batch.request_counts.total = total
        if errors:
            batch.errors = BatchErrors(errors)
        batch.become("failed" if errors else "in_progress")
        await self._note()
        return not errors

    def _wrong_lines(self) -> tuple[list[BatchError], int]:
        errors: list[BatchError] = []
        seen: set[str] = set()
        try:
            for number, line in self._lines():
                reason = _reason_against(line, self.batch.endpoint, seen)
                if len(seen) > MOST_LINES:
                    reason = f"there are more than {MOST_LINES} lines; send them in several files"
                if reason is not None:
                    errors.append(BatchError(code="invalid_request", message=reason, line=number))
                    if len(errors) == _MOST_ERRORS or len(seen) > MOST_LINES:
                        break
        except (OSError, ApiError):
            errors.append(BatchError(code="missing_file", message="the file of requests is gone"))
        if not seen and not errors:
            errors.append(BatchError(code="empty_file", message="the file has no lines"))
        return errors, len(seen)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with self._store.path_of(self._tenant, self.batch.input_file_id).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line

    def _resume(self) -> set[str]:
        """The requests that have a result from before. A line that breaks off is removed."""
        done: set[str] = set()
        counts = self.batch.request_counts
        for path in (self._output, self._errors):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            whole = number = 0
            with path.open("rb+") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    whole += len(line)
                    number += 1
                    done.add(msgspec.json.decode(line, type=_Seen).custom_id)
                file.truncate(whole)
            if path is self._output:
                counts.completed = number
            else:
                counts.failed = number
        return done

    async def _run_lines(self, done: set[str]) -> None:
        room = asyncio.Semaphore(_AT_ONCE)
        lines = self._lines()
        async with asyncio.TaskGroup() as running:
            while not self._must_end.is_set():
                found = await asyncio.to_thread(next, lines, None)
                if found is None:
                    return
                line = msgspec.json.decode(found[1], type=Line)
                if line.custom_id in done:
                    continue
                await room.acquire()
                running.create_task(self._run_line(line)).add_done_callback(lambda _: room.release())

    async def _run_line(self, line: Line) -> None:
        if not self._must_end.is_set():
            body = msgspec.json.encode({"priority": "batch", **line.body})
            answer = await self._answer(line.url, body)
            if answer is not None:
                request_id = f"batch_req_{uuid.uuid4().hex}"
                response = _Response(answer.status, request_id, msgspec.Raw(answer.body))
                self._write(_Result(id=request_id, custom_id=line.custom_id, response=response))

    async def _answer(self, url: str, body: bytes) -> Answer | None:
        """The answer to one request; None if the job ends before."""
        wait = _LEAST_WAIT
        while True:
            answer = await self._ask(self._tenant, url, body)
            if answer.status not in _RETRIED:
                return answer
            advised = min(float(answer.headers.get("Retry-After", 0)), _LONGEST_WAIT)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(wait, advised)):
                    await self._must_end.wait()
                return None
            wait = min(2 * wait, _LONGEST_WAIT)

    def _write(self, result: _Result) -> None:
        """Adds a result to its file: of an answer, or of a request that was refused or never ran."""
        counts, is_right = (
            self.batch.request_counts,
            result.response is not None and result.response.status_code < 400,
        )
        counts.completed += is_right
        counts.failed += not is_right
        with (self._output if is_right else self._errors).open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")

    async def _beat(self) -> None:
        """Writes how far the job is, and decides whether it must end."""
        room = await asyncio.to_thread(self._store.room, self._tenant)
        try:
            while not self._must_end.is_set():
                if await self._note():
                    self._end = "cancelled"
                elif time.time() > self.batch.expires_at:
                    self._end = "expired"
                elif sum(path.stat().st_size for path in (self._output, self._errors)) > room:
                    self._end = "failed"
                if self._end != "completed":
                    self._must_end.set()
                await asyncio.sleep(_LOOK_SECONDS)
        except (LostJobError, OSError, sqlite3.Error):
            self._must_end.set()
            raise

    async def _note(self) -> bool:
        return await asyncio.to_thread(self._store.note, self._owner, self.batch)

    async def _finish(self) -> None:
        batch = self.batch
        if self._end == "failed":
            message = "the results have more bytes than your files may have (--limit batch_mb); delete some"
            batch.errors = BatchErrors([BatchError(code="quota_exceeded", message=message)])
        if self._end == "expired":
            await asyncio.to_thread(self._write_late)
        if self._end != "cancelled":
            batch.become("finalizing")
        for path, name in ((self._output, "output_file_id"), (self._errors, "error_file_id")):
            if path.stat().st_size:
                kind = "batch_output" if path is self._output else "batch_error"
                info = self._store.add_file(self._tenant, path, f"{batch.id}_{kind}.jsonl", "batch_output")
                setattr(batch, name, info.id)
            else:
                path.unlink()
        batch.become(self._end)
        await self._note()
        counts = batch.request_counts
        log.info("the batch %s is %s: %d of %d requests answered, %d failed", batch.id, batch.status,
                 counts.completed, counts.total, counts.failed)  # fmt: skip

    def _write_late(self) -> None:
        done = self._resume()
        error = {"code": "batch_expired", "message": "the batch was not done within 24 hours"}
        for _, found in self._lines():
            line = msgspec.json.decode(found, type=Line)
            if line.custom_id not in done:
                id = f"batch_req_{uuid.uuid4().hex}"
                self._write(_Result(id=id, custom_id=line.custom_id, response=None, error=error))


def _reason_against(given: bytes, endpoint: str, seen: set[str]) -> str | None:
    """What is wrong with a line; None if it can run."""
    try:
        line = msgspec.json.decode(given, type=Line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return f"the line is not a request: {error}"
    is_new = line.custom_id not in seen
    seen.add(line.custom_id)
    if not is_new:
        return f"custom_id {line.custom_id[:100]!r} is in an earlier line too"
    if line.method != "POST":
        return f"method must be POST, not {line.method[:20]!r}"
    if line.url != endpoint:
        return f"url must be the endpoint of the batch, {endpoint}, not {line.url[:100]!r}"
    return "stream must be false in a batch" if line.body.get("stream") else None
