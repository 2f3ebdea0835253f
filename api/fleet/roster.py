"""The engines that a front is connected to; it reconnects to those that are lost."""

import asyncio
import logging
import pickle
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from maxsimd.api.fleet import messages as wire
from maxsimd.api.fleet.link import (
    Address,
    Link,
    LostError,
    NotSentError,
    OtherVersionError,
    SilentError,
)
from maxsimd.api.logs import SeldomLogger
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.facts import ModelFacts
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.tenants import Tenant
from maxsimd.scheduler.fleet import Member

log = logging.getLogger("maxsimd.fleet")

T = TypeVar("T")

# Seconds between attempts to connect.
_LOOK_SECONDS = 0.1
# Seconds before an engine is asked again that could not clear its cache or runs another version.
_PAUSE_SECONDS = 1.0
# A front counts an engine's silence in this many ticks.
_SILENT_TICKS = 10


class ReplacedError(Exception):
    """Engines with other scores have taken over since the request began."""


@dataclass(frozen=True, slots=True)
class Listed:
    """An engine that should be there: its slot and address."""

    slot: int
    address: Address


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    facts: ModelFacts
    config: EngineConfig
    tokenizer: TextTokenizer
    fingerprint: str


@dataclass(slots=True, eq=False)
class Connected:
    """A connected engine. `alone` is held while it has a part that may have killed others."""

    member: Member
    link: Link
    alone: asyncio.Lock = field(default_factory=asyncio.Lock)


