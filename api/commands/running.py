"""Runs an engine for a command: says how loading goes, feeds it in parts, and ends early when asked to."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import click

from maxsimd.api.commands.progress import Progress
from maxsimd.api.commands.records import Record
from maxsimd.api.options import in_flags
from maxsimd.engine import Engine, EngineConfig, MaxsimdError
from maxsimd.engine.config import shown_name

T = TypeVar("T")

# A part of the texts is one request, of at most this many texts and characters. With some of them at a time
# the engine always has enough to do.
_PART_TEXTS, _PART_CHARACTERS, _PARTS_AT_A_TIME = 256, 262_144, 4
# While a model is loaded, a line says so this often, in seconds.
_LOADING_SECONDS = 3


class Interrupted(Exception):
    """Someone has asked the command to end (Ctrl-C, SIGTERM)."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a command's work. Raises click.ClickException, with one line, for what goes wrong with the model
    or the texts."""
    import uvloop

    try:
        return uvloop.run(work)
    except MaxsimdError as error:
        raise click.ClickException(in_flags(str(error))) from error


@asynccontextmanager
async def started(config: EngineConfig, progress: Progress) -> AsyncIterator[Engine]:
    """An engine, once its model is loaded."""
    engine = Engine(config)
    start = asyncio.create_task(engine.start())
    seconds = 0
    while not start.done():
        await asyncio.wait({start}, timeout=_LOADING_SECONDS)
        seconds += _LOADING_SECONDS
        if not start.done():
            progress.note(f"Loading {shown_name(config.model)} ... {seconds} s so far")
    await start
    try:
        yield engine
    finally:
        await engine.stop(0)


def in_parts(records: Sequence[Record], indexes: Sequence[int]) -> Iterator[list[int]]:
    """The indexes of texts, in parts that are one request each."""
    part: list[int] = []
    characters = 0
    for index in indexes:
        length = records[index].size
        if part and (len(part) == _PART_TEXTS or characters + length > _PART_CHARACTERS):
            yield part
            part, characters = [], 0
        part.append(index)
        characters += length
    if part:
        yield part


async def each_part(
    parts: Iterator[list[int]], ask: Callable[[list[int]], Awaitable[T]], done: Callable[[list[int], T], None]
) -> None:
    """Asks for some parts at a time and calls `done` with each that has come. Raises Interrupted once someone
    asks the command to end: what has not come is given up."""
    asked: dict[asyncio.Task[T], list[int]] = {}
    with _stopping() as stop:
        stopped = asyncio.create_task(stop.wait())
        try:
            while True:
                while len(asked) < _PARTS_AT_A_TIME and (part := next(parts, None)) is not None:
                    asked[asyncio.ensure_future(ask(part))] = part
                if not asked:
                    return
                await asyncio.wait({*asked, stopped}, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in asked if task.done()]:
                    done(asked.pop(task), task.result())
                if stop.is_set() and (asked or next(parts, None) is not None):
                    raise Interrupted
        finally:
            for task in (*asked, stopped):
                task.cancel()
            await asyncio.gather(*asked, stopped, return_exceptions=True)


@contextmanager
def _stopping() -> Iterator[asyncio.Event]:
    """An event that Ctrl-C and SIGTERM set. A second one ends the process as usual."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask(number: int) -> None:
        stop.set()
        loop.remove_signal_handler(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, ask, number)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
