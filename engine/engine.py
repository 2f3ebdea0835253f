"""The engine: the public face, from texts to scores.

It owns the threads and the actors; each request passes through here once on its way in and once on its way
out.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.config import EngineConfig, ScoreType
from maxsimd.engine.device.load import DeviceModel
from maxsimd.engine.errors import (
    EngineDeadError,
    EngineNotReadyError,
    EngineRunningError,
    InvalidRequestError,
)
from maxsimd.engine.metrics import EngineMetrics
from maxsimd.engine.postprocess import (
    aside,
    bounded_by,
    classify_result,
    embed_result,
    rank,
    score_result,
    token_embed_result,
    work_in,
)
from maxsimd.engine.preprocess import Prepared
from maxsimd.engine.preprocess.tokenization import TextTokenizer
from maxsimd.engine.requests import (
    CacheMode,
    ClassifyResult,
    EmbedRequest,
    EmbedResult,
    InputType,
    LongInputPolicy,
    OnError,
    OnTimeout,
    Priority,
    Progress,
    RerankResult,
    RunOptions,
    ScoreOptions,
    ScoreRequest,
    ScoreResult,
    TokenEmbedResult,
    Values,
)
from maxsimd.engine.runtime import Running, bury, launch
from maxsimd.engine.stats import EngineStats
from maxsimd.engine.tenants import Tenant, TenantLimits
from maxsimd.engine.validation import (
    as_config,
    as_inputs,
    as_scored,
    as_texts,
    as_truncation,
    check_dimensions,
    check_paired,
    check_scores,
    check_task,
)
from maxsimd.pooling.vectors import Embedding

T = TypeVar("T")
# Texts, or their embeddings.
Scored = str | Embedding | Sequence[str | Embedding]
Inputs = str | Sequence[str | Sequence[int]]


class Engine:
    """Scores and embeds texts with one model. Use it as an async context manager, from one event loop.

    All methods raise InvalidRequestError for requests that make no sense, RequestTooLargeError for those that
    are too much by themselves, QueueFullError when too much waits already, RequestTimeoutError when `timeout`
    (seconds) passes, RequestFailedError when the model fails on this very request, EngineNotReadyError
    outside of the context and EngineDeadError when the engine has died. Cancelling a call cancels its work.
    Tenants share the device by weight (`set_tenants`), however many requests each has, and a lower
    `priority` gets a larger share: "interactive" is 0, "batch" 4. `progress` is called on the event loop with
    how many of a call's values have come and how many there will be (one or more a document, text or pass);
    it must not block, and if it raises, the call fails.
    """

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
            self._running = await launch(self.config, self.metrics, self._died, self._tenants)
            if self.death is not None:
                self.death, self.restart_obstacle, self._dead = None, None, asyncio.Event()
                self.metrics.restarts.inc()
        finally:
            self._changing = False

    async def stop(self, grace: float | None = None) -> None:
        """Takes no more requests, finishes those it has within `grace` seconds and frees everything."""
        running = self._let_go()
        if running is None:
            return
        self._changing = True
        try:
            await running.close(grace)
        finally:
            self._changing = False
            # An event belongs to the event loop on which it was awaited; the next start may be on another.
            if self.death is None:
                self._dead = asyncio.Event()

    async def until_dead(self) -> None:
        """Returns when the engine has died; `death` then says of what."""
        if self.death is None:
            await self._dead.wait()

    @property
    def is_healthy(self) -> bool:
        return self._running is not None and self.death is None

    def stats(self) -> EngineStats:
        """What the engine holds at the moment: queue, queries, caches of cut sequences."""
        return self._require().stats()

    @property
    def model(self) -> LoadedModel:
        """The loaded model's description."""
        return self._require().device_model.model

    @property
    def device_model(self) -> DeviceModel:
        """The model as it is run: device, precision, packing."""
        return self._require().device_model

    @property
    def tokenizer(self) -> TextTokenizer:
        return self._require().tokenizer

    @property
    def max_tokens(self) -> int:
        """The longest sequence that can be run, special tokens included."""
        return self._require().max_tokens

    async def score(
        self,
        queries: Scored,
        documents: Scored,
        *,
        truncation: LongInputPolicy = "cut",
        use_activation: bool = True,
        normalize: bool = False,
        instruction: str | None = None,
        cache: CacheMode = "use",
        priority: Priority = 0,
        tenant: str = "",
        timeout: float | None = None,
        on_timeout: OnTimeout = "error",
        on_error: OnError = "fail",
        progress: Progress | None = None,
    ) -> ScoreResult:
        """Scores documents against queries: one query against one or many documents, or N against N.

        Scores are in the documents' order and higher is better: MaxSim sums for late interaction, cosines
        for bi-encoders and listwise models, the classifier's activation (logits without `use_activation`)
        for cross-encoders. For late interaction and bi-encoders each text may come as its embedding, an
        array or `Vectors`. Inputs that are too long for the model are cut, and counted in `truncated`, unless
        `truncation` says "error", "window" or something else. `instruction` is for models that take one.
        `cache` says whether embeddings of documents are taken from the cache, and new ones cached. With
        `normalize` scores are from 0 to 1: classifiers' probabilities, cosines without their negative part,
        and of MaxSim the mean over the query's tokens, without its negative part.

        With `on_timeout` "partial" a request whose time is up has the scores that there are by then, and the
        rest `unscored`; its documents are run in their order. With `on_error` "report" a document that cannot
        be read, or on which the model fails, has an error in `errors` and the others their scores. A listwise
        model scores documents by each other and takes neither.
        """
        model = self.model
        num_labels = len(model.labels) if model.score_task == "classify" else 1
        check_scores(num_labels, model.score_type is ScoreType.LISTWISE, on_timeout, on_error)
        bounded = bounded_by(model, self.device_model.calibration) if normalize else None
        takes_vectors = model.score_type in (ScoreType.LATE_INTERACTION, ScoreType.BI_ENCODER)
        scored = as_scored(documents, "documents", takes_vectors)
        request = ScoreRequest(
            queries=as_scored(queries, "queries", takes_vectors),
            documents=scored,
            truncation=as_truncation(truncation),
            instruction=instruction,
            cache=cache,
        )
        options = RunOptions(priority, tenant, timeout, progress, on_timeout, on_error)
        prepared, values = await self._pairs(request, options)
        activation = None
        if model.score_task == "classify" and (use_activation or normalize):
            activation = model.probabilities if normalize else model.activation
        return await aside(lambda: score_result(prepared, values, activation, bounded), len(scored))

    async def rerank(
        self,
        query: str | Embedding,
        documents: Sequence[str | Embedding],
        *,
        top_n: int | None = None,
        score_threshold: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> RerankResult:
        """Ranks documents for a query, best first, ties in input order; at most `top_n` of them, and none
        with a score below the `score_threshold`. Other options are those of `score`."""
        if top_n is not None and top_n < 0:
            raise InvalidRequestError(f"top_n must not be negative, not {top_n}", "top_n")
        if unknown := options.keys() - ScoreOptions.__annotations__.keys():
            raise TypeError(f"rerank() has no argument {' or '.join(sorted(unknown))}; it has top_n")
        given = as_scored(documents, "documents", takes_vectors=True)
        scored = await self.score(query, given, **options)
        ranked = await aside(lambda: rank(scored.scores, given, top_n, score_threshold), len(given))
        return RerankResult(
            ranked, scored.usage, scored.truncated, scored.unscored, scored.errors, scored.timings
        )

    async def embed(
        self,
        texts: Inputs,
        *,
        input_type: InputType | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncation: LongInputPolicy = "cut",
        priority: Priority = 0,
        tenant: str = "",
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> EmbedResult:
        """One vector a text: float32 [texts, dim]. `input_type` chooses the checkpoint's prompt for queries
        or documents, `prompt_name` any by its name; `dimensions` is how many columns are
        returned, the first ones (matryoshka)."""
        request = EmbedRequest(
            texts=as_inputs(texts),
            task="embed",
            input_type=input_type,
            prompt_name=prompt_name,
            truncation=as_truncation(truncation),
        )
        options = RunOptions(priority, tenant, timeout, progress)
        model = self.model
        prepared, values = await self._texts(request, dimensions, options)
        normalised = model.tasks["embed"].normalised
        return await aside(lambda: embed_result(prepared, values, dimensions, normalised), work_in(values))

    async def embed_tokens(
        self,
        texts: Inputs,
        *,
        input_type: InputType | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        max_tokens: int | None = None,
        truncation: LongInputPolicy = "cut",
        priority: Priority = 0,
        tenant: str = "",
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> TokenEmbedResult:
        """One vector a token: a list of float32 [tokens, dim], as late interaction scores them. Texts with
        more than `max_tokens` together are refused before they are run."""
        request = EmbedRequest(
            texts=as_inputs(texts),
            task="token_embed",
            input_type=input_type,
            prompt_name=prompt_name,
            truncation=as_truncation(truncation),
            max_tokens=max_tokens,
        )
        options = RunOptions(priority, tenant, timeout, progress)
        model = self.model
        prepared, values = await self._texts(request, dimensions, options)
        normalised = model.tasks["token_embed"].normalised
        return await aside(
            lambda: token_embed_result(prepared, values, dimensions, normalised), work_in(values)
        )

    async def classify(
        self,
        texts: Inputs,
        *,
        text_pairs: Sequence[str] | None = None,
        truncation: LongInputPolicy = "cut",
        use_activation: bool = True,
        priority: Priority = 0,
        tenant: str = "",
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> ClassifyResult:
        """A classifier's probabilities, or its logits without `use_activation`, one a text and label.

        Of single texts, or of pairs with the `text_pairs` as their second texts."""
        model = self.model
        check_task("classify", model.tasks)
        options = RunOptions(priority, tenant, timeout, progress)
        long_inputs = as_truncation(truncation)
        if text_pairs is None:
            texts_alone = EmbedRequest(texts=as_inputs(texts), task="classify", truncation=long_inputs)
            prepared, values = await self._texts(texts_alone, None, options)
        else:
            pairs = ScoreRequest(
                queries=as_texts(cast("Sequence[str]", texts), "queries"),
                documents=as_texts(text_pairs, "documents"),
                truncation=long_inputs,
                cache="bypass",
            )
            prepared, values = await self._pairs(pairs, options)
        activation = model.probabilities if use_activation else None
        return await aside(
            lambda: classify_result(prepared, values, activation, model.labels), work_in(values)
        )

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

    async def in_thread(self, function: Callable[[], T], size: int) -> T:
        """Runs something that blocks in the engine's thread pool, where small work goes before large; `size`
        is about how many characters it reads or writes."""
        return await self._require().in_pool(function, size)

    def _let_go(self) -> Running | None:
        running, self._running = self._running, None
        return running

    async def _texts(
        self, request: EmbedRequest, dimensions: int | None, options: RunOptions
    ) -> tuple[Prepared, Values]:
        running = self._require()
        check_task(request.task, self.model.tasks)
        check_dimensions(dimensions, self.model.tasks[request.task].dim)
        self.metrics.request_documents.observe(len(request.texts))
        return await running.run(lambda ids: running.preprocessor.embed(request, ids), request, options)

    async def _pairs(self, request: ScoreRequest, options: RunOptions) -> tuple[Prepared, Values]:
        check_paired(request.queries, request.documents)
        running = self._require()
        self.metrics.request_documents.observe(len(request.documents))
        return await running.run(
            lambda ids: running.preprocessor.score(request, ids, options.on_error), request, options
        )

    def _require(self) -> Running:
        if self.death is not None:
            raise EngineDeadError(self.death)
        if self._running is None:
            raise EngineNotReadyError("the engine is not running: it is starting, draining or stopped")
        return self._running

    def _died(self, reason: str, obstacle: str | None) -> None:
        self.death, self.restart_obstacle = reason, obstacle
        self._dead.set()
