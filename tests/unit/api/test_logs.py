"""Log lines: for people, for machines, and never more than what was meant."""

import json
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from maxsimd.api.logs import JsonFormatter, SeldomLogger, TextFormatter, dropped_events, set_up_logging


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("maxsimd")
    hub = logging.getLogger("huggingface_hub")
    hub_handlers = hub.handlers[:]
    handlers, level, our_level = root.handlers[:], root.level, ours.level
    hooks = warnings.showwarning, sys.excepthook, threading.excepthook, sys.unraisablehook
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    del hub.addHandler
    hub.handlers[:] = hub_handlers
    warnings.showwarning, sys.excepthook, threading.excepthook, sys.unraisablehook = hooks
    root.setLevel(level)
    ours.setLevel(our_level)


def _written(capsys: pytest.CaptureFixture[str]) -> Any:
    logging.getLogger().handlers[0].flush()
    return capsys.readouterr()


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("form", ["text", "json"])
def test_log_lines_are_for_people_or_for_machines(capsys: pytest.CaptureFixture[str], form: str) -> None:
    logging.getLogger().setLevel(logging.DEBUG)  # as somebody else may have done before
    set_up_logging("info", form)
    logging.getLogger("maxsimd.http").info("größer als %d", 3, extra={"fields": {"status": 200}})
    logging.getLogger("maxsimd.http").debug("too fine")
    logging.getLogger("other.library").info("not ours")
    hub = logging.getLogger("huggingface_hub")
    hub.addHandler(logging.StreamHandler(sys.stderr))  # as it does when it is imported
    hub.warning("from elsewhere")
    out, err = _written(capsys)
    ours, other = err.splitlines()
    assert out == ""
    if form == "text":
        assert (ours[8:], other[8:]) == (" INFO    größer als 3", " WARNING from elsewhere")
    else:
        line = json.loads(ours)
        assert list(line) == ["time", "level", "logger", "message", "status"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", line["time"])
        assert abs(datetime.fromisoformat(line["time"]).timestamp() - time.time()) < 600
        assert (line["level"], line["logger"], line["message"]) == ("info", "maxsimd.http", "größer als 3")
        assert ("größer" in ours, json.loads(other)["level"]) == (True, "warning"), ours


@pytest.mark.usefixtures("restored_logging")
def test_the_level_is_the_least_that_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    levels = ["debug", "info", "warning", "error"]
    for level in levels:
        set_up_logging(level, "text")
        for name in levels:
            getattr(logging.getLogger("maxsimd.http"), name)(name)
        shown = [line.split()[-1] for line in _written(capsys).err.splitlines()]
        assert shown == levels[levels.index(level) :]


FORGERIES = [
    "x\n20:00:00 ERROR FAKE", "x\r20:00:00 ERROR FAKE", "x\x0b\x0c\x1c\x85\u2028\u2029FAKE", "\x1b[31mred",
    "\x9b31mred", "\u202eleft to right", "half \ud800 of a character", "null \x00",
]  # fmt: skip


def _record(message: str, error: Exception | None = None) -> logging.LogRecord:
    trace = None
    if error is not None:
        try:
            raise error
        except Exception:
            trace = sys.exc_info()
    return logging.LogRecord("a", logging.ERROR, "f", 1, "said: %s", (message,), trace)


def test_a_message_and_a_trace_are_cut_and_forge_no_line() -> None:
    for forgery in FORGERIES:
        for formatter in (TextFormatter(), JsonFormatter()):
            line = formatter.format(_record(forgery))
            assert line.isprintable()
            assert len(line.encode()) < 200
        first, *trace = TextFormatter().format(_record("x", ValueError(forgery))).split("\n")
        assert first.endswith("said: x")
        assert trace[0] == "    | Traceback (most recent call last):"
        assert all(line.startswith("    | ") and line.isprintable() for line in trace)
        line = JsonFormatter().format(_record("x", ValueError(forgery)))
        assert line.isprintable()
        exception = json.loads(line)["exception"].split("\n")
        assert any(part.startswith("ValueError: ") for part in exception)
        assert all(part.isprintable() for part in exception)
    for formatter in (TextFormatter(), JsonFormatter()):
        assert len(formatter.format(_record("x" * 1_000_000))) < 5_000
        assert len(formatter.format(_record("x", ValueError("x" * 1_000_000)))) < 5_000


@pytest.mark.usefixtures("restored_logging")
def test_logging_does_not_wait_for_an_unread_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe holds 64 KiB; more waits in memory, and the rest is dropped and counted."""
    reading, writing = os.pipe()
    with open(writing, "w") as stream, open(reading) as pipe:
        monkeypatch.setattr(sys, "stderr", stream)
        set_up_logging("info", "text")
        (handler,) = logging.getLogger().handlers
        for i in range(12_000):
            if i == 1_000:
                handler.flush()  # fills the pipe, and does not wait for long
            logging.getLogger("maxsimd.http").info("%05d %s", i, "x" * 100)
        dropped = dropped_events()
        assert 6_000 < dropped < 8_000
        handler.close()
        *lines, last = (pipe.readline() for _ in range(12_000 - dropped + 1))
        assert [int(line[17:22]) for line in lines] == [*range(12_000 - dropped)]
        assert last.endswith(f"WARNING {dropped} events were not logged: standard error did not take them\n")


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.filterwarnings("always")
def test_warnings_and_errors_of_threads_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "text")
    thread = threading.Thread(target=lambda: 1 / 0, name="one")
    thread.start()
    thread.join()
    warnings.warn("old", stacklevel=1)
    err = _written(capsys).err
    assert "ERROR   the thread one has ended by an error\n    | Traceback" in err
    assert re.search(r"WARNING UserWarning: old \(.*test_logs.py:\d+\)\n", err)


def test_frequent_events_log_few(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((100.0, 100.0, 109.9, 110.0, 111.0))
    monkeypatch.setattr("maxsimd.api.logs.time", SimpleNamespace(monotonic=lambda: next(times)))
    seldom = SeldomLogger(logging.getLogger("a"), seconds=10)
    for _ in range(5):
        seldom.warning("full: %d", 3)
    assert caplog.messages == ["full: 3", "full: 3 (3 times since this was logged last)"]
