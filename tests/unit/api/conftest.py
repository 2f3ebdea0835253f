"""One engine for all tests of the handlers, which run on one event loop."""

import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from maxsimd.engine import EngineConfig
from tests.unit.calling_handlers import Caller, RecordingEngine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the handlers, and all others that ask the engine, run on the engine's event loop."""
    here = str(Path(__file__).parent) + os.sep
    handlers = os.path.join(here, "handlers", "")
    for item in items:
        path = str(item.path)
        asks = path.startswith(handlers)
        asks |= path.startswith(here) and "engine" in getattr(item, "fixturenames", ())
        if asks and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine() -> AsyncIterator[RecordingEngine]:
    """The default model, started once a run. A test that counts cached documents empties the cache first."""
    async with RecordingEngine(EngineConfig(dtype="float32", threads=1)) as engine:
        yield engine


@pytest.fixture
def caller(engine: RecordingEngine) -> Caller:
    return Caller(engine)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="maxsimd.http")
    return caplog
