"""Runs benchmarks that start servers."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_and_clean_up(coroutine: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, but SIGTERM ends it as Ctrl-C does, so that what it started is stopped."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return asyncio.run(coroutine)
    finally:
        signal.signal(signal.SIGTERM, before)
