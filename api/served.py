"""What serves a server's requests: an engine in this process, or what spreads them over engines elsewhere."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeAlias, TypeVar, Unpack

from prometheus_client import CollectorRegistry

from maxsimd.api.models.several import SeveralModels
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.facts import ModelFacts
from maxsimd.engine.metrics import EngineStats
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.requests import (
    ClassifyResult,
    EmbedResult,
    RankedDocument,
    RerankResult,
    ScoreOptions,
    ScoreResult,
    SparseEmbedResult,
    TokenEmbedResult,
)
from maxsimd.engine.tenants import Tenant

T = TypeVar("T")


class FleetView(Protocol):
    """What there is of a server's other processes."""

    @property
    def replicas(self) -> tuple[int, int]:
        """How many engines are there, and how many are meant to be."""

    async def metrics(self, own: bytes) -> bytes:
        """From the page of /metrics that this process has by itself to that of the whole server."""


class HasRegistry(Protocol):
    """Counts something."""

    @property
    def registry(self) -> CollectorRegistry: ...


class ServedStream(Protocol):
    """See `ScoreStream`."""

    @property
    def result(self) -> ScoreResult: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: Any) -> None: ...

    def __aiter__(self) -> AsyncIterator[list[RankedDocument]]: ...


class ServedEngine(Protocol):
    """What handlers and the server's life use of an engine; see `Engine`."""

    death: str | None
    restart_obstacle: str | None

    @property
    def metrics(self) -> HasRegistry: ...

    @property
    def config(self) -> EngineConfig: ...

    @property
    def caches_by_tenant(self) -> bool:
        """Whether tenants need names, by which their cached entries are found. Known before the start."""

    @property
    def is_healthy(self) -> bool: ...

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def tokenizer(self) -> TextTokenizer: ...

    @property
    def max_tokens(self) -> int: ...

    async def start(self) -> None: ...

    async def stop(self, grace: float | None = None) -> None: ...

    async def until_dead(self) -> None: ...

    def stats(self) -> EngineStats: ...

    def set_tenants(self, tenants: Mapping[str, Tenant]) -> None: ...

    def check_rate(self, tenant: str) -> None: ...

    async def clear_cache(self) -> None: ...

    async def in_thread(self, function: Callable[[], T], size: int) -> T: ...

    async def conversation(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool, continue_final_message: bool
    ) -> tuple[str, bool]: ...

    async def score(self, queries: Any, documents: Any, **options: Unpack[ScoreOptions]) -> ScoreResult: ...

    async def rerank(
        self,
        query: Any,
        documents: Any,
        *,
        top_n: int | None = None,
        score_threshold: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> RerankResult: ...

    def stream(self, queries: Any, documents: Any, **options: Unpack[ScoreOptions]) -> ServedStream: ...

    @property
    def embed(self) -> Callable[..., Awaitable[EmbedResult]]: ...

    @property
    def embed_tokens(self) -> Callable[..., Awaitable[TokenEmbedResult]]: ...

    @property
    def embed_sparse(self) -> Callable[..., Awaitable[SparseEmbedResult]]: ...

    @property
    def classify(self) -> Callable[..., Awaitable[ClassifyResult]]: ...


# What a server lives around.
Serving: TypeAlias = ServedEngine | SeveralModels
