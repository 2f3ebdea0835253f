"""Log lines for people or for machines. No text of any user is ever logged.

The formatters are the last line of defence: whatever a message holds, an event is one line (tracebacks follow
it, indented), and nothing in it can move a terminal's cursor or pass for another line.
"""

import json
import logging
import sys
import time
from collections.abc import Iterator

from maxsimd.api.flags import in_flags
from maxsimd.api.printable import printable

_LONGEST_MESSAGE = 4_000
_ENGINE = "maxsimd.engine."
_LONGEST_LINE_OF_A_TRACE = 500


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


def set_up_logging(level: str, form: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    # No line shows these, so they need not be looked up for each.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("maxsimd").setLevel(level.upper())
