"""An engine's life: started, running, dead, stopped, and started again; and what it can be asked at any time.

What it is for, scoring and embedding, is in `engine`; how that is run, here."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.allocators import give_back_memory
from maxsimd.engine.device.facts import ModelFacts
from maxsimd.engine.device.load import DeviceModel
from maxsimd.engine.errors import EngineDeadError, EngineNotReadyError, EngineRunningError
from maxsimd.engine.metrics import EngineMetrics
from maxsimd.engine.processors.text.chat import chat_text
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.requests import ScoreRequest
from maxsimd.engine.runtime import Running, bury, call_in_thread, launch
from maxsimd.engine.stats import EngineStats
from maxsimd.engine.tenants import Tenant, TenantLimits
from maxsimd.engine.validation import as_config

T = TypeVar("T")

# Characters that a chat template writes around each message, about.
_AROUND_A_MESSAGE = 64


class EngineLife:
    """Owns what runs while the engine does. Used as `Engine`."""

    def __init__(self, config: EngineConfig | str | None = None, **options: Any) -> None:
        """By a configuration, or by a model's folder or hub id and the options of an `EngineConfig`."""
        self.config = as_config(config, options)
        self.metrics = EngineMetrics()
        self.death: str | None = None
        # Of a death, why another start in this process would be of no use; None where it may be.
        self.restart_obstacle: str | None = None
        self._tenants = TenantLimits()
        self._running: Running | None = None
        # Whether a start or a stop is under way.
        self._changing = False
        # What is being stopped.
        self._stopping: Running | None = None
        self._dead = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Loads the model and starts the actors; also after `stop` and after the engine has died, whose
        `death` is over once this has succeeded. Raises ModelLoadError, and EngineRunningError for an engine
        that runs already."""
        if self._changing or self.is_healthy:
            raise EngineRunningError(
                "the engine is running, or is being started or stopped; stop it first and wait for that"
            )
        self._changing = True
        try:
            await bury(self._let_go())
            self._running = await self._launch()
            if self.death is not None:
                self.death, self.restart_obstacle, self._dead = None, None, asyncio.Event()
                self.metrics.restarts.inc()
        finally:
            self._changing = False

    async def stop(self, grace: float | None = None) -> None:
        """Takes no more requests, finishes those it has within `grace` seconds and frees everything. While it
        is being stopped already, this returns at once, and those requests have no longer than `grace` either.
        """
        if self._stopping is not None:
            self._stopping.hasten(grace)
        running = self._let_go()
        if running is None:
            return
        self._changing, self._stopping = True, running
        try:
            await running.close(grace)
        finally:
            self._changing, self._stopping = False, None
            # An event belongs to the event loop on which it was awaited; the next start may be on another.
            if self.death is None:
                self._dead = asyncio.Event()
        del running
        await call_in_thread(give_back_memory)

    async def until_dead(self) -> None:
        """Returns when the engine has died; `death` then says of what."""
        if self.death is None:
            await self._dead.wait()

    @property
    def caches_by_tenant(self) -> bool:
        return self.config.cache_by_tenant

    @property
    def is_healthy(self) -> bool:
        return self._running is not None and self.death is None

    def stats(self) -> EngineStats:
        """What the engine holds at the moment: queue, queries, caches of cut sequences."""
        return self._require().stats()

    @property
    def tokens_per_second(self) -> float | None:
        """How fast the device runs when it has enough to do; None before it ever had."""
        return self._require().scheduler.rate.tokens_per_second

    @property
    def model(self) -> LoadedModel:
        """The loaded model's description."""
        return self._require().device_model.model

    @property
    def device_model(self) -> DeviceModel:
        """The model as it is run: device, precision, packing."""
        return self._require().device_model

    @property
    def facts(self) -> ModelFacts:
        """What there is to know of the loaded model for those who do not run it."""
        return self._require().facts

    @property
    def tokenizer(self) -> TextTokenizer:
        return self._require().tokenizer

    @property
    def max_tokens(self) -> int:
        """The longest sequence that can be run, special tokens included."""
        return self._require().max_tokens

    async def conversation(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool, continue_final_message: bool
    ) -> tuple[str, bool]:
        """Messages of "role" and "content" as the checkpoint's template writes them, and whether that is all
        that belongs to them, special tokens included. Raises InvalidRequestError for messages that it does
        not take."""
        model = self.model
        template = model.text.chat

        def write() -> str:
            flags = {
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
            }
            if template is not None:
                return template.conversation(messages, **flags)
            return chat_text(model.tokenizer, messages, **flags)

        # What stands around a message is written, too.
        size = sum(len(message["content"]) + _AROUND_A_MESSAGE for message in messages)
        return await self.in_thread(write, size), template is not None

    def set_tenants(self, tenants: Mapping[str, Tenant]) -> None:
        """Names the tenants with a weight and limits of their own, in place of those named before. May be
        called at any time; weights hold for what waits as well."""
        self._tenants.set(tenants)
        self.metrics.tenants.set_names(tenants)
        if self._running is not None:
            self._running.weigh(self._tenants.weights)

    def check_rate(self, tenant: str) -> None:
        """Raises QueueFullError for a tenant that has used up a rate: before its request is even read."""
        self._require().admission.check_rate(tenant)

    async def clear_cache(self) -> None:
        """Forgets all cached embeddings, on disk as well, and all cached scores."""
        cache = self._require().cache
        if cache is not None:
            await self.in_thread(cache.clear, 0)

    async def check_readable(self, request: ScoreRequest) -> None:
        """Raises what a request that cannot be prepared is refused with. Nothing of it is run."""
        await self._require().check_readable(request)

    async def in_thread(self, function: Callable[[], T], size: int) -> T:
        """Runs something that blocks in the engine's thread pool, where small work goes before large; `size`
        is about how many characters it reads or writes."""
        return await self._require().in_pool(function, size)

    async def _launch(self) -> Running:
        return await launch(self.config, self.metrics, self._died, self._tenants)

    def _let_go(self) -> Running | None:
        running, self._running = self._running, None
        return running

    def _require(self) -> Running:
        if self.death is not None:
            raise EngineDeadError(self.death)
        if self._running is None:
            raise EngineNotReadyError("the engine is not running: it is starting, draining or stopped")
        return self._running

    def _died(self, reason: str, obstacle: str | None) -> None:
        self.death, self.restart_obstacle = reason, obstacle
        self._dead.set()
