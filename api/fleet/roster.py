"""The engines that a front can reach: it connects to each, again whenever one was lost."""

import asyncio
import logging
import pickle
from dataclasses import dataclass, field

from maxsimd.api.fleet.link import Link, LostError, NotSentError
from maxsimd.api.fleet.messages import Introduce, Introduction, SetTenants
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.facts import ModelFacts
from maxsimd.engine.preprocess.tokenization import TextTokenizer
from maxsimd.engine.tenants import Tenant
from maxsimd.scheduler.fleet import Member

log = logging.getLogger("maxsimd.fleet")

# How often a front looks whether an engine listens that it is not connected to, in seconds.
_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """What all engines of a fleet serve, as the first of them said it."""

    facts: ModelFacts
    config: EngineConfig
    tokenizer: TextTokenizer
    fingerprint: str


@dataclass(slots=True, eq=False)
class Connected:
    """An engine that this front is connected to. `alone` is held while a part is there that is suspected of
    killing engines, so that no other such part dies with it."""

    member: Member
    link: Link
    alone: asyncio.Lock = field(default_factory=asyncio.Lock)


class Roster:
    """For one event loop; engine i of the fleet listens on the i-th of the `paths`."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        self.paths = paths
        self._connected: dict[int, Connected] = {}
        self._joined = 0
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._tenants: dict[str, Tenant] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self.served: Served | None = None

    def start(self) -> None:
        """Connects, from now on."""
        self._tasks = [
            asyncio.create_task(self._stay_connected(slot, path), name=f"maxsimd-engine-{slot}")
            for slot, path in enumerate(self.paths)
        ]

    async def close(self) -> None:
        """Ends all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def members(self) -> tuple[Member, ...]:
        """The engines that can be asked now, all of one fingerprint."""
        return tuple(connected.member for _, connected in sorted(self._connected.items()))

    def connected(self, member: Member) -> Connected:
        """Raises NotSentError for an engine that is gone."""
        found = self._connected.get(member.slot)
        if found is None or found.member.name != member.name:
            raise NotSentError("the engine is gone")
        return found

    def all_connected(self) -> list[Connected]:
        """Every engine that can be asked now."""
        return [connected for _, connected in sorted(self._connected.items())]

    async def until_changed(self) -> None:
        """Returns when an engine has come or gone."""
        await self._changed.wait()

    async def until_another(self, names: set[str]) -> None:
        """Returns when there is an engine whose name is none of these."""
        while all(member.name in names for member in self.members):
            await self.until_changed()

    def set_tenants(self, tenants: dict[str, Tenant]) -> None:
        """Tells all engines, and those that come later."""
        self._tenants = tenants
        for connected in self._connected.values():
            telling = asyncio.create_task(_tell(connected.link, tenants))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    async def _stay_connected(self, slot: int, path: str) -> None:
        while True:
            try:
                link = await Link.open(path)
            except LostError:
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            try:
                await self._use(slot, link)
            except LostError:
                pass
            finally:
                if self._connected.pop(slot, None) is not None:
                    log.warning("engine %d is gone", slot)
                    self._change()
                await link.close()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _use(self, slot: int, link: Link) -> None:
        introduced = (await link.ask(Introduce())).answer
        if not isinstance(introduced, Introduction):
            raise LostError("the engine does not introduce itself")
        if self.served is None:
            tokenizer = pickle.loads(introduced.tokenizer)
            self.served = Served(introduced.facts, introduced.config, tokenizer, introduced.fingerprint)
        if introduced.fingerprint != self.served.fingerprint:
            log.error("engine %d serves something else than the others and is not used", slot)
            await link.until_lost()
            return
        reported = None
        while reported is not self._tenants:
            reported = self._tenants
            await _tell(link, reported)
        self._joined += 1
        member = Member(slot, f"{slot}.{self._joined}", introduced.fingerprint)
        self._connected[slot] = Connected(member, link)
        log.info("engine %d is there", slot)
        self._change()
        await link.until_lost()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _tell(link: Link, tenants: dict[str, Tenant]) -> None:
    try:
        await link.ask(SetTenants(tenants))
    except LostError:
        log.debug("an engine is gone before it knew its tenants")