class Roster:
    """The engines by address. A request is served by engines of one fingerprint: while a new version replaces
    an old one, the more numerous. Engines that are silent for `timeout` seconds get no work until they
    answer. `is_alone` says whether no other front gives them work. For one event loop."""

    def __init__(
        self,
        listed: Sequence[Listed] = (),
        most: int | None = None,
        timeout: float = 5.0,
        is_alone: bool = True,
    ) -> None:
        self.most = len(listed) if most is None else most
        self._listed = {each.address: each.slot for each in listed}
        self._unlisted: dict[Address, asyncio.Event] = {}
        self._timeout = timeout
        self._is_alone = is_alone
        self._links: dict[Address, Link] = {}
        # Engines that did not answer in time and have not answered since.
        self._silent: set[Address] = set()
        # Engines that must clear their caches before they get work again.
        self._uncleared: set[Address] = set()
        # Tasks that clear the caches of engines that have not done so in time.
        self._clearing: dict[Address, asyncio.Task[Exception | None]] = {}
        self._cannot_clear = SeldomLogger(log)
        self._connected: dict[Address, Connected] = {}
        self._joined = 0
        self._changed = asyncio.Event()
        self._tasks: dict[Address, asyncio.Task[None]] = {}
        self.tenants: dict[str, Tenant] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._is_started = False
        self._served: dict[str, Served] = {}
        self.served: Served | None = None

    def start(self) -> None:
        self._is_started = True
        for address in self._listed.keys() - self._tasks.keys():
            self._begin(address)

    async def close(self) -> None:
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def set_listed(self, listed: Sequence[Listed]) -> None:
        """Changes the engines that should be there. Others finish what they have, once one of these is
        there."""
        self._listed = {each.address: each.slot for each in listed}
        for address, slot in self._listed.items():
            connected = self._connected.get(address)
            if connected is not None:
                connected.member = replace(connected.member, slot=slot)
            elif self._is_started and address not in self._tasks:
                self._begin(address)
        self._let_unlisted_go()
        self._change()

    @property
    def num_listed(self) -> int:
        return len(self._listed)

    @property
    def num_silent(self) -> int:
        return len(self._silent)

    @property
    def members(self) -> tuple[Member, ...]:
        """Engines that can be asked now, of one fingerprint."""
        return () if self.served is None else self.alike(self.served.fingerprint)

    def alike(self, fingerprint: str) -> tuple[Member, ...]:
        """Engines of a fingerprint that can be asked now."""
        members = (connected.member for connected in self._connected.values())
        alike = (member for member in members if member.fingerprint == fingerprint)
        return tuple(sorted(alike, key=lambda member: member.slot))

    def connected(self, member: Member) -> Connected:
        """Raises NotSentError for an engine that is gone."""
        for connected in self._connected.values():
            if connected.member.name == member.name:
                return connected
        raise NotSentError("the engine is gone")

    @property
    def links(self) -> dict[int, Link]:
        """Connections to engines of any fingerprint, by slot."""
        return {connected.member.slot: connected.link for connected in self._connected.values()}

    async def until_changed(self) -> None:
        await self._changed.wait()

    async def until_another(self, names: set[str], fingerprint: str | None = None) -> None:
        """Returns when there is an engine of another name, and of the fingerprint if given. Raises
        ReplacedError where engines of another fingerprint have taken over."""
        while True:
            members = self.members if fingerprint is None else self.alike(fingerprint)
            if any(member.name not in names for member in members):
                return
            if fingerprint is not None and self.members and self.members[0].fingerprint != fingerprint:
                raise ReplacedError
            await self.until_changed()

    def set_tenants(self, tenants: dict[str, Tenant]) -> None:
        """Tells all engines, and those that come later."""
        if tenants == self.tenants:
            return
        self.tenants = tenants
        for connected in self._connected.values():
            self._in_background(_tell(connected.link, wire.SetTenants(tenants)))

    async def clear_caches(self) -> list[int]:
        """Clears all engines' caches. Returns the slots of late ones, which clear theirs as soon as they
        answer. An engine that starts meanwhile clears its disk cache before it gets work from here. It is
        late if other fronts may give it work before. Raises an engine's error."""
        starting = self._listed.keys() - self._links.keys()
        self._uncleared |= self._silent | starting
        # Late engines are not asked twice at a time: they may keep questions for long.
        late = self._silent | {each for each, task in self._clearing.items() if not task.done()}
        if not self._is_alone:
            late |= starting
        asked = {
            address: self._in_background(self._clear(address, link))
            for address, link in self._links.items()
            if address not in late
        }
        if asked:
            await asyncio.wait(asked.values(), timeout=self._timeout)
        self._clearing |= {address: task for address, task in asked.items() if not task.done()}
        for address, task in asked.items():
            error = task.result() if task.done() else LostError()
            if isinstance(error, LostError):
                late.add(address)
            elif error is not None:
                raise error
        slots = self._listed | {address: each.member.slot for address, each in self._connected.items()}
        return sorted({slots[address] for address in late & slots.keys()})

    async def _clear(self, address: Address, link: Link) -> Exception | None:
        """Clears an engine's cache; returns its error."""
        self._uncleared.add(address)
        try:
            answer = (await link.ask(wire.Command.CLEAR_CACHE)).answer
        except LostError as error:
            return error
        if isinstance(answer, wire.Failed):
            return wire.as_error(answer)
        self._uncleared.discard(address)
        return None

    async def _clear_if_late(self, address: Address, link: Link) -> None:
        """Clears the cache of an engine that missed it. Raises LostError."""
        while address in self._uncleared:
            error = await self._clear(address, link)
            if isinstance(error, LostError):
                raise error
            if error is not None:
                message = "a replica is not used because it cannot clear its cache: %s"
                self._cannot_clear.warning(message, error)
                await asyncio.sleep(_PAUSE_SECONDS)

    def _in_background(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _begin(self, address: Address) -> None:
        self._unlisted[address] = asyncio.Event()
        self._tasks[address] = asyncio.create_task(
            self._stay_connected(address), name=f"maxsimd-engine-{self._listed[address]}"
        )

    async def _stay_connected(self, address: Address) -> None:
        told = ""
        try:
            while address in self._listed:
                self._unlisted[address].clear()
                try:
                    link = await Link.open(address)
                except LostError as error:
                    if isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):
                        self._silent.discard(address)  # the process has ended
                    await asyncio.sleep(_LOOK_SECONDS)
                    continue
                self._links[address] = link
                try:
                    await self._use(address, link)
                except OtherVersionError as error:
                    if str(error) != told:
                        told = str(error)
                        log.error("replica %s is not used: %s", self._listed.get(address), told)
                    await asyncio.sleep(_PAUSE_SECONDS)
                except LostError:
                    pass
                finally:
                    self._remove(address)
                    del self._links[address]
                    await link.close()
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            del self._tasks[address], self._unlisted[address]
            self._silent.discard(address)
            self._uncleared.discard(address)
            self._clearing.pop(address, None)

    async def _use(self, address: Address, link: Link) -> None:
        """Returns when the engine is gone, silent, or unlisted and done."""
        introduced = (await link.ask(wire.Command.INTRODUCE)).answer
        if not isinstance(introduced, wire.Introduction):
            raise LostError("the engine does not introduce itself")
        fingerprint = introduced.fingerprint
        if fingerprint not in self._served:
            tokenizer = pickle.loads(introduced.tokenizer)
            self._served[fingerprint] = Served(introduced.facts, introduced.config, tokenizer, fingerprint)
        reported = None
        # Both may change while the engine is asked.
        while reported is not self.tenants or address in self._uncleared:
            await self._clear_if_late(address, link)
            reported = self.tenants
            await _tell(link, wire.SetTenants(reported))
        if address not in self._listed:
            return
        self._unlisted[address].clear()  # it may have been unlisted and listed again meanwhile
        self._joined += 1
        self._silent.discard(address)
        slot = self._listed[address]
        self._connected[address] = Connected(Member(slot, f"{slot}.{self._joined}", fingerprint), link)
        log.info("replica %d is there", slot)
        self._let_unlisted_go()
        self._change()
        if self.served is not None and self.served.fingerprint != fingerprint:
            log.warning("replica %d serves something else than the others and is not used", slot)
        lost = asyncio.create_task(link.until_lost())
        silent = asyncio.create_task(self._until_silent(link))
        unlisted = asyncio.create_task(self._unlisted[address].wait())
        tasks = [lost, silent, unlisted]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if unlisted.done():
                tasks.append(asyncio.create_task(link.until_quiet()))
                await asyncio.wait({lost, silent, tasks[-1]}, return_when=asyncio.FIRST_COMPLETED)
            if silent.done() and not lost.done():
                self._silent.add(address)
                self._remove(address, f"has not answered for {self._timeout:g} s: no work until it does")
                await link.close(SilentError)
        finally:
            for task in tasks:
                task.cancel()

    async def _until_silent(self, link: Link) -> None:
        """Returns when an engine has not answered in time. Counts ticks, not time: a stopped process hears
        nobody."""
        ping: asyncio.Task[None] | None = None
        ticks = 0
        while ticks < _SILENT_TICKS:
            before = link.moved
            await asyncio.sleep(self._timeout / _SILENT_TICKS)
            if link.moved.shows_life(before):
                ticks = 0
            elif ping is None or ping.done():
                ticks, ping = 0, self._in_background(_tell(link, wire.Command.PING))
            else:
                ticks += 1

    def _let_unlisted_go(self) -> None:
        """An unlisted engine serves until a listed one is there."""
        if self._connected.keys() & self._listed.keys():
            for address in self._unlisted.keys() - self._listed.keys():
                self._unlisted[address].set()
                self._remove(address)

    def _remove(self, address: Address, reason: str = "is gone") -> None:
        connected = self._connected.pop(address, None)
        if connected is not None:
            log.warning("replica %d %s", connected.member.slot, reason)
            self._change()

    def _change(self) -> None:
        counts = Counter(connected.member.fingerprint for connected in self._connected.values())
        if counts:
            serving = None if self.served is None else self.served.fingerprint
            chosen = max(counts, key=lambda each: (counts[each], each == serving))
            self.served = self._served[chosen]
        self._changed.set()
        self._changed = asyncio.Event()


async def _tell(link: Link, question: wire.Question) -> None:
    """Asks a question whose answer says nothing."""
    with suppress(LostError):
        await link.ask(question)
