"""Memory that is free in the C library's heaps goes back to the system."""

import sys

import pytest

from maxsimd.api.garbage import resident_bytes
from maxsimd.engine import Engine
from tests.checkpoints import bi_encoders
from tests.checkpoints.shared import SharedCheckpoints

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these are glibc's")


async def test_an_engine_that_is_stopped_gives_back_what_is_free(checkpoints: SharedCheckpoints) -> None:
    engine = Engine(model=checkpoints(bi_encoders.bge))
    await engine.start()
    pieces = [bytes(2000) for _ in range(100_000)]
    between = pieces[::1000]
    taken = resident_bytes()
    del pieces
    await engine.stop()
    assert len(between) == 100
    assert resident_bytes() < taken - (100 << 20)
