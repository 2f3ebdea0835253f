"""What a front knows of a whole fleet, whichever front is asked: how many engines there are, and /metrics."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from prometheus_client import generate_latest

from maxsimd.api.fleet.address import Address
from maxsimd.api.fleet.door import Door, Send
from maxsimd.api.fleet.fleet_engine import FleetEngine
from maxsimd.api.fleet.link import Link, LostError
from maxsimd.api.fleet.messages import Answer, Failed, Metrics, Question, ShowMetrics
from maxsimd.api.fleet.pages import joined

# A front that does not answer within this many seconds is left out.
_PATIENCE = 2.0


class FrontView:
    """What one front, by its slot, sees of the others and of the engines. The `others` are where they can be
    asked now, by their slots; they ask this one at its `door`, which is to be opened."""

    def __init__(
        self, engine: FleetEngine, slot: Callable[[], int], others: Callable[[], Mapping[int, Address]]
    ) -> None:
        self._engine = engine
        self._slot = slot
        self._others = others
        self.door = Door(self._answer, lambda: 0)

    @property
    def replicas(self) -> tuple[int, int]:
        """How many engines are there, and how many are meant to be."""
        return self._engine.size

    async def metrics(self, own: bytes) -> bytes:
        """The page of all fronts and engines, by the front's own."""
        others = self._others()
        asked = asyncio.gather(*(self._page_of(address) for address in others.values()))
        engines = await self._engine.ask_all(ShowMetrics())
        pages = [("front", self._slot(), own)]
        pages += [("front", slot, page) for slot, page in zip(others, await asked, strict=True) if page]
        pages += [("replica", slot, answer.page) for slot, answer in engines if isinstance(answer, Metrics)]
        return joined(sorted(pages, key=lambda page: page[:2]))

    async def _page_of(self, address: Address) -> bytes:
        """Of another front; nothing of one that cannot be asked now."""
        with suppress(LostError, TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                link = await Link.open(address)
                try:
                    answer = (await link.ask(ShowMetrics())).answer
                finally:
                    await link.close()
                if isinstance(answer, Metrics):
                    return answer.page
        return b""

    async def _answer(self, question: Question, send: Send) -> Answer:
        if isinstance(question, ShowMetrics):
            return Metrics(generate_latest(self._engine.metrics.registry))
        return Failed(kind="invalid", message="a front is asked for its metrics and nothing else")
