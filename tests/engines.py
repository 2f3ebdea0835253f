"""Engines that tests share, and their steps."""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from maxsimd.scheduler import Step

# More have been asked for: the one that was used least lately is stopped, so that few models are in memory.
MOST = 4


class Engines:
    """Started engines by their configuration, on one event loop. Tests share their caches."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._running: OrderedDict[EngineConfig, Engine] = OrderedDict()
        self._scores: dict[tuple[EngineConfig, tuple[Pair, ...]], NDArray[np.float32]] = {}

    async def __call__(self, config: EngineConfig) -> Engine:
        if config in self._running:
            self._running.move_to_end(config)
            return self._running[config]
        while len(self._running) >= self._most:
            _, oldest = self._running.popitem(last=False)
            await oldest.stop()
        engine = Engine(config)
        await engine.start()
        self._running[config] = engine
        return engine

    async def scores(self, config: EngineConfig, pairs: Sequence[Pair]) -> NDArray[np.float32]:
        """The score of each pair, in one request. Tests that ask for the same scores share them too."""
        asked = config, tuple(pairs)
        if asked not in self._scores:
            engine = await self(config)
            queries, documents = [pair.query for pair in pairs], [pair.document for pair in pairs]
            result = await engine.score(queries, documents, truncation=CUT_LONG)
            self._scores[asked] = np.array(result.scores, dtype=np.float32)
        return self._scores[asked]

    async def __aenter__(self) -> "Engines":
        return self

    async def __aexit__(self, *raised: object) -> None:
        while self._running:
            _, engine = self._running.popitem()
            await engine.stop()


@contextmanager
def held_steps(engine: Engine, after: int = 0) -> Iterator[threading.Event]:
    """Runs so many steps of later requests and holds the next until the event is set, at the latest in the
    end. Steps of requests that came before run."""
    runner: Any = engine.device_model.runner
    forward, steps, go_on = runner.forward, count(), threading.Event()
    running: Any = engine._running
    before = next(running._request_ids)

    def held(step: Step) -> Any:
        parts = (*(chunk.sequence for chunk in step.chunks), *step.others)
        if any(part.request_id > before for part in parts) and next(steps) >= after:
            assert go_on.wait(1200)
        return forward(step)

    runner.forward = held
    try:
        yield go_on
    finally:
        go_on.set()
        runner.forward = forward
