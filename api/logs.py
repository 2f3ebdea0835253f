"""Log lines for people or for machines. No text of any user is ever logged.

The formatters are the last line of defence: whatever a message holds, an event is one line (tracebacks follow
it, indented), and nothing in it can move a terminal's cursor or pass for another line.
"""

import json
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TextIO

from maxsimd.api.flags import in_flags
from maxsimd.api.printable import printable

log = logging.getLogger("maxsimd.serve")

_LONGEST_MESSAGE = 4_000
_ENGINE = "maxsimd.engine."
_LONGEST_LINE_OF_A_TRACE = 500
# Events that wait to be written. With more, new ones are dropped.
_MOST_WAITING = 4_096
# How long events are gathered before they are written together: each wakes a thread else. And how long the
# end of the process waits for what is left to be written.
_GATHER_SECONDS, _FLUSH_SECONDS = 0.02, 1.0


class _Clock:
    """Writes times of day, each second's once."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._shown = (0, "")

    def show(self, seconds: float) -> str:
        """A time (in seconds since the epoch) where this machine stands."""
        whole = int(seconds)
        if whole != self._shown[0]:
            self._shown = whole, time.strftime(self._form, time.localtime(whole))
        return self._shown[1]


class TextFormatter(logging.Formatter):
    """Time, level and message on one line; the lines of a traceback follow, each behind a bar."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = _Clock("%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        first = f"{self._clock.show(record.created)} {record.levelname:7} {_message(record)}"
        if not record.exc_info:
            return first
        return "\n".join([first, *(f"    | {line}" for line in _trace(self, record))])


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = _Clock("%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self._clock.show(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
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
    """Logs one kind of event at most once in some seconds, and says how often it has happened since then."""

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
    """Writes events to a stream in a thread of its own, so that whoever logs never waits for who reads. (A
    pipe that nobody empties would stop the event loop.) `dropped` counts the events for which there was no
    room; a line says how many there were once there is."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.dropped = 0
        self._stream = stream
        try:
            self._descriptor: int | None = stream.fileno()
        except (OSError, ValueError):  # a stream in memory
            self._descriptor = None
        self._lines: deque[str] = deque()
        self._told = 0
        self._is_writing = self._is_awaited = self._is_closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._write, name="maxsimd-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
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
            if len(self._lines) == 1:
                self._changed.notify_all()

    def flush(self) -> None:
        """Waits for what is left to be written, but only for a second."""
        with self._changed:
            self._is_awaited = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._lines and not self._is_writing, _FLUSH_SECONDS)
            self._is_awaited = False

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        super().close()

    def _write(self) -> None:
        while self._lines or not self._is_closed:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines or self._is_closed)
                self._changed.wait_for(lambda: self._is_awaited or self._is_closed, _GATHER_SECONDS)
                self._is_writing = True
                lines = [*self._lines]
                self._lines.clear()
                if self.dropped > self._told:
                    lines.append(self._about_dropped(self.dropped - self._told))
                    self._told = self.dropped
            try:
                self._write_text("".join(f"{line}\n" for line in lines))
            except (OSError, ValueError):  # it is closed, or its reader has gone
                self.dropped += len(lines)
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()

    def _write_text(self, text: str) -> None:
        if self._descriptor is None:
            self._stream.write(text)
            return
        # Past the stream, whose lock would be held meanwhile: the interpreter cannot end then.
        left = text.encode(self._stream.encoding, "backslashreplace")
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # who shares it has made it non-blocking
                select.select([], [self._descriptor], [])

    def _about_dropped(self, count: int) -> str:
        message = "%d events were not logged: standard error was not read"
        return self.format(logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (count,), None))


def dropped_events() -> int:
    """How many events of the log were dropped by this process, because standard error was not read."""
    return sum(each.dropped for each in logging.getLogger().handlers if isinstance(each, QueuedHandler))


def set_up_logging(level: str, form: str) -> None:
    """Logs to standard error, Python's warnings and errors of threads too: else they would wait there for
    who reads."""
    handler = QueuedHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    # No line shows these, so they need not be looked up for each.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("maxsimd").setLevel(level.upper())
    logging.captureWarnings(True)
    threading.excepthook = _log_end_of_thread
    sys.unraisablehook = _log_ignored


def _log_end_of_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_type is not SystemExit and ended.exc_value is not None:
        name = "a thread" if ended.thread is None else f"the thread {ended.thread.name}"
        log.error("%s has ended by an error", name, exc_info=ended.exc_value)


def _log_ignored(ignored: "sys.UnraisableHookArgs") -> None:
    log.error("%s %r", ignored.err_msg or "ignored an error in", ignored.object, exc_info=ignored.exc_value)
