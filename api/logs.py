"""Log lines for people or for machines. No text of any user is logged.

Each event is one line, with a traceback indented behind it. Nothing in a message can move a terminal's
cursor or pass for another line.
"""

import json
import logging
import os
import select
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from types import TracebackType
from typing import Any, TextIO

from maxsimd.api.options import in_flags


def printable(text: str, most: int) -> str:
    """At most `most` characters of a text, with escapes for invisible characters: control characters, line
    breaks, changes of the writing direction, halves of surrogates."""
    if len(text) > most:
        return printable(text[:most], most) + "..."
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


log = logging.getLogger("maxsimd.serve")

_LONGEST_MESSAGE = 4_000
_ENGINE = "maxsimd.engine."
_LONGEST_LINE_OF_A_TRACE = 500
# New events are dropped when this many wait.
_MOST_WAITING = 4_096
# Events are gathered so long, to wake the thread once for many.
_GATHER_SECONDS = 0.02
# Limits for the wait at the end: without progress, and in all.
_FLUSH_SECONDS, _MOST_FLUSH_SECONDS = 1.0, 5.0


class TextFormatter(logging.Formatter):
    """Time, level and message on one line. Lines of a traceback follow, each behind a bar."""

    def format(self, record: logging.LogRecord) -> str:
        first = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname:7} {_message(record)}"
        return "\n".join([first, *(f"    | {line}" for line in _trace(self, record))])


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with the record's `fields` (`extra`)."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = "\n".join(_trace(self, record))
        return json.dumps(line, ensure_ascii=False)


def _message(record: logging.LogRecord) -> str:
    message = record.getMessage()
    return printable(in_flags(message) if record.name.startswith(_ENGINE) else message, _LONGEST_MESSAGE)


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> Iterator[str]:
    if record.exc_info:
        for line in formatter.formatException(record.exc_info).splitlines():
            yield printable(line, _LONGEST_LINE_OF_A_TRACE)


class SeldomLogger:
    """Logs one kind of event at most once in `seconds`, with the number of events since then."""

    def __init__(self, log: logging.Logger, seconds: float = 10.0) -> None:
        self._log = log
        self._seconds = seconds
        self._next = 0.0
        self._count = 0

    def warning(self, message: str, *values: object) -> None:
        self._count += 1
        now = time.monotonic()
        if now >= self._next:
            since = f" ({self._count} times since this was logged last)" if self._count > 1 else ""
            self._log.warning(f"{message}{since}", *values)
            self._next, self._count = now + self._seconds, 0


class QueuedHandler(logging.Handler):
    """Writes log lines in its own thread, so that logging never waits for a pipe's reader. `dropped` counts
    the events that found the queue full or could not be written; a line reports them."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.dropped = 0
        self._stream = stream
        try:
            self._descriptor: int | None = stream.fileno()
        except (OSError, ValueError):  # a stream in memory
            self._descriptor = None
        self._lines: deque[str] = deque()
        self._told = self._num_written = 0
        self._is_writing = self._is_urgent = self._is_closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="maxsimd-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_closed:
            return
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if len(self._lines) == _MOST_WAITING:
                self.dropped += 1
                return
            self._lines.append(line)
            self._is_urgent |= record.levelno >= logging.ERROR
            if len(self._lines) == 1 or self._is_urgent:
                self._changed.notify_all()

    def flush(self) -> None:
        """Waits until all lines are written. Gives up after a second without progress, or five in all."""
        end = time.monotonic() + _MOST_FLUSH_SECONDS
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            before = -1
            while before != self._num_written and time.monotonic() < end:
                before = self._num_written
                if self._changed.wait_for(lambda: not self._lines and not self._is_writing, _FLUSH_SECONDS):
                    break

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        super().close()

    def _run(self) -> None:
        while self._lines or not self._is_closed:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines or self._is_closed)
                self._changed.wait_for(lambda: self._is_urgent or self._is_closed, _GATHER_SECONDS)
                self._is_writing, self._is_urgent = True, False
                lines, dropped = [*self._lines], self.dropped
                self._lines.clear()
            try:
                self._write_all(lines, dropped)
            except Exception:  # the stream is closed, its reader has gone, or memory is short
                with self._changed:
                    self.dropped += len(lines)
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()

    def _write_all(self, lines: list[str], dropped: int) -> None:
        """Writes `lines`, removing each as it is written, and a line on the events dropped meanwhile."""
        while lines:
            number, piece = 1, f"{lines[0]}\n"
            # Pieces that a pipe takes as a whole, because other processes may write to it. A character has up
            # to four bytes.
            while number < len(lines) and len(piece) + len(lines[number]) < select.PIPE_BUF // 4:
                piece += f"{lines[number]}\n"
                number += 1
            self._write(piece)
            del lines[:number]
        if dropped > self._told:
            message = f"{dropped - self._told} events were not logged: standard error did not take them"
            record = logging.LogRecord(log.name, logging.WARNING, "", 0, message, (), None)
            self._write(f"{self.format(record)}\n")
            self._told = dropped

    def _write(self, text: str) -> None:
        if self._descriptor is None:
            self._stream.write(text)
            return
        # The stream's blocked write would hold its lock, and the interpreter could not end.
        left = text.encode(self._stream.encoding, "backslashreplace")
        while left:
            try:
                written = os.write(self._descriptor, left)
            except BlockingIOError:  # who shares it has made it non-blocking
                select.select([], [self._descriptor], [])
                continue
            left = left[written:]
            self._num_written += written


def dropped_events() -> int:
    """The number of events that this process dropped because standard error did not take them."""
    return sum(each.dropped for each in logging.getLogger().handlers if isinstance(each, QueuedHandler))


def set_up_logging(level: str, form: str) -> None:
    """Logs to standard error, with Python's warnings and uncaught errors. Never waits for a reader."""
    handler = QueuedHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    # Lines show none of these.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    # huggingface_hub adds its own handler, which would log each line twice.
    hub = logging.getLogger("huggingface_hub")
    hub.handlers.clear()
    hub.addHandler = lambda hdlr: None  # type: ignore[method-assign]
    logging.getLogger("maxsimd").setLevel(level.upper())
    warnings.showwarning = _log_warning
    sys.excepthook = _log_error
    threading.excepthook = _log_end_of_thread
    sys.unraisablehook = _log_ignored


def _log_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **more: Any
) -> None:
    log.warning("%s: %s (%s:%d)", category.__name__, message, filename, lineno)


def _log_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        log.error("the process ends after an unexpected error", exc_info=error)


def _log_end_of_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_type is not SystemExit and ended.exc_value is not None:
        name = "a thread" if ended.thread is None else f"the thread {ended.thread.name}"
        log.error("%s has ended by an error", name, exc_info=ended.exc_value)


def _log_ignored(ignored: "sys.UnraisableHookArgs") -> None:
    # Its repr may have texts of users.
    where = getattr(ignored.object, "__qualname__", type(ignored.object).__qualname__)
    log.error("an error was ignored in %s", where, exc_info=ignored.exc_value)
