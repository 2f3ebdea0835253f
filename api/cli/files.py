"""Texts from files, an engine that runs them in parts, its progress, and the files that commands write."""

import asyncio
import codecs
import csv
import functools
import hashlib
import io
import json
import signal
import sys
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click
from tqdm import tqdm

from maxsimd.api.options import in_flags
from maxsimd.engine.config import EngineConfig, shown_name
from maxsimd.engine.errors import MaxsimdError

if TYPE_CHECKING:
    from maxsimd.engine import Engine, requests
    from maxsimd.engine.media import Content, PdfPage, PictureAt

P = TypeVar("P", bound=Sized)
R = TypeVar("R", bound="requests.ScoreResult | requests.EmbedResult | requests.TokenEmbedResult")
T = TypeVar("T")

# Cost of a page, in characters of a text.
_PAGE = 32_768
# Kinds of files with the endings of their names.
_ENDINGS = {
    **{"lines": (), "jsonl": (".jsonl", ".ndjson", ".json"), "csv": (".csv",), "tsv": (".tsv",)},
    "parquet": (".parquet",),
}
# Fields with a text, and with an id: the first that is there counts.
TEXT_FIELDS = ("text", "content", "document", "passage", "body", "abstract", "title")
_ID_FIELDS = ("_id", "id", "docid", "doc_id", "document_id")
_BAR = "{n:,} of {total:,} {unit}{postfix}, {remaining} left"
# A request has at most this many texts and characters. A few at a time keep the engine busy.
_PART_TEXTS, _PART_CHARACTERS, _PARTS_AT_A_TIME = 256, 262_144, 4
# Seconds between lines while a model is loaded.
_LOADING_SECONDS = 3
# The exit status of a program that Ctrl-C has ended.
INTERRUPTED = 130
# The engine's names for what is done with long documents.
_TRUNCATION: "dict[str, requests.LongInputPolicy]" = {"truncate": "cut", "window": "window", "error": "error"}


class OutputPath(click.Path):
    """A file to write, in a folder that exists: a mistake is told before the work."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not Path(value).absolute().parent.is_dir():
            self.fail(f"there is no folder for {value}; create it first", param, ctx)
        return super().convert(value, param, ctx)


def combined(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One decorator for several arguments and options, in this order."""
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


# Options of several commands.
model_argument = click.argument("model", required=False, envvar="MAXSIMD_MODEL")
input_format_option = click.option(
    "--input-format",
    type=click.Choice([*_ENDINGS]),
    metavar="FORMAT",
    help="lines, jsonl, csv, tsv or parquet",
    show_default="from the file's name",
)
normalize_option = click.option("--normalize", is_flag=True, help="Return scores from 0 to 1")
long_documents_option = click.option(
    "--long-documents",
    type=click.Choice(list(_TRUNCATION)),
    metavar="ACTION",
    default="truncate",
    show_default=True,
    help="truncate, window or error",
)
field_option = click.option(
    "--field",
    multiple=True,
    metavar="NAME",
    help="Field or column with the text; repeatable",
)


def truncation_of(long_documents: str) -> "requests.Truncation":
    """The engine's option of `--long-documents`, which errors name."""
    from maxsimd.engine.requests import OptionNames, as_truncation  # late: loads torch

    names = OptionNames("--long-documents truncate")
    return replace(as_truncation(_TRUNCATION[long_documents]), option_names=names)


@dataclass(frozen=True, slots=True)
class Record:
    """A text and its id, if the file has one. A `page` has its name as text."""

    text: str
    id: str | None = None
    page: "PictureAt | PdfPage | None" = None

    @property
    def document(self) -> "str | Content":
        if self.page is None:
            return self.text
        from maxsimd.engine.media import Content

        return Content.of([self.page])

    @property
    def size(self) -> int:
        """Cost, as characters of a text."""
        return len(self.text) if self.page is None else _PAGE

    @property
    def identity(self) -> str:
        """Changes when the score may change."""
        if self.page is None:
            return self.text
        found = self.page.path.stat()
        return f"{self.text} {found.st_size} {found.st_mtime_ns}"


def read_records(path: str, kind: str | None, fields: Sequence[str]) -> list[Record]:
    """The texts of a file, or of standard input for -. `fields` are joined by a space to be a record's text;
    the default is the first of `TEXT_FIELDS`. Raises click.ClickException with the line."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        ending = Path(path).suffix.lower()
        kind = kind or next((each for each, own in _ENDINGS.items() if ending in own), _guess(data))
        records = [*_READERS[kind](data, fields)]
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        raise click.ClickException(f"{path} cannot be read: {error}") from error
    if not records:
        raise click.ClickException(f"there is no text in {path}")
    return records


def _guess(data: bytes) -> str:
    return "jsonl" if data.removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"{", b"[") else "lines"


def _lines(data: bytes, fields: Sequence[str]) -> Iterator[Record]:
    for line in _text(data).split("\n"):
        if line.strip():
            yield Record(line.strip())


def _json(data: bytes, fields: Sequence[str]) -> Iterator[Record]:
    """An object or a text per line, or an array of them."""
    text = _text(data)
    if text.lstrip().startswith("["):
        for number, value in enumerate(json.loads(text), 1):
            yield _record(value, fields, f"entry {number}")
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number} is no JSON: {error}") from None
            yield _record(value, fields, f"line {number}")


def _tsv(data: bytes, fields: Sequence[str]) -> Iterator[Record]:
    """Quotes that do not enclose fields are part of the texts, as in MS MARCO's files."""
    try:
        return iter([*_table(data, fields, delimiter="\t", strict=True)])
    except csv.Error:
        return _table(data, fields, delimiter="\t", quoting=csv.QUOTE_NONE)


