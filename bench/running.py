"""Runs benchmarks that start servers."""

import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run_and_clean_up(coroutine: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, but SIGTERM ends it as Ctrl-C does, so that what it started is stopped. It runs on
    uvloop's event loop: clients on the server's machine take less of it."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return uvloop.run(coroutine)
    finally:
        signal.signal(signal.SIGTERM, before)
