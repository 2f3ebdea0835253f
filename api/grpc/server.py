"""The gRPC server beside the HTTP server, in its event loop. Each message is answered as a request to an HTTP
route, so keys, limits, metrics and logs are the same. A call ends if the server waits for its client for more
than `idle_seconds`."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

# Its library logs on standard error by itself.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import msgspec
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio as reflection

from maxsimd.api.answer import Answer, ApiError, error_answer
from maxsimd.api.config import ServerConfig, SetupError
from maxsimd.api.grpc import tei_pb2 as pb
from maxsimd.api.grpc.methods import (
    MOST_CALLS,
    RANKING,
    STREAMS,
    UNARY,
    Method,
    encoded,
    metadata_of,
    parsed,
    ranking_fields,
    ranks_of,
    truncation_of,
)
from maxsimd.api.handlers import handle
from maxsimd.api.handlers.bodies import LARGE_BODY
from maxsimd.api.reading import check_number
from maxsimd.api.state import HeldBytes, ServerState
from maxsimd.api.wire import ErrorResponse

log = logging.getLogger("maxsimd.grpc")

# Messages of a stream that are answered at a time, calls of a connection, and watchers of the health.
_MOST_IN_FLIGHT, _MOST_CALLS_OF_CONNECTION, _MOST_WATCHERS = 32, 256, 128
# Seconds between looks at the health for watchers.
_LOOK_SECONDS = 0.1
_MOST_INT = 2**31 - 1
# Clients connect anew after an hour. Their calls may go on for ten minutes more.
_AGE_MS, _AGE_GRACE_MS = 3_600_000, 600_000
_ONLY_UNCOMPRESSED = 1
_HEALTH, _REFLECTION = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"
_SERVICES = tuple(service.full_name for service in pb.DESCRIPTOR.services_by_name.values())
# Headers of requests that mean something here, and of answers that clients get as metadata.
_TAKEN = frozenset({"authorization", "x-request-id", "traceparent"})
_PASSED = ("x-", "server-timing", "retry-after")

_CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_ERRORS = msgspec.json.Decoder(ErrorResponse)

Metadata = tuple[tuple[str, str], ...]


class _Refused(Exception):
    """An answer that is an error."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


class _Reply(NamedTuple):
    message: bytes
    metadata: Metadata


