"""Waiting for what other threads do."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool]) -> None:
    """Looks again and again; TimeoutError when it does not come true."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)
