"""The messages that maxsimd logs, also where pytest's `caplog` does not reach: in processes of a test."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("maxsimd").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("maxsimd").removeHandler(handler)