class GrpcServer:
    """Serves until it is closed. Raises SetupError if it cannot listen."""

    def __init__(self, state: ServerState, config: ServerConfig, most_connections: int) -> None:
        self._state = state
        self._closing = asyncio.Event()
        self._watchers = 0
        self._reflection = reflection.ReflectionServicer([*_SERVICES, _HEALTH, _REFLECTION])
        idle = _milliseconds(config.idle_seconds)
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", min(state.max_body_bytes, _MOST_INT)),
                ("grpc.max_concurrent_streams", _MOST_CALLS_OF_CONNECTION),
                ("grpc.max_allowed_incoming_connections", most_connections),
                ("grpc.max_connection_idle_ms", idle),
                ("grpc.keepalive_time_ms", idle),
                # Ends the rest of calls whose clients never read.
                ("grpc.max_connection_age_ms", _AGE_MS),
                ("grpc.max_connection_age_grace_ms", _AGE_GRACE_MS),
                ("grpc.server_handshake_timeout_ms", _milliseconds(config.header_seconds)),
                # A small message could be decompressed to gigabytes.
                ("grpc.compression_enabled_algorithms_bitset", _ONLY_UNCOMPRESSED),
                # Otherwise two servers could have the same port, and share its clients.
                ("grpc.so_reuseport", 0),
            ),
            maximum_concurrent_rpcs=MOST_CALLS,
        )
        handlers: dict[str, dict[str, Any]] = {
            "tei.v1.Rerank": {"RerankStream": self._handler(self._rank_stream, RANKING.route)},
            _REFLECTION: {"ServerReflectionInfo": self._handler(self._reflect, "/info")},
            # Load balancers send no key.
            _HEALTH: {
                "Check": self._handler(self._check_health, None),
                "Watch": self._handler(self._watch_health, None),
            },
        }
        for methods, kind in ((UNARY, self._unary), (STREAMS, self._stream)):
            for (service, name), method in methods.items():
                handler = self._handler(kind(method), method.route)
                handlers.setdefault(f"tei.v1.{service}", {})[name] = handler
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(name, methods) for name, methods in handlers.items()]
        )
        self.address = self._listen(config)

    def _listen(self, config: ServerConfig) -> str:
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.grpc_port}"
        try:
            if config.tls_cert is None:
                port = self._server.add_insecure_port(address)
            else:
                chain = Path(config.tls_cert).read_bytes()
                key = chain if config.tls_key is None else Path(config.tls_key).read_bytes()
                port = self._server.add_secure_port(address, grpc.ssl_server_credentials([(key, chain)]))
        except RuntimeError as error:
            raise SetupError(
                f"cannot listen on {config.host}, port {config.grpc_port}, for gRPC; choose another --host "
                "or --grpc-port, or stop what listens there"
            ) from error
        return f"{host}:{port}"

    async def start(self) -> None:
        await self._server.start()

    async def close(self, seconds: float) -> None:
        """Takes no more calls, and ends those that are not done after so many seconds."""
        self._closing.set()
        await self._server.stop(seconds)

    def _handler(self, call: "Answering", route: str | None) -> Any:
        """A handler that reads and writes bytes when `call` wants them. With a `route` it needs a key."""

        async def answer(_: Any, context: Any) -> None:
            client = _Call(context, self._state.config.idle_seconds, self._closing)
            try:
                if route is not None:
                    await self._check_key(client, route)
                await call(client)
            except _Refused as refused:
                failed = refused.answer
            except ApiError as error:
                failed = error_answer(error)
            else:
                return
            await client.abort(failed)

        return grpc.stream_stream_rpc_method_handler(answer)

    async def _check_key(self, call: "_Call", route: str) -> None:
        """Refuses a client without a key before it may send a message."""
        keys, authorization = self._state.keys, call.headers.get("authorization", "")
        if keys.are_asked_for and keys.accept(authorization) is None:
            # The handlers count and log it.
            raise _Refused(await handle(self._state, "POST", route, call.headers, _body(b"")))

    async def _ask(self, method: Method, call: "_Call", data: bytes) -> Answer:
        """The route's answer to a message. Raises _Refused for an error."""

        async def body() -> AsyncIterator[bytes]:
            yield await self._in_thread_if_large(data, lambda: method.body_of(data, self._most_texts))

        return await self._answer(method, call, body())

    async def _answer(self, method: Method, call: "_Call", body: AsyncIterator[bytes]) -> Answer:
        kind, timeout = "GET" if method.fields is None else "POST", call.seconds_left
        answer = await handle(self._state, kind, method.route, call.headers, body, timeout=timeout)
        if answer.status != 200:
            raise _Refused(answer)
        return answer

    @property
    def _most_texts(self) -> int:
        return self._state.config.max_documents

    async def _in_thread_if_large(self, data: bytes, function: Callable[[], bytes]) -> bytes:
        """Holds the bytes of the message while JSON is made of it."""
        with HeldBytes(self._state.bodies) as held:
            held.add(len(data))
            return function() if len(data) <= LARGE_BODY else await asyncio.to_thread(function)

    async def _reply(self, method: Method, call: "_Call", data: bytes) -> _Reply:
        answer = await self._ask(method, call, data)
        is_large = len(answer.body) > LARGE_BODY
        message = (
            await asyncio.to_thread(method.message_of, answer) if is_large else method.message_of(answer)
        )
        return _Reply(message, _metadata(answer))

    def _unary(self, method: Method) -> "Answering":
        async def answer(call: "_Call") -> None:
            reply = await self._reply(method, call, await call.read_only())
            await call.begin(reply.metadata)
            await call.write(reply.message)

        return answer

    def _stream(self, method: Method) -> "Answering":
        """Answers messages in their order, some at a time. The first error ends the stream."""

        async def answer(call: "_Call") -> None:
            slots = asyncio.Semaphore(_MOST_IN_FLIGHT)
            replies: asyncio.Queue[asyncio.Task[_Reply] | None] = asyncio.Queue()
            tasks: set[asyncio.Task[_Reply]] = set()

            async def receive() -> None:
                # A client that does not read its answers is not read either.
                while await slots.acquire():
                    data = await call.read(lambda: bool(tasks))
                    if data is None:
                        return
                    task = asyncio.create_task(self._reply(method, call, data))
                    tasks.add(task)
                    replies.put_nowait(task)

            receiver = asyncio.create_task(receive())
            receiver.add_done_callback(lambda done: replies.put_nowait(None))
            try:
                while (task := await replies.get()) is not None:
                    reply = await task
                    await call.write(reply.message)
                    call.note_warnings(reply.metadata)
                    tasks.discard(task)
                    slots.release()
                await receiver
            finally:
                for each in (receiver, *tasks):
                    each.cancel()
                await asyncio.gather(receiver, *tasks, return_exceptions=True)

        return answer

    async def _rank_stream(self, call: "_Call") -> None:
        """Ranks the texts of all messages once they are there. Each message has a query; messages with the
        same query are one request."""
        groups: dict[bytes, _Group] = {}
        first: pb.RerankStreamRequest | None = None
        num_texts = 0
        with HeldBytes(self._state.bodies) as held:
            size = 0
            while (data := await call.read()) is not None:
                size += len(data)
                num_texts += 1
                check_number(num_texts, "the stream", self._most_texts)
                if size > self._state.max_body_bytes:
                    message = "the stream's texts are too large together; send fewer, or raise --max-body-mb"
                    raise ApiError(413, message)
                held.add(len(data))
                request = parsed(pb.RerankStreamRequest, data)
                first = first or request
                key = encoded({"query": request.query, **truncation_of(request)})
                group = groups.setdefault(key, _Group(request, [], []))
                group.indices.append(num_texts - 1)
                group.texts.append(request.text)
        if first is None:
            raise ApiError(400, "the stream has no message; send at least one text to rank")
        for group in groups.values():
            group.request.raw_scores, group.request.return_text = first.raw_scores, first.return_text
        slots = asyncio.Semaphore(_MOST_IN_FLIGHT)

        async def ranked(group: _Group) -> Answer:
            async with slots:
                body = encoded(ranking_fields(group.request, group.texts))
                return await self._answer(RANKING, call, _body(body))

        tasks = [asyncio.create_task(ranked(group)) for group in groups.values()]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        response = pb.RerankResponse(metadata=_sum_of([metadata_of(answer) for answer in answers]))
        ranks = []
        for group, answer in zip(groups.values(), answers, strict=True):
            for rank in ranks_of(RANKING.decoder.decode(answer.body)):
                rank.index = group.indices[rank.index]
                ranks.append(rank)
        # The route has ordered equal scores within a group.
        ranks.sort(key=lambda rank: -rank.score)
        response.ranks.extend(ranks)
        await call.begin(_metadata(answers[0]) if len(answers) == 1 else ())
        await call.write(response.SerializeToString())

    async def _check_health(self, call: "_Call") -> None:
        request = parsed(health_pb2.HealthCheckRequest, await call.read_only())
        status = self._health_of(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            raise ApiError(404, "there is no such service; leave it empty for the whole server")
        await call.write(health_pb2.HealthCheckResponse(status=status).SerializeToString())

    async def _watch_health(self, call: "_Call") -> None:
        if self._watchers == _MOST_WATCHERS:
            raise ApiError(429, "too many clients watch the health; use Check", retry_after=5)
        self._watchers += 1
        try:
            request = parsed(health_pb2.HealthCheckRequest, await call.read_only())
            told = None
            while not self._closing.is_set():
                status = self._health_of(request.service)
                if status != told:
                    await call.write(health_pb2.HealthCheckResponse(status=status).SerializeToString())
                told = status
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), _LOOK_SECONDS)
        finally:
            self._watchers -= 1

    def _health_of(self, service: str) -> int:
        """As /ready answers, for the server and each of its services."""
        statuses = health_pb2.HealthCheckResponse
        if service not in ("", *_SERVICES):
            return int(statuses.SERVICE_UNKNOWN)
        return int(statuses.SERVING if self._state.is_ready else statuses.NOT_SERVING)

    async def _reflect(self, call: "_Call") -> None:
        async def only(request: Any) -> AsyncIterator[Any]:
            yield request

        while (data := await call.read()) is not None:
            request = parsed(reflection_pb2.ServerReflectionRequest, data)
            async for response in self._reflection.ServerReflectionInfo(only(request), None):
                await call.write(response.SerializeToString())