def _table(data: bytes, fields: Sequence[str], **form: Any) -> Iterator[Record]:
    """Rows under a heading."""
    csv.field_size_limit(sys.maxsize)
    for number, row in enumerate(csv.DictReader(io.StringIO(_text(data)), **form), 2):
        yield _record(row, fields, f"row {number}")


def _parquet(data: bytes, fields: Sequence[str]) -> Iterator[Record]:
    try:
        from pyarrow import BufferReader, parquet
    except ImportError:
        raise ValueError("Parquet needs pyarrow; pip install '.[files]' in the checkout") from None
    table = parquet.read_table(BufferReader(data))
    for number, row in enumerate(table.to_pylist(), 1):
        yield _record(row, fields, f"row {number}")


_READERS: dict[str, Callable[[bytes, Sequence[str]], Iterator[Record]]] = {
    "lines": _lines,
    "jsonl": _json,
    "csv": functools.partial(_table, delimiter=",", strict=True),
    "tsv": _tsv,
    "parquet": _parquet,
}


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error}") from None


def _record(value: Any, fields: Sequence[str], where: str) -> Record:
    if isinstance(value, str) and not fields:
        return Record(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is no object with a text but {type(value).__name__}")
    names = fields or [name for name in TEXT_FIELDS if isinstance(value.get(name), str)][:1]
    missing = [name for name in names if not isinstance(value.get(name), str)]
    if missing or not names:
        looked_for = ", ".join(missing or TEXT_FIELDS)
        there = ", ".join(map(str, value)) or "none"
        raise ValueError(f"{where} has no text in {looked_for}; it has {there}: name one with --field")
    id_ = next((value[name] for name in _ID_FIELDS if value.get(name) is not None), None)
    return Record(" ".join(value[name] for name in names), None if id_ is None else str(id_))


class _Lines:
    """Takes tqdm's bar where there is no terminal, and writes each of its states as a line."""

    def write(self, text: str) -> None:
        if line := text.strip():
            click.echo(line, err=True)

    def flush(self) -> None:
        """Lines are flushed as they are written."""


class Progress:
    """Progress of a command on standard error: notes first, then a tqdm bar over `total` texts."""

    def __init__(self, unit: str, total: int = 0) -> None:
        self.total = total
        self._unit = unit
        self._tokens = 0
        self._bar: tqdm[Any] | None = None

    def note(self, text: str) -> None:
        click.echo(text, err=True)

    def add(self, done: int, tokens: int = 0) -> None:
        """Shows that so many more texts are done, for which this run has read `tokens`."""
        if self._bar is None:
            in_terminal = sys.stderr.isatty()
            self._bar = tqdm(
                total=self.total,
                initial=done,
                unit=self._unit,
                bar_format=_BAR,
                mininterval=0.1 if in_terminal else 5.0,
                file=None if in_terminal else _Lines(),
            )
            done = 0
        self._tokens += tokens
        if self._tokens:
            speed = self._tokens / max(self._bar.format_dict["elapsed"], 1e-3)
            self._bar.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=False)
        self._bar.update(done)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()


class Interrupted(Exception):
    """Ctrl-C or SIGTERM ends the command."""


def run(
    config: EngineConfig,
    unit: str,
    total: int,
    work: Callable[["Engine", Progress], Coroutine[Any, Any, T]],
) -> T:
    """Loads a model and runs a command's work on `total` texts. Raises click.ClickException where the model
    or the texts are at fault. Ends the process where the work raises Interrupted."""
    import uvloop

    progress = Progress(unit, total)
    progress.note(f"Loading {shown_name(config.model)} for {total:,} {unit} ...")

    async def load_and_work() -> T:
        async with _started(config, progress) as engine:
            return await work(engine, progress)

    try:
        return uvloop.run(load_and_work())
    except MaxsimdError as error:
        raise click.ClickException(in_flags(str(error))) from error
    except Interrupted:
        progress.end()
        click.echo("interrupted: there is no result", err=True)
        sys.exit(INTERRUPTED)
    finally:
        progress.end()


@asynccontextmanager
async def _started(config: EngineConfig, progress: Progress) -> AsyncIterator["Engine"]:
    from maxsimd.engine import Engine

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
    """Indexes in parts of one request each."""
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
    progress: Progress, parts: Iterator[P], ask: Callable[[P], Awaitable[R]], done: Callable[[P, R], None]
) -> None:
    """Asks for a few parts at a time, and calls `done` with each result. Raises Interrupted on a signal."""
    asked: dict[asyncio.Task[R], P] = {}
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
                    part, result = asked.pop(task), task.result()
                    done(part, result)
                    progress.add(len(part), result.usage.prompt_tokens)
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


def is_plain(path: Path) -> bool:
    """Whether a file is regular or missing, and so can be replaced."""
    return path.is_file() or not path.exists()


@contextmanager
def open_output(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file for writing. A regular file, or a link's target, is replaced as a whole at the end;
    devices and pipes are written directly. Raises click.ClickException."""
    try:
        if not is_plain(path):
            with path.open("wb") as file:
                yield file
            return
        target = path.resolve()
        beside = target.with_name(f"{target.name}.new")
        try:
            with beside.open("wb") as file:
                yield file
            beside.replace(target)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise click.ClickException(
            f"cannot write {path}: {(error.strerror or str(error)).lower()}"
        ) from error


def digest_of(parts: Iterable[str]) -> str:
    """Identifies a run: its model and options, query and documents."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()
