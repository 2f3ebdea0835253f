"""Batch jobs, as OpenAI's: files of requests that run behind interactive work, resumable, and their results.

A folder holds the files, and a database of files and jobs that processes share. A process claims a job, and
keeps its claim alive while it runs it; a claim that is silent may be taken by another process."""

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
# Files, and jobs, of one tenant.
_MOST_KEPT = 1000
# Errors of a file that are named, and metadata of a job in JSON.
_MOST_ERRORS, _LONGEST_METADATA = 100, 16 * 1024
# Requests of one job at a time: enough for full steps. Their bytes; jobs of one process, and of one tenant.
_AT_ONCE, _MOST_BYTES, _MOST_JOBS, _MOST_OF_TENANT = 16, 32 * _MIB, 8, 2
# A job is given up after so many claims: it may be what ends the processes.
_MOST_CLAIMS = 20
_SILENT_SECONDS, _LOOK_SECONDS, _LOOKS_BETWEEN_DROPS = 60.0, 1.0, 600
# Uploads and files that no row names are removed when they are this old.
_LEFT_SECONDS = 24 * 3600
# Wait before a request that the server had no room for is sent again.
_LEAST_WAIT, _LONGEST_WAIT = 1.0, 30.0
RETRIED = frozenset({429, 503})

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
    """A line of a job's file: a request. Its body stays undecoded, whatever it holds."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _OfBody(msgspec.Struct):
    """Fields of a body that matter to a job."""

    stream: Any = None
    priority: Any = None


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Result(msgspec.Struct, kw_only=True):
    id: str
    custom_id: str
    response: _Response | None
    error: dict[str, str] | None = None


class _Seen(msgspec.Struct):
    custom_id: str


_LINES = msgspec.json.Decoder(Line)
_BODIES = msgspec.json.Decoder(_OfBody)
_SEEN = msgspec.json.Decoder(_Seen)

_TABLES = (
    "CREATE TABLE IF NOT EXISTS files (id TEXT PRIMARY KEY, tenant TEXT, created REAL, expires REAL, "
    "bytes INTEGER, info TEXT)",
    "CREATE TABLE IF NOT EXISTS batches (id TEXT PRIMARY KEY, tenant TEXT, created REAL, expires REAL, "
    "is_over INTEGER, is_cancelled INTEGER, claims INTEGER, claim TEXT, seen REAL, info TEXT)",
)


class LostClaimError(Exception):
    """Another process runs the job now, or it is over."""


class BatchStore:
    """The files and jobs of all tenants in a folder. Methods may wait for the disk. They raise ApiError: 404
    for what a tenant does not have, 503 while the folder cannot be used. Raises SetupError for a folder that
    cannot be used from the start."""

    def __init__(self, folder: Path, config: ServerConfig) -> None:
        self._folder = folder
        self.most_file_bytes = config.batch_file_mb * _MIB
        self.most_line_bytes = config.max_body_mb * _MIB
        self._most_bytes = config.batch_mb * _MIB
        self._days = config.batch_days
        self._database = folder / "batches.sqlite3"
        self._uploads: dict[str, int] = {}
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._database, os.O_RDWR | os.O_CREAT, 0o600))
            with self._connection("IMMEDIATE") as connection:
                for table in _TABLES:
                    connection.execute(table)
        except (OSError, sqlite3.Error) as error:
            raise SetupError(
                f"the folder {str(folder)!r} cannot be used for batches: {error}; name another (--batch-dir)"
            ) from error

    # Files.

    def new_path(self) -> Path:
        """A new file that only this user may read."""
        return _private(self._folder / f"upload-{uuid.uuid4().hex}")

    @contextmanager
    def uploading(self, tenant: str, room: int) -> Iterator[Callable[[int], None]]:
        """For one upload: a function that counts more of its bytes. It raises ApiError (413) once the uploads
        of the tenant to this process have more than its `room`."""
        own = 0

        def count(more: int) -> None:
            nonlocal own
            own += more
            self._uploads[tenant] = self._uploads.get(tenant, 0) + more
            if self._uploads[tenant] > room:
                raise self._quota_error()

        try:
            yield count
        finally:
            self._uploads[tenant] = self._uploads.get(tenant, 0) - own
            if not self._uploads[tenant]:
                del self._uploads[tenant]

    def room(self, tenant: str) -> int:
        """Bytes that the tenant's files, and the results of its jobs, may still take."""
        with self._connection() as connection:
            return self._room(connection, tenant)

    def _room(self, connection: sqlite3.Connection, tenant: str) -> int:
        query = "SELECT COALESCE(SUM(bytes), 0) FROM files WHERE tenant = ?"
        used: int = connection.execute(query, (tenant,)).fetchone()[0]
        query = "SELECT id FROM batches WHERE tenant = ? AND is_over = 0"
        for (id,) in connection.execute(query, (tenant,)).fetchall():
            used += sum(_size(self._path(result)) for result in _results_of(id))
        return self._most_bytes - used

    def _quota_error(self) -> ApiError:
        most = self._most_bytes // _MIB
        message = f"your files would have more than {most} MiB (--limit batch_mb); delete some"
        return ApiError(413, message, "file")

    def add_file(self, tenant: str, path: Path, name: str) -> FileInfo:
        """Takes a file of requests over."""
        size = path.stat().st_size
        info = self._info(f"file-{uuid.uuid4().hex}", size, name, "batch")
        with self._connection("IMMEDIATE") as connection:
            self._check_number(connection, tenant)
            if size > self._room(connection, tenant):
                raise self._quota_error()
            self._insert(connection, tenant, info)
            os.replace(path, self._path(info.id))
        return info

    def file(self, tenant: str, id: str) -> FileInfo:
        with self._connection() as connection:
            query = "SELECT info FROM files WHERE id = ? AND tenant = ?"
            found = connection.execute(query, (id, tenant)).fetchone()
        if found is None:
            raise ApiError(404, "there is no such file", "id")
        return msgspec.json.decode(found[0], type=FileInfo)

    def files(self, tenant: str) -> list[FileInfo]:
        """The newest first."""
        with self._connection() as connection:
            query = "SELECT info FROM files WHERE tenant = ? ORDER BY created DESC"
            found = connection.execute(query, (tenant,)).fetchall()
        return [msgspec.json.decode(info, type=FileInfo) for (info,) in found]

    def path_of(self, tenant: str, id: str) -> Path:
        return self._path(self.file(tenant, id).id)

    def delete_file(self, tenant: str, id: str) -> None:
        """Raises ApiError (409) for a file that a job still reads."""
        self.file(tenant, id)
        with self._connection("IMMEDIATE") as connection:
            query = "SELECT info FROM batches WHERE tenant = ? AND is_over = 0"
            for (info,) in connection.execute(query, (tenant,)).fetchall():
                if (batch := msgspec.json.decode(info, type=Batch)).input_file_id == id:
                    raise ApiError(409, f"{batch.id} still reads this file; wait for it, or cancel it", "id")
            connection.execute("DELETE FROM files WHERE id = ?", (id,))
        self._path(id).unlink(missing_ok=True)

    def _info(self, id: str, size: int, name: str, purpose: str) -> FileInfo:
        now = int(time.time())
        expires = now + self._days * 86_400
        return FileInfo(id=id, bytes=size, created_at=now, filename=name, purpose=purpose, expires_at=expires)

    def _insert(self, connection: sqlite3.Connection, tenant: str, info: FileInfo) -> None:
        row = (info.id, tenant, time.time(), info.expires_at, info.bytes, _encoded(info))
        connection.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", row)

    def _check_number(self, connection: sqlite3.Connection, tenant: str) -> None:
        query = "SELECT COUNT(*) FROM files WHERE tenant = ?"
        if (number := connection.execute(query, (tenant,)).fetchone()[0]) >= _MOST_KEPT:
            raise ApiError(413, f"you have {number} files, and no more are kept; delete some", "file")

    # Jobs.

    def add_batch(self, tenant: str, endpoint: str, file: str, metadata: dict[str, Any] | None) -> Batch:
        if metadata is not None and len(msgspec.json.encode(metadata)) > _LONGEST_METADATA:
            raise ApiError(400, f"metadata has more than {_LONGEST_METADATA} characters", "metadata")
        if self.file(tenant, file).purpose != "batch":
            raise ApiError(400, "the file has results; upload one of requests", "input_file_id")
        now = int(time.time())
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=endpoint,
            input_file_id=file,
            created_at=now,
            expires_at=now + WINDOW_SECONDS,
            metadata=metadata,
        )
        with self._connection("IMMEDIATE") as connection:
            self._check_number(connection, tenant)
            of_tenant = "FROM batches WHERE tenant = ? AND is_over ="
            if connection.execute(f"SELECT COUNT(*) {of_tenant} 0", (tenant,)).fetchone()[0] >= _MOST_KEPT:
                message = f"{_MOST_KEPT} of your batches are not over; wait for some, or cancel them"
                raise ApiError(413, message)
            # Older ones that are over make room.
            latest = f"SELECT id {of_tenant} 1 ORDER BY created DESC LIMIT {_MOST_KEPT - 1}"
            connection.execute(f"DELETE {of_tenant} 1 AND id NOT IN ({latest})", (tenant, tenant))
            expires = now + self._days * 86_400
            row = (batch.id, tenant, time.time(), expires, 0, 0, 0, None, 0.0, _encoded(batch))
            connection.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        return batch

    def batch(self, tenant: str, id: str) -> Batch:
        with self._connection() as connection:
            return self._batch(connection, tenant, id)

    def batches(self, tenant: str) -> list[Batch]:
        """The newest first."""
        with self._connection() as connection:
            query = "SELECT info FROM batches WHERE tenant = ? ORDER BY created DESC"
            found = connection.execute(query, (tenant,)).fetchall()
        return [msgspec.json.decode(info, type=Batch) for (info,) in found]

    def cancel(self, tenant: str, id: str) -> Batch:
        """The process that runs the job, or one that claims it, ends it shortly."""
        with self._connection("IMMEDIATE") as connection:
            batch = self._batch(connection, tenant, id)
            if batch.is_over:
                raise ApiError(409, f"the batch is {batch.status} already", "id")
            if batch.status != "cancelling":
                batch.become("cancelling")
            query = "UPDATE batches SET is_cancelled = 1, info = ? WHERE id = ?"
            connection.execute(query, (_encoded(batch), id))
        return batch

    def _batch(self, connection: sqlite3.Connection, tenant: str, id: str) -> Batch:
        query = "SELECT info FROM batches WHERE id = ? AND tenant = ?"
        found = connection.execute(query, (id, tenant)).fetchone()
        if found is None:
            raise ApiError(404, "there is no such batch", "id")
        return msgspec.json.decode(found[0], type=Batch)

    # For the process that runs a job.

    def claim(self) -> "Claim | None":
        """Claims the oldest job that nobody runs, of a tenant that has few running ones, or a cancelled
        one."""
        now, claim = time.time(), uuid.uuid4().hex
        silent = now - _SILENT_SECONDS
        with self._connection("IMMEDIATE") as connection:
            running = "b.is_over = 0 AND b.is_cancelled = 0 AND b.claim IS NOT NULL AND b.seen >= ?"
            few = f"(SELECT COUNT(*) FROM batches AS b WHERE b.tenant = a.tenant AND {running}) < ?"
            query = (
                "SELECT id, tenant, claims, info FROM batches AS a WHERE is_over = 0 AND "
                f"(claim IS NULL OR seen < ?) AND (is_cancelled = 1 OR {few}) "
                "ORDER BY is_cancelled DESC, created LIMIT 1"
            )
            found = connection.execute(query, (silent, silent, _MOST_OF_TENANT)).fetchone()
            if found is None:
                return None
            id, tenant, claims, info = found
            query = "UPDATE batches SET claim = ?, claims = claims + 1, seen = ? WHERE id = ?"
            connection.execute(query, (claim, now, id))
        return Claim(claim, tenant, claims + 1, msgspec.json.decode(info, type=Batch))

    def keep_alive(self, claim: "Claim") -> bool:
        """Saves a job's progress. Returns whether it was cancelled. Raises LostClaimError."""
        with self._connection("IMMEDIATE") as connection:
            is_cancelled, at = self._check_claim(connection, claim)
            if is_cancelled and claim.batch.status != "cancelling":
                claim.batch.status, claim.batch.cancelling_at = "cancelling", at
            query = "UPDATE batches SET info = ?, seen = ? WHERE id = ?"
            connection.execute(query, (_encoded(claim.batch), time.time(), claim.batch.id))
        return is_cancelled

    def finish(self, claim: "Claim", status: Status) -> None:
        """Ends a job with a status and its files of results, both or neither. Raises LostClaimError."""
        batch = claim.batch
        with self._connection("IMMEDIATE") as connection:
            self._check_claim(connection, claim)
            for id, name, field in zip(
                _results_of(batch.id), ("output", "errors"), ("output_file_id", "error_file_id"), strict=True
            ):
                if size := _size(self._path(id)):
                    info = self._info(id, size, f"{batch.id}_{name}.jsonl", "batch_output")
                    self._insert(connection, claim.tenant, info)
                    setattr(batch, field, id)
            batch.become(status)
            query = "UPDATE batches SET info = ?, is_over = 1, claim = NULL WHERE id = ?"
            connection.execute(query, (_encoded(batch), batch.id))

    def release(self, claim: "Claim") -> None:
        """Lets others run a job."""
        with self._connection("IMMEDIATE") as connection:
            connection.execute("UPDATE batches SET claim = NULL WHERE claim = ?", (claim.id,))

    def _check_claim(self, connection: sqlite3.Connection, claim: "Claim") -> tuple[bool, int | None]:
        query = "SELECT is_cancelled, info FROM batches WHERE id = ? AND claim = ? AND is_over = 0"
        found = connection.execute(query, (claim.batch.id, claim.id)).fetchone()
        if found is None:
            raise LostClaimError(claim.batch.id)
        return bool(found[0]), msgspec.json.decode(found[1], type=Batch).cancelling_at

    def results(self, batch: Batch) -> tuple[Path, Path]:
        """The files of a job's answers and errors."""
        output, errors = _results_of(batch.id)
        return self._path(output), self._path(errors)

    def drop_expired(self) -> None:
        """Drops the files and ended jobs whose time is over, and files that nobody knows."""
        now = time.time()
        with self._connection("IMMEDIATE") as connection:
            connection.execute("DELETE FROM files WHERE expires < ?", (now,))
            connection.execute("DELETE FROM batches WHERE is_over = 1 AND expires < ?", (now,))
            known = {id for (id,) in connection.execute("SELECT id FROM files").fetchall()}
            query = "SELECT id FROM batches WHERE is_over = 0"
            known |= {id for (job,) in connection.execute(query).fetchall() for id in _results_of(job)}
        for path in (*self._folder.glob("upload-*"), *self._folder.glob("file-*.jsonl")):
            with suppress(FileNotFoundError):
                if path.stem not in known and path.stat().st_mtime < now - _LEFT_SECONDS:
                    path.unlink()

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}.jsonl"

    @contextmanager
    def _connection(self, kind: str = "DEFERRED") -> Iterator[sqlite3.Connection]:
        """A transaction: all of it is done, or nothing."""
        try:
            with closing(sqlite3.connect(self._database, timeout=10, isolation_level=None)) as connection:
                connection.execute(f"BEGIN {kind}")
                yield connection
                connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            log.warning("the folder of batches cannot be used now: %s", error)
            message = "files and batch jobs cannot be read or written now; try again shortly"
            raise ApiError(503, message, retry_after=1) from error


