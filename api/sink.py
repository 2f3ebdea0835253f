"""Answers that are sent line by line, while they are made."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol, cast

from maxsimd.api.answer import Answer
from maxsimd.api.failures import ApiError, error_answer


class Sink(Protocol):
    """Where an adapter takes an answer that is sent while it is made. All methods raise ConnectionError once
    the client has gone away."""

    async def begin(self, answer: Answer) -> None:
        """Sends the status and the headers."""
        ...

    async def send(self, part: bytes) -> None:
        """Sends a part of the body; waits where the client does not read."""
        ...

    async def end(self) -> None:
        """Ends the body."""
        ...


class WholeAnswer:
    """The sink of adapters that send nothing before all is there."""

    def __init__(self) -> None:
        self._begun: Answer | None = None
        self._body = bytearray()

    async def begin(self, answer: Answer) -> None:
        self._begun = answer

    async def send(self, part: bytes) -> None:
        self._body += part

    async def end(self) -> None:
        pass

    def or_else(self, answer: Answer) -> Answer:
        """What was sent; `answer` if nothing was."""
        return answer if self._begun is None else replace(self._begun, body=bytes(self._body))


class LineSender:
    """Sends one answer that has lines to a sink; `completed` makes the answer what it is to be as it
    leaves."""

    def __init__(self, sink: Sink, completed: Callable[[Answer], Answer]) -> None:
        self._sink = sink
        self._completed = completed
        self.has_begun = False

    async def send(self, answer: Answer) -> None:
        """Raises what making the lines raises."""
        assert answer.lines is not None
        async with aclosing(cast("AsyncGenerator[bytes]", answer.lines)) as lines:
            self.has_begun = True
            await self._sink.begin(self._completed(replace(answer, lines=None)))
            async for line in lines:
                await self._sink.send(line)
        await self._sink.end()

    async def fail(self, failure: ApiError) -> None:
        """Says in a last line why there are no more: the status has been sent long ago."""
        await self._sink.send(error_answer(failure).body + b"\n")
        await self._sink.end()