Answering = Callable[["_Call"], Coroutine[Any, Any, None]]


class _Group(NamedTuple):
    """Texts of a stream to rank for one query, and their places in the stream."""

    request: pb.RerankStreamRequest
    indices: list[int]
    texts: list[str]


class _Call:
    """One call: its client's messages and metadata. A client that is waited for too long loses the call."""

    def __init__(self, context: Any, seconds: float, closing: asyncio.Event) -> None:
        self._context, self._seconds, self._closing = context, seconds, closing
        self._warnings: dict[str, None] = {}
        self.headers: dict[str, str] = {}
        for name, value in context.invocation_metadata() or ():
            if name in _TAKEN and isinstance(value, str):
                self.headers.setdefault(name, value)

    @property
    def seconds_left(self) -> float | None:
        """Time until the client's deadline, if it has one."""
        left = self._context.time_remaining()
        # The end of time stands for none.
        return None if left is None or left > _MOST_INT else max(left, 0.0)

    async def read_only(self) -> bytes:
        data = await self.read()
        if data is None:
            raise ApiError(400, "the call has no message; send one")
        return data

    async def read(self, is_busy: Callable[[], bool] = lambda: False) -> bytes | None:
        """The next message; None after the last. While the server `is_busy`, the client need not send one.
        Raises ApiError if none comes in time, or the server ends."""
        reading = asyncio.create_task(self._context.read())
        closing = asyncio.create_task(self._closing.wait())
        try:
            while True:
                waits = {reading, closing}
                done, _ = await asyncio.wait(
                    waits, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED
                )
                if reading in done:
                    data = reading.result()
                    return None if data is grpc.aio.EOF else data
                if closing in done:
                    message = "the server is shutting down; send the message again shortly"
                    raise ApiError(503, message, retry_after=5)
                if not is_busy():
                    message = f"no message came within {self._seconds:g} s; send earlier, or end the call"
                    raise ApiError(408, message)
        finally:
            reading.cancel()
            closing.cancel()

    async def begin(self, metadata: Metadata) -> None:
        await self._context.send_initial_metadata(metadata)

    async def write(self, message: bytes) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._context.write(message)
        except TimeoutError:
            log.info("a client has not read its answer within %g s; the call is ended", self._seconds)
            details = f"the answer was not read within {self._seconds:g} s; read earlier"
            # The status waits behind the answer, which nobody may ever read.
            with suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_SECONDS):
                    await self._context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, details)
            raise asyncio.CancelledError from None

    def note_warnings(self, metadata: Metadata) -> None:
        """Takes the warnings about one message of a stream, for the end of the stream."""
        for name, value in metadata:
            if name == "x-maxsimd-warnings" and len(self._warnings) < _MOST_WARNINGS:
                self._warnings[value] = None
                self._context.set_trailing_metadata(((name, "; ".join(self._warnings)),))

    async def abort(self, answer: Answer) -> None:
        error = _ERRORS.decode(answer.body).error
        code = _CODES.get(answer.status, grpc.StatusCode.INTERNAL)
        if answer.status < 500 and answer.status not in _CODES:
            # Another message would not help: messages name neither.
            is_of_model = answer.status == 400 and error.param in ("model", "task")
            code = grpc.StatusCode.FAILED_PRECONDITION if is_of_model else grpc.StatusCode.INVALID_ARGUMENT
        await self._context.abort(code, error.message, _metadata(answer))


# Different warnings at the end of a stream, and seconds to send a status.
_MOST_WARNINGS, _ABORT_SECONDS = 8, 1.0


async def _body(whole: bytes) -> AsyncIterator[bytes]:
    yield whole


def _metadata(answer: Answer) -> Metadata:
    """The headers of an answer that clients get; metadata is ASCII."""
    return tuple(
        (name.lower(), value.encode("ascii", "replace").decode())
        for name, value in answer.headers.items()
        if name.lower().startswith(_PASSED) and name.lower() != "x-content-type-options"
    )


def _sum_of(parts: list[pb.Metadata]) -> pb.Metadata:
    """The cost of all requests. Times are means, as in TEI."""
    whole = pb.Metadata()
    for field in whole.DESCRIPTOR.fields:
        total = sum(getattr(part, field.name) for part in parts)
        setattr(whole, field.name, total // len(parts) if field.name.endswith("_ns") else total)
    return whole


def _milliseconds(seconds: float) -> int:
    return min(max(1, round(seconds * 1000)), _MOST_INT)