class Claim:
    """A job that this process runs, for its `tenant`; the `number` of times that it was claimed."""

    def __init__(self, id: str, tenant: str, number: int, batch: Batch) -> None:
        self.id, self.tenant, self.number, self.batch = id, tenant, number, batch


def _results_of(batch: str) -> tuple[str, str]:
    """The ids of a job's files of answers and errors."""
    id = batch.removeprefix("batch_")
    return f"file-{id}-output", f"file-{id}-errors"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _private(path: Path) -> Path:
    """Creates a file that only this user may read, unless it is there."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    return path


def _encoded(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()


async def run_batches(store: BatchStore, ask: Ask, is_ready: Callable[[], bool]) -> None:
    """Runs jobs until cancelled; those that are not done then go on later, here or in another process."""
    looks = 0
    jobs: set[asyncio.Task[None]] = set()
    try:
        while True:
            try:
                if looks % _LOOKS_BETWEEN_DROPS == 0:
                    await asyncio.to_thread(store.drop_expired)
                looks += 1
                while len(jobs) < _MOST_JOBS and is_ready():
                    claim = await asyncio.to_thread(store.claim)
                    if claim is None:
                        break
                    job = asyncio.create_task(_Job(store, claim, ask).run(), name="maxsimd-batch")
                    jobs.add(job)
                    job.add_done_callback(jobs.discard)
            except ApiError:
                pass  # it was logged
            except Exception:
                log.exception("batch jobs cannot be looked for; this is tried again")
            await asyncio.sleep(_LOOK_SECONDS)
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


class _Job:
    """A claimed job."""

    def __init__(self, store: BatchStore, claim: Claim, ask: Ask) -> None:
        self._store, self._claim, self._ask = store, claim, ask
        self._output, self._errors = store.results(claim.batch)
        self._writing = asyncio.Lock()
        # Set when the job must end: requests in flight are finished, and no others are sent.
        self._must_end = asyncio.Event()
        self._final_status: Status = "completed"
        self._is_done = False
        self._bytes = 0
        self._has_room = asyncio.Event()

    @property
    def batch(self) -> Batch:
        return self._claim.batch

    async def run(self) -> None:
        """Ends the job, or leaves it to another claim."""
        try:
            async with asyncio.TaskGroup() as group:
                alive = group.create_task(self._keep_alive())
                await self._run()
                alive.cancel()
        except* LostClaimError:
            log.warning("another process has taken over the batch %s", self.batch.id)
        except* Exception as errors:
            log.error("the batch %s cannot be run now; it is tried again", self.batch.id, exc_info=errors)
            await asyncio.sleep(_LONGEST_WAIT)
        finally:
            with suppress(ApiError, sqlite3.Error):
                self._store.release(self._claim)

    async def _run(self) -> None:
        batch = self.batch
        if self._claim.number > _MOST_CLAIMS:
            self._fail("given_up", f"the job was begun {_MOST_CLAIMS} times and never ended")
        elif batch.status == "validating":
            errors = await asyncio.to_thread(self._validate)
            if errors:
                batch.errors = BatchErrors(errors)
                self._end("failed")
            elif batch.status == "validating":
                batch.become("in_progress")
        if batch.errors is None:
            done = await asyncio.to_thread(self._resume)
            if batch.status == "cancelling":
                self._end("cancelled")
            await self._run_lines(done)
        if self._final_status == "expired":
            await asyncio.to_thread(self._write_late)
        elif self._final_status == "failed" and batch.errors is None:
            message = "the results have more bytes than your files may have (--limit batch_mb); delete some"
            self._fail("quota_exceeded", message)
        if self._final_status in ("completed", "expired"):
            batch.become("finalizing")
        self._is_done = True
        await asyncio.to_thread(self._store.finish, self._claim, self._final_status)
        counts = batch.request_counts
        log.info("the batch %s is %s: %d of %d requests answered, %d failed", batch.id, batch.status,
                 counts.completed, counts.total, counts.failed)  # fmt: skip

    async def _keep_alive(self) -> None:
        """Keeps the claim until cancelled, and decides whether the job must end early. Raises LostClaimError
        if the claim is gone, or could not be kept for long."""
        last = time.monotonic()
        while True:
            try:
                is_cancelled = await asyncio.to_thread(self._store.keep_alive, self._claim)
                room = await asyncio.to_thread(self._store.room, self._claim.tenant)
                last = time.monotonic()
            except LostClaimError:
                if self._is_done:
                    return
                raise
            except ApiError:
                if time.monotonic() - last > _SILENT_SECONDS / 2:
                    raise LostClaimError(self.batch.id) from None
            else:
                if is_cancelled:
                    self._end("cancelled")
                elif room < 0:
                    self._end("failed")
            if time.time() > self.batch.expires_at:
                self._end("expired")
            await asyncio.sleep(_LOOK_SECONDS)

    def _fail(self, code: str, message: str) -> None:
        self.batch.errors = BatchErrors([BatchError(code=code, message=message)])
        self._end("failed")

    def _end(self, status: Status) -> None:
        if not self._must_end.is_set():
            self._final_status = status
            self._must_end.set()

    def _validate(self) -> list[BatchError]:
        """Counts the requests. Returns what is wrong with the file."""
        errors: list[BatchError] = []
        seen: set[str] = set()
        try:
            for number, line in self._lines():
                reason = self._error_in(line, seen)
                if len(seen) > MOST_LINES:
                    reason = f"there are more than {MOST_LINES} lines; send them in several files"
                if reason is not None:
                    errors.append(BatchError(code="invalid_request", message=reason, line=number))
                    if len(errors) == _MOST_ERRORS or len(seen) > MOST_LINES:
                        break
            if not seen and not errors:
                errors.append(BatchError(code="empty_file", message="the file has no lines"))
        except (FileNotFoundError, ApiError) as error:
            if isinstance(error, ApiError) and error.status != 404:
                raise
            errors.append(BatchError(code="missing_file", message="the file of requests is gone"))
        self.batch.request_counts.total = len(seen)
        return errors

    def _error_in(self, given: bytes, seen: set[str]) -> str | None:
        """Says what is wrong with a line. Returns None if it can run."""
        if len(given) > self._store.most_line_bytes:
            return "the line is longer than a request may be (--max-body-mb); send fewer documents in it"
        try:
            line = _LINES.decode(given)
            body = _BODIES.decode(line.body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            return f"the line is not a request: {error}"
        is_new = line.custom_id not in seen
        seen.add(line.custom_id)
        if not is_new:
            return f"custom_id {line.custom_id[:100]!r} is in an earlier line too"
        if line.method != "POST":
            return f"method must be POST, not {line.method[:20]!r}"
        if line.url != self.batch.endpoint:
            return f"url must be the endpoint of the batch, {self.batch.endpoint}, not {line.url[:100]!r}"
        return "stream must be false in a batch" if body.stream else None

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """The lines that are not empty, with their numbers. A line that is too long comes in part."""
        most = self._store.most_line_bytes + 1
        with self._store.path_of(self._claim.tenant, self.batch.input_file_id).open("rb") as file:
            number, is_within = 0, False
            while line := file.readline(most):
                number += not is_within
                if line.strip() and not is_within:
                    yield number, line
                is_within = not line.endswith(b"\n")

    def _resume(self) -> set[str]:
        """The requests that have a result from before. Results from a line that broke off on are removed."""
        done: set[str] = set()
        counts = self.batch.request_counts
        for path, name in ((self._output, "completed"), (self._errors, "failed")):
            whole = number = 0
            with _private(path).open("rb+") as file:
                for line in file:
                    try:
                        if not line.endswith(b"\n"):
                            break
                        done.add(_SEEN.decode(line).custom_id)
                    except (msgspec.DecodeError, UnicodeDecodeError):
                        break
                    whole += len(line)
                    number += 1
                file.truncate(whole)
            setattr(counts, name, number)
        return done

    async def _run_lines(self, done: set[str]) -> None:
        """Sends all requests that have no result, some at a time."""
        places = asyncio.Semaphore(_AT_ONCE)
        lines = self._lines()
        try:
            async with asyncio.TaskGroup() as running:
                while not self._must_end.is_set():
                    found = await asyncio.to_thread(next, lines, None)
                    if found is None:
                        return
                    line = _LINES.decode(found[1])
                    if line.custom_id in done:
                        continue
                    await places.acquire()
                    while self._bytes and self._bytes + len(line.body) > _MOST_BYTES:
                        self._has_room.clear()
                        await self._has_room.wait()
                    self._bytes += len(line.body)
                    running.create_task(self._run_line(line, places))
        except (FileNotFoundError, ApiError) as error:
            if isinstance(error, ApiError) and error.status != 404:
                raise
            self._fail("missing_file", "the file of requests is gone")
        finally:
            lines.close()  # type: ignore[attr-defined]

    async def _run_line(self, line: Line, places: asyncio.Semaphore) -> None:
        try:
            answer = await self._answer(line)
            if answer is not None:
                await self._write(_result_of(line, answer))
        finally:
            self._bytes -= len(line.body)
            self._has_room.set()
            places.release()

    async def _answer(self, line: Line) -> Answer | None:
        """The answer to one request; None if the job ends before."""
        body = bytes(line.body)
        if _BODIES.decode(body).priority is None:
            inside = body.strip()[1:].lstrip()
            body = b'{"priority":"batch"' + (b"" if inside.startswith(b"}") else b",") + inside
        wait = _LEAST_WAIT
        while not self._must_end.is_set():
            answer = await self._ask(self._claim.tenant, line.url, body)
            if answer.status not in RETRIED:
                return answer
            advised = min(float(answer.headers.get("Retry-After", 0)), _LONGEST_WAIT)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(wait, advised)):
                    await self._must_end.wait()
            wait = min(2 * wait, _LONGEST_WAIT)
        return None

    async def _write(self, result: _Result) -> None:
        """Adds a result to its file."""
        response, counts = result.response, self.batch.request_counts
        is_right = response is not None and response.status_code < 400
        async with self._writing:
            await asyncio.to_thread(_append, self._output if is_right else self._errors, result)
        counts.completed += is_right
        counts.failed += not is_right

    def _write_late(self) -> None:
        done = self._resume()
        error = {"code": "batch_expired", "message": "the batch was not done within 24 hours"}
        with suppress(FileNotFoundError, ApiError):
            for _, found in self._lines():
                line = _LINES.decode(found)
                if line.custom_id not in done:
                    _append(
                        self._errors,
                        _Result(id=_new_id(), custom_id=line.custom_id, response=None, error=error),
                    )
                    self.batch.request_counts.failed += 1


def _result_of(line: Line, answer: Answer) -> _Result:
    """The result of a request. Answers that are not JSON have no place in a file of results."""
    id = _new_id()
    kind = answer.headers.get("Content-Type", "application/json").partition(";")[0]
    if kind != "application/json":
        error = {"code": "not_json", "message": f"the answer is {kind}; ask for JSON"}
        return _Result(id=id, custom_id=line.custom_id, response=None, error=error)
    response = _Response(answer.status, id, msgspec.Raw(answer.body))
    return _Result(id=id, custom_id=line.custom_id, response=response)


def _append(path: Path, result: _Result) -> None:
    with _private(path).open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
