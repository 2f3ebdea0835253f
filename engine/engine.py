"""The engine: the public face, from texts to scores, and its life cycle."""

import asyncio
import inspect
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from itertools import count
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, Unpack, cast

import numpy as np

from maxsimd.engine import media
from maxsimd.engine.actors.actor import SetWeights
from maxsimd.engine.cache import EmbeddingCache
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.checkpoint.model import TOKEN_CLASSIFY
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.facts import ModelFacts
from maxsimd.engine.device.load import DeviceModel
from maxsimd.engine.errors import (
    EngineDeadError,
    EngineNotReadyError,
    EngineRunningError,
    InvalidRequestError,
    ModelLoadError,
    RequestTimeoutError,
    UnknownDocumentsError,
)
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.media import Content, OpenImage, PictureFile
from maxsimd.engine.metrics import EngineMetrics, EngineStats
from maxsimd.engine.parameters import complete_docstring
from maxsimd.engine.processors.classification import classified
from maxsimd.engine.processors.embedding import (
    EmbeddingPlan,
    as_document,
    as_muvera,
    check_encoding,
    encoding_price,
)
from maxsimd.engine.processors.labels import LanguageModelProcessor
from maxsimd.engine.processors.processor import Plan, ScorePlan, ScoreProcessor, UnscoredPlan
from maxsimd.engine.processors.prompted_ranking import Chosen, RankedPlan
from maxsimd.engine.processors.text.tokenization import TextTokenizer, chat_text
from maxsimd.engine.requests import (
    AddedDocuments,
    AggregationStrategy,
    CacheMode,
    ClassifyResult,
    EmbedRequest,
    EmbedResult,
    InputType,
    Item,
    LabelRequest,
    LabelScores,
    LongInputPolicy,
    OnError,
    OnTimeout,
    Priority,
    Progress,
    RankedDocument,
    RerankResult,
    RunOptions,
    Scorable,
    Scored,
    ScoreOptions,
    ScoreRequest,
    ScoreResult,
    SparseEmbedResult,
    Timings,
    TokenClassifyResult,
    TokenEmbedResult,
    TokenizedText,
    Usage,
    Value,
    Values,
    as_inputs,
    as_labels,
    as_prompts,
    as_query,
    as_scored,
    as_texts,
    as_truncation,
    check_dimensions,
    check_options,
    check_paired,
    check_strategy,
    check_task,
    rank,
)
from maxsimd.engine.runtime import Running, ValuesArrived, call_in_thread, free_dead, launch
from maxsimd.engine.tenants import Tenant, TenantLimits
from maxsimd.engine.workers import give_back_memory, run_in_thread_if_large
from maxsimd.pooling.muvera import Muvera
from maxsimd.pooling.query_rows import QueryRows

# A stream looks for new documents at most this often, because looking takes time with many documents.
_SECONDS_BETWEEN_LOOKS = 0.05
# Characters that a chat template adds to each message, about.
_TEMPLATE_CHARACTERS = 64
# The query of documents that are embedded for later requests, which are written to the cache by then.
_ANY_QUERY, _SECONDS_TO_WRITE = "a", 2.0
P = ParamSpec("P")
T = TypeVar("T")
# A picture to embed.
Picture = Content | media.Picture | PictureFile | OpenImage
Inputs = Picture | str | Sequence[Picture | str | Sequence[int]]


def _call(
    method: Callable[Concatenate["Engine", P], Awaitable[T]],
) -> Callable[Concatenate["Engine", P], Coroutine[Any, Any, T]]:
    """A method whose calls `stop` waits for within its grace, also while their answers are made."""

    @wraps(method)
    async def call(self: "Engine", /, *args: P.args, **options: P.kwargs) -> T:
        with self._open_call():
            return await method(self, *args, **options)

    return call


class Engine:
    """Scores and embeds texts with one model. Use it as an async context manager, from one event loop.

    All methods raise InvalidRequestError for invalid requests, RequestTooLargeError for requests that are
    too large by themselves, RequestTimeoutError when `timeout` (seconds) passes, RequestFailedError when the
    model fails on the request, EngineNotReadyError outside of the context and EngineDeadError when the engine
    has died. They raise QueueFullError when a tenant has used up its rate, or when the queue is full and
    `max_wait_seconds` is not None. Cancelling a call cancels its work.
    Tenants share the device by weight (`set_tenants`), however many requests each has. A lower `priority`
    gets a larger share: "interactive" is 0, "batch" 4. The event loop calls `progress` with how many of a
    call's values are there and how many there will be (one or more per document, text or pass). `progress`
    must not block. If it raises, the call fails.
    """

    def __init__(self, config: EngineConfig | str | None = None, **options: Any) -> None:
        """Takes a configuration, or a model's folder or hub id and the options of an `EngineConfig`."""
        self.config = _as_config(config, options)
        self.metrics = EngineMetrics()
        self.death: str | None = None
        # Why another start in this process would not help after a death; None if it may.
        self.restart_obstacle: str | None = None
        self._tenants = TenantLimits()
        self._running: Running | None = None
        self._starting: asyncio.Task[None] | None = None
        self._stopping: Running | None = None
        self._dead = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Loads the model and starts the actors. Also works after `stop`, and after the engine has died,
        which clears `death`. Raises ModelLoadError, EngineRunningError if the engine runs already, and
        EngineNotReadyError if it is stopped meanwhile."""
        is_starting = self._starting is not None and not self._starting.done()
        if is_starting or self._stopping is not None or self.is_healthy:
            raise EngineRunningError(
                "the engine is running, or is being started or stopped; stop it first and wait for that"
            )
        starting = self._starting = asyncio.create_task(self._start(), name="maxsimd-start")
        try:
            await starting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if starting.cancelled() and not (task and task.cancelling()):
                if starting.cancelling():
                    raise EngineNotReadyError("the engine was stopped while it was being started") from None
                raise ModelLoadError(
                    "the start was cancelled from inside, by a library or the model's own code; try again"
                ) from None
            if not starting.cancelled() and starting.exception() is None:
                await self.stop(0)  # it has started just before this was cancelled
            raise
        finally:
            if self._starting is starting:
                self._starting = None
            del starting  # it holds its error, which holds this frame

    async def stop(self, grace: float | None = None) -> None:
        """Takes no more requests, finishes open ones within `grace` seconds and frees everything. Ends a
        start that is under way. While another stop is under way, this only shortens its grace."""
        if self._stopping is not None:
            self._stopping.shorten_grace(grace)
        if (starting := self._starting) is not None and not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
        if self._running is not None:
            self._running.check_loop()
        running = self._pop_running()
        if running is None:
            return
        self._stopping = running
        try:
            await running.close(grace)
        finally:
            self._stopping = None
            # An event belongs to the event loop on which it was awaited; the next start may be on another.
            if self.death is None:
                self._dead = asyncio.Event()
        del running
        await call_in_thread(give_back_memory)

    async def until_dead(self) -> None:
        """Returns when the engine has died; `death` is then the reason."""
        if self.death is None:
            await self._dead.wait()

    @property
    def caches_by_tenant(self) -> bool:
        return self.config.cache_by_tenant

    @property
    def is_healthy(self) -> bool:
        return self._running is not None and self.death is None

    def stats(self) -> EngineStats:
        """Counts requests, queued work, and the state on the device: queries, keys and values, pictures."""
        return self._require().stats()

    @property
    def tokens_per_second(self) -> float | None:
        """The device's speed with enough work; None until it is known."""
        return self._require().scheduler.rate.tokens_per_second

    @property
    def model(self) -> LoadedModel:
        """The loaded model's description."""
        return self._require().device_model.model

    @property
    def device_model(self) -> DeviceModel:
        """The model as it runs: device, precision, packing."""
        return self._require().device_model

    @property
    def facts(self) -> ModelFacts:
        """The loaded model's description as plain data."""
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
        """Writes messages with the checkpoint's template. Returns the text, and whether it includes special
        tokens. Raises InvalidRequestError for messages that the template refuses."""
        template = self.model.text.chat
        plain = partial(chat_text, self.model.tokenizer)
        write: Callable[..., str] = plain if template is None else template.conversation
        written = partial(
            write,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        size = sum(len(message["content"]) + _TEMPLATE_CHARACTERS for message in messages)
        return await self.in_thread(written, size), template is not None

    def set_tenants(self, tenants: Mapping[str, Tenant]) -> None:
        """Replaces the tenants that have a weight and limits of their own. May be called at any time; weights
        apply to waiting requests too."""
        self._tenants.set(tenants)
        self.metrics.tenants.set_names(tenants)
        if self._running is not None:
            self._running.scheduler.mailbox.tell(SetWeights(self._tenants.weights))

    def check_rate(self, tenant: str) -> None:
        """Raises QueueFullError for a tenant that has used up a rate, before its request is read."""
        self._require().admission.check_rate(tenant)

    async def clear_cache(self) -> None:
        """Forgets all cached embeddings and kept texts, on disk as well, and all cached scores."""
        running = self._require()
        for each in (running.cache, running.texts):
            if each is not None:
                await self.in_thread(each.clear, 0)

    @_call
    async def add_documents(
        self,
        documents: str | Sequence[str],
        *,
        truncation: LongInputPolicy = "cut",
        priority: Priority = 0,
        tenant: str = "",
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> AddedDocuments:
        """Makes texts known by their digests: requests of the same `tenant` with the same `truncation` may
        then give a `DocumentDigest` in place of each.

        Late interaction and bi-encoders embed them into the cache. With `document_store_mb` the texts are
        kept, too, which other models need. Raises InvalidRequestError where neither is possible."""
        running = self._require()
        processor = running.processors.scores
        request = ScoreRequest(
            queries=(_ANY_QUERY,),
            documents=as_texts(documents, "documents"),
            truncation=as_truncation(truncation),
            cache_owner=tenant,
        )
        options = RunOptions(priority, tenant, timeout, progress)
        self.metrics.request_documents.observe(request.num_documents)
        cache = running.cache if isinstance(running.cache, EmbeddingCache) else None
        if cache is None and running.texts is None:
            raise InvalidRequestError(
                "documents cannot be added: neither their texts nor embeddings are kept here; set "
                "document_store_mb, or give texts with each request",
                "documents",
            )
        digests = await self.in_thread(partial(processor.keep_texts, request), request.reading)
        usage, truncated, timings = Usage(0), 0, Timings()
        if cache is not None:
            plan, values = await running.run(processor, request, options)
            result = await run_in_thread_if_large(request.num_documents, plan.result, values)
            tokens = result.usage.prompt_tokens - result.usage.query_tokens
            usage = replace(result.usage, prompt_tokens=tokens, query_tokens=0)
            truncated, timings = result.truncated - result.truncated_queries, result.timings
            # The cache may have no room for what is still to be written.
            await asyncio.to_thread(cache.flush, _SECONDS_TO_WRITE)
        unknown = await self.in_thread(partial(processor.unknown_among, digests, request), request.reading)
        not_kept = tuple([i for i, digest in enumerate(digests) if digest in unknown])
        return AddedDocuments(digests, usage, truncated, not_kept, timings)

    async def check_readable(self, request: ScoreRequest) -> None:
        """Prepares a request without running it. Raises InvalidRequestError and RequestTooLargeError."""
        await self._require().check_readable(request)

    async def in_thread(self, function: Callable[[], T], size: int) -> T:
        """Runs a blocking function in the engine's thread pool."""
        return await self._require().in_pool(function, size)

    @_call
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
        explain: bool | Literal["maps"] = False,
    ) -> ScoreResult:
        """Scores documents against queries: one query against one or many documents, or N against N.

        Scores are in the documents' order and higher is better: MaxSim sums for late interaction, cosines
        for bi-encoders and listwise models, the classifier's activation for cross-encoders. Calls that time
        out with `on_timeout` "partial" run their documents in order.
        """
        options: ScoreOptions = {
            "truncation": truncation,
            "use_activation": use_activation,
            "normalize": normalize,
            "instruction": instruction,
            "cache": cache,
            "priority": priority,
            "tenant": tenant,
            "timeout": timeout,
            "on_timeout": on_timeout,
            "on_error": on_error,
            "progress": progress,
            "explain": explain,
        }
        plan, values = await self._score(queries, documents, options)
        num_documents = plan.request.num_documents
        result = await run_in_thread_if_large(num_documents, plan.result, values)
        explanations = await self._explanations(plan, values.values, range(num_documents))
        return replace(result, explanations=explanations) if explanations else result

    @_call
    async def rerank(
        self,
        query: Scorable,
        documents: Sequence[Scorable],
        *,
        top_n: int | None = None,
        score_threshold: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> RerankResult:
        """Ranks documents for a query, best first, ties in input order.

        Documents with equal scores are ranked by their scores before the activation. The result is a sequence
        of ranked documents, which notebooks show as a table."""
        if top_n is not None and top_n < 0:
            raise InvalidRequestError(f"top_n must not be negative, not {top_n}", "top_n")
        check_options("rerank", options)
        given = as_scored(documents, "documents", takes_vectors=True, takes_pictures=True)
        plan, values = await self._score(query, given, {**SCORE_DEFAULTS, **options}, top_n)
        result = await run_in_thread_if_large(len(given), plan.result, values)
        ranked = await run_in_thread_if_large(
            len(given), rank, result.scores, given, top_n, score_threshold, result.ranking_scores
        )
        explanations = await self._explanations(plan, values.values, [one.index for one in ranked])
        if explanations:
            ranked = [replace(one, explanation=explanations.get(one.index)) for one in ranked]
        return RerankResult(
            ranked, result.usage, result.truncated, result.unscored, result.errors, result.timings
        )

    def stream(self, queries: Scored, documents: Scored, **options: Unpack[ScoreOptions]) -> "ScoreStream":
        """Scores documents as `score` does, and yields them as they are ready::

            async with engine.stream(query, documents) as stream:
                async for new in stream:  # RankedDocuments, by their index
                    ...
            stream.result  # what `score` would have returned

        Leaving it early cancels the rest."""
        check_options("stream", options)
        return ScoreStream(self, queries, documents, {**SCORE_DEFAULTS, **options})

    @_call
    async def encode_query(
        self,
        query: Scorable,
        *,
        instruction: str | None = None,
        truncation: LongInputPolicy = "cut",
        priority: Priority = 0,
        tenant: str = "",
        timeout: float | None = None,
    ) -> QueryRows:
        """Encodes a query once, for many calls of `score`, `rerank` or `stream` in its place, here or in
        another process with the same model.

        Scores, usage and `truncated` are the same as for the query itself. `instruction` and the query's
        `truncation` are fixed here. Models that read query and document together raise
        InvalidRequestError."""
        running = self._require()
        loaded = running.device_model
        queries = as_query(query, loaded.model.vision is not None)
        request = ScoreRequest(
            queries=queries, documents=(), truncation=as_truncation(truncation), instruction=instruction
        )
        options = RunOptions(priority, tenant, timeout)
        plan, values = await running.run(running.processors.queries, request, options)
        return plan.result(values, loaded.dtype)

    @_call
    async def embed(
        self,
        texts: Inputs,
        *,
        input_type: InputType | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        late_chunking: bool = False,
        chunks: Sequence[tuple[int, int]] | None = None,
        encoding: Muvera | Literal["muvera"] | None = None,
        truncation: LongInputPolicy = "cut",
        priority: Priority = 0,
        tenant: str = "",
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> EmbedResult:
        """Returns one vector per text, or per chunk with `late_chunking`: float32 [texts, dim].

        With an `encoding`, token vectors of documents come from the cache."""
        given = as_inputs(texts, self.model.vision is not None)
        document = as_document(given, chunks, late_chunking)
        request = EmbedRequest(
            texts=given if document is None else document[:1],
            chunks=None if document is None else document[1],
            task="embed",
            input_type=input_type,
            prompt_name=prompt_name,
            truncation=as_truncation(truncation),
        )
        options = RunOptions(priority, tenant, timeout, progress)
        model = self.model
        if encoding is not None:
            others = {"dimensions": dimensions is not None, "late_chunking": late_chunking}
            muvera = as_muvera(encoding)
            check_encoding(muvera, model, input_type, others)
            return await self._encoded(request, muvera, options)
        plan, values = await self._embed(request, dimensions, options)
        return await run_in_thread_if_large(values.work, plan.vectors, values, dimensions)

    async def _encoded(self, request: EmbedRequest, muvera: Muvera, options: RunOptions) -> EmbedResult:
        """Encodes each text's token vectors as one vector."""
        assert request.input_type is not None
        dim, num_texts = self.model.tasks["token_embed"].dim, request.num_texts
        price = encoding_price(muvera, dim, request.input_type, num_texts)
        of_tokens = replace(request, task="token_embed", takes_cached=True, more_tokens=price)
        is_query, cache = request.input_type == "query", self.device_model.cache
        started = asyncio.get_running_loop().time()
        plan, values = await self._embed(of_tokens, None, options)
        encode = partial(plan.encoded, values, muvera, is_query, cache)
        try:
            async with asyncio.timeout_at(None if options.timeout is None else started + options.timeout):
                return await self._in_any_thread(encode, num_texts * muvera.whole_length(dim))
        except TimeoutError:
            assert options.timeout is not None
            raise RequestTimeoutError.after(options.timeout) from None

    @_call
    async def embed_tokens(
        self,
        texts: Inputs,
        *,
        input_type: InputType | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        max_tokens: int | None = None,
        return_tokens: bool = True,
        truncation: LongInputPolicy = "cut",
        priority: Priority = 0,
        tenant: str = "",
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> TokenEmbedResult:
        """Returns one vector per token, as late interaction scores them: a list of float32 [tokens, dim], and
        the tokens' strings."""
        request = EmbedRequest(
            texts=as_inputs(texts, self.model.vision is not None),
            task="token_embed",
            input_type=input_type,
            prompt_name=prompt_name,
            truncation=as_truncation(truncation),
            max_tokens=max_tokens,
        )
        options = RunOptions(priority, tenant, timeout, progress)
        tokenizer = self.tokenizer if return_tokens else None
        plan, values = await self._embed(request, dimensions, options)
        return await run_in_thread_if_large(values.work, plan.token_vectors, values, dimensions, tokenizer)

    @_call
    async def tokenize(
        self, texts: str | Sequence[str], *, add_special_tokens: bool = True
    ) -> list[TokenizedText]:
        """Splits texts into the model's tokens, all of them, without a prompt and without running the model.

        Raises InvalidRequestError if there is no text, or one that is not Unicode."""
        given, tokenizer, most = as_texts(texts, "texts"), self.tokenizer, self.max_tokens
        before, after = (part.tolist() for part in tokenizer.single.ids)
        if not add_special_tokens:
            most -= len(before) + len(after)
            before, after = [], []

        def tokenized(index: int) -> TokenizedText:
            ids = [*before]
            for _, encoding in tokenizer.read(given[index], "texts", name=f"texts[{index}]"):
                ids += encoding.ids
            ids += after
            return TokenizedText(np.array(ids, dtype=np.int32), tokenizer.strings(ids), len(ids) > most)

        return await self.in_thread(lambda: [*map(tokenized, range(len(given)))], sum(map(len, given)))

    @_call
    async def embed_sparse(
        self,
        texts: Inputs,
        *,
        input_type: InputType | None = None,
        prompt_name: str | None = None,
        truncation: LongInputPolicy = "cut",
        priority: Priority = 0,
        tenant: str = "",
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> SparseEmbedResult:
        """Returns one sparse vector per text: weights of words by token id. Models without them raise
        InvalidRequestError."""
        request = EmbedRequest(
            texts=as_inputs(texts, self.model.vision is not None),
            task="sparse_embed",
            input_type=input_type,
            prompt_name=prompt_name,
            truncation=as_truncation(truncation),
        )
        options = RunOptions(priority, tenant, timeout, progress)
        plan, values = await self._embed(request, None, options)
        return await run_in_thread_if_large(values.work, plan.sparse_vectors, values)

    @_call
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
        """Returns a classifier's probabilities of each label: float32 [texts, labels]. With `text_pairs` it
        classifies pairs."""
        model = self.model
        check_task("classify", model.tasks)
        options = RunOptions(priority, tenant, timeout, progress)
        long_inputs = as_truncation(truncation)
        running = self._require()
        if text_pairs is None:
            inputs = as_inputs(texts, takes_pictures=False)
            request = EmbedRequest(texts=inputs, task="classify", truncation=long_inputs)
            self.metrics.request_documents.observe(len(inputs))
            of_texts, values = await running.run(running.processors.embedding, request, options)
            plan: Plan = of_texts
        else:
            pairs = ScoreRequest(
                queries=as_texts(cast("Sequence[str]", texts), "queries"),
                documents=as_texts(text_pairs, "documents"),
                # The rows of a pair's windows have no one score to be joined by.
                truncation=replace(long_inputs, windows=False),
                cache="bypass",
            )
            check_paired(pairs.queries, pairs.documents)
            self.metrics.request_documents.observe(len(pairs.documents))
            of_pairs, values = await running.run(running.processors.scores, pairs, options)
            plan = of_pairs
        return await run_in_thread_if_large(values.work, classified, plan, values, model, use_activation)

    @_call
    async def label_scores(
        self,
        query: str | Sequence[int],
        documents: str | Sequence[str] | Sequence[Sequence[int]],
        labels: Sequence[int | str],
        *,
        apply_softmax: bool = False,
        document_first: bool = False,
        tokenize_apart: bool = False,
        add_special_tokens: bool = True,
        priority: Priority = 0,
        tenant: str = "",
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> LabelScores:
        """Returns the probability of each label as the next token behind each prompt, which is the query and
        a document: float32 [documents, labels]. For language models (`score_type="language-model"`).

        Texts are tokenized as one, as SGLang does, or apart, as vLLM does. Token ids are taken as they are.
        Prompts are never truncated."""
        running = self._require()
        processor = running.processors.labels
        prompts = as_prompts(query, documents)
        request = LabelRequest(*prompts, document_first, tokenize_apart, add_special_tokens)
        found = processor.label_ids(tuple(labels))
        self.metrics.request_documents.observe(len(request.documents))
        options = RunOptions(priority, tenant, timeout, progress)
        plan, values = await running.run(processor, request, options)
        work = values.work * (1 + len(found) // 16)
        return await run_in_thread_if_large(work, plan.scores, values, found, apply_softmax)

    @_call
    async def token_classify(
        self,
        texts: str | Sequence[str],
        *,
        aggregation_strategy: AggregationStrategy = "none",
        ignore_labels: Sequence[str] = ("O",),
        stride: int | None = None,
        return_logits: bool = False,
        max_tokens: int | None = None,
        truncation: LongInputPolicy = "cut",
        priority: Priority = 0,
        tenant: str = "",
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> TokenClassifyResult:
        """Returns a token classifier's entities, such as names, for each text, as transformers'
        `TokenClassificationPipeline` gives them."""
        check_task(TOKEN_CLASSIFY, self.model.tasks)
        check_strategy(aggregation_strategy, stride, return_logits)
        request = EmbedRequest(
            texts=as_texts(texts, "input"),
            task="token_classify",
            truncation=as_truncation(truncation),
            max_tokens=max_tokens,
            stride=stride,
        )
        ignored = as_labels(ignore_labels)
        running = self._require()
        self.metrics.request_documents.observe(request.num_texts)
        options = RunOptions(priority, tenant, timeout, progress)
        plan, values = await running.run(running.processors.token_classification, request, options)
        make = partial(plan.result, values, aggregation_strategy, ignored)
        if return_logits:
            make = partial(plan.logits, values)
        return await self._in_any_thread(make, request.size)

    @property
    def score_processor(self) -> ScoreProcessor:
        """The processor of score requests to the loaded model."""
        return self._require().processors.scores

    async def _score(
        self,
        queries: Scored,
        documents: Scored,
        options: ScoreOptions,
        top_n: int | None = None,
        arrived: ValuesArrived[ScorePlan] | None = None,
    ) -> tuple[ScorePlan, Values]:
        """Runs a score request; at most `top_n` of its documents will be explained. `arrived` is called with
        the values so far, if the model scores documents one by one."""
        running = self._require()
        processor = running.processors.scores
        request = processor.read(queries, documents, options, top_n)
        if self.config.cache_by_tenant or request.has_digests:
            request = replace(request, cache_owner=options["tenant"])
        self.metrics.request_documents.observe(request.num_documents)
        run_options = RunOptions(
            options["priority"],
            options["tenant"],
            options["timeout"],
            options["progress"],
            options["on_timeout"],
            options["on_error"],
        )
        if isinstance(processor, LanguageModelProcessor):
            return await self._ranked(processor, request, run_options)
        if processor.scores_together:
            arrived = None
        num_named = request.num_digests
        try:
            found = await running.run(processor, request, run_options, arrived)
            self.metrics.documents_by_digest.labels("known").inc(num_named)
            return found
        except UnknownDocumentsError as error:
            self.metrics.documents_by_digest.labels("unknown").inc(len(error.digests))
            raise
        except RequestTimeoutError:
            if run_options.on_timeout == "error":
                raise
            return UnscoredPlan.of(request), Values([], {})

    async def _ranked(
        self, processor: LanguageModelProcessor, request: ScoreRequest, options: RunOptions
    ) -> tuple[ScorePlan, Values]:
        """Ranks documents by a language model's prompts, in rounds."""
        running, clock = self._require(), asyncio.get_running_loop().time
        started = clock()
        prompts = await running.read(partial(processor.ranking_prompts, request), request, options)
        ranking = prompts.ranking(self.config.rank_by, self.config.max_request_tokens)
        num_rounds = prompts.num_rounds(self.config.rank_by)
        # With one round its values are those of the call.
        of_rounds = options if num_rounds == 1 else replace(options, progress=None)
        used, timings, chosen = Usage(0), Timings(), None
        for rounds in count():
            if rounds and num_rounds > 1 and options.progress is not None:
                options.progress(rounds, num_rounds)
            try:
                shown = ranking.send(cast("Chosen", chosen))
            except StopIteration as end:
                plan = RankedPlan(
                    sequences=[],
                    num_values=0,
                    truncated=prompts.truncated,
                    request=request,
                    ranked=end.value,
                    used=used,
                )
                return plan, Values([], {}, timings)
            left = None if options.timeout is None else options.timeout - (clock() - started)
            if left is not None and left <= 0:
                assert options.timeout is not None
                raise RequestTimeoutError.after(options.timeout)
            asked = await running.in_pool(partial(prompts.request_of, shown), len(shown))
            of_round, values = await running.run(processor.labels, asked, replace(of_rounds, timeout=left))
            letters = prompts.form.letters[: len(shown[0])]
            found = await run_in_thread_if_large(values.work, of_round.scores, values, letters, True)
            chosen, used, timings = found.scores, used + found.usage, timings + found.timings
        raise AssertionError("a ranking ends with scores")

    async def _embed(
        self, request: EmbedRequest, dimensions: int | None, options: RunOptions
    ) -> tuple[EmbeddingPlan, Values]:
        """Runs a request for embeddings with `dimensions` columns."""
        running = self._require()
        if self.config.cache_by_tenant:
            request = replace(request, cache_owner=options.tenant)
        tasks = running.device_model.model.tasks
        check_task(request.task, tasks)
        check_dimensions(dimensions, tasks[request.task].dim)
        self.metrics.request_documents.observe(len(request.texts))
        return await running.run(running.processors.embedding, request, options)

    async def _explanations(
        self, plan: ScorePlan, values: list[Value | None], documents: Sequence[int]
    ) -> Mapping[int, Explanation]:
        """Explains the scores of documents, if the request asks for it."""
        if not plan.request.explain:
            return {}
        explain = partial(plan.explanations, values, documents)
        return await self._in_any_thread(explain, plan.explanation_size(documents))

    async def _in_any_thread(self, function: Callable[[], T], size: int) -> T:
        """Runs work as `in_thread` does, also if the engine has stopped meanwhile."""
        try:
            return await self.in_thread(function, size)
        except (EngineNotReadyError, EngineDeadError):
            return await asyncio.to_thread(function)

    def _open_call(self) -> AbstractContextManager[None]:
        """Counts a call until it has its answer."""
        return nullcontext() if self._running is None else self._running.open_call()

    async def _start(self) -> None:
        await free_dead(self._pop_running())
        self._running = await self._launch()
        if self.death is not None:
            self.death, self.restart_obstacle, self._dead = None, None, asyncio.Event()
            self.metrics.restarts.inc()

    async def _launch(self) -> Running:
        return await launch(self.config, self.metrics, self._died, self._tenants)

    def _pop_running(self) -> Running | None:
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


class DocumentStream(ABC):
    """The documents of one request as they are scored. Each iteration yields the new ones, by index.

    Use it as an async context manager; leaving it early cancels the rest. After the iteration `result` is
    what `Engine.score` would have returned. The iteration raises errors."""

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._given: set[int] = set()
        self._looked = -math.inf
        self._task: asyncio.Task[ScoreResult] | None = None
        self._result: ScoreResult | None = None

    @property
    def result(self) -> ScoreResult:
        """All scores. Raises RuntimeError while documents may still come."""
        if self._result is None:
            raise RuntimeError("the result is there when the iteration has ended")
        return self._result

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._score_all(), name="maxsimd-stream")
        self._task.add_done_callback(self._ended)
        return self

    def _ended(self, task: "asyncio.Task[ScoreResult]") -> None:
        self._news.set()
        if not task.cancelled():
            task.exception()  # marks it as retrieved: perhaps nobody iterates any more

    async def __aexit__(self, *error: object) -> None:
        assert self._task is not None
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})  # raises nothing of it, but the caller's own cancellation

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[RankedDocument]:
        if self._task is None:
            raise RuntimeError("use it as in: async with engine.stream(...) as stream")
        while self._result is None:
            await self._news.wait()
            rest = self._looked + _SECONDS_BETWEEN_LOOKS - time.monotonic()
            if rest > 0 and not self._task.done():
                await asyncio.wait({self._task}, timeout=rest)
            self._news.clear()
            self._looked = time.monotonic()
            try:
                result = self._task.result() if self._task.done() else None
                documents = await self._new_documents()
            except BaseException:
                self._news.set()  # the next iteration raises it too, or yields what this would have
                raise
            self._result = result
            if documents:
                return documents
        raise StopAsyncIteration

    @abstractmethod
    async def _score_all(self) -> ScoreResult:
        """Scores all documents, and sets `_news` when some are there."""

    @abstractmethod
    async def _new_documents(self) -> list[RankedDocument]:
        """The documents that were not given yet."""


class ScoreStream(DocumentStream):
    __doc__ = DocumentStream.__doc__

    def __init__(self, engine: Engine, queries: Scored, documents: Scored, options: ScoreOptions) -> None:
        super().__init__()
        self._engine = engine
        self._request = queries, documents, options
        self._documents: Sequence[Item] = ()
        self._latest: tuple[ScorePlan, list[Value | None]] | None = None

    async def _score_all(self) -> ScoreResult:
        queries, documents, options = self._request
        self._documents = as_scored(documents, "documents", takes_vectors=True, takes_pictures=True)
        with self._engine._open_call():
            plan, values = await self._engine._score(queries, self._documents, options, arrived=self._arrived)
            self._latest = plan, values.values
            return await run_in_thread_if_large(_num_values(plan, values.values), plan.result, values)

    def _arrived(self, plan: ScorePlan, values: list[Value | None]) -> None:
        self._latest = plan, values
        self._news.set()

    async def _new_documents(self) -> list[RankedDocument]:
        if self._latest is None:
            return []
        is_last = self._task is not None and self._task.done()
        plan, values = self._latest
        values = values.copy()  # more may arrive while a thread reads them
        scores = await run_in_thread_if_large(_num_values(plan, values), plan.scores, values)
        new = [i for i, score in enumerate(scores) if not math.isnan(score) and i not in self._given]
        explanations = await self._engine._explanations(plan, values, new)
        given = self._documents or plan.request.documents
        documents = await run_in_thread_if_large(
            len(new), lambda: [RankedDocument(i, scores[i], given[i], explanations.get(i)) for i in new]
        )
        self._given.update(new)
        if is_last:
            self._latest = None  # it holds all that was prepared
        return documents


def _num_values(plan: ScorePlan, values: Sequence[Value | None]) -> int:
    """The work of making scores from values, counted in values."""
    return max(plan.request.num_documents, len(values))


_OPTIONS_OF_SCORE = [
    each for each in inspect.signature(Engine.score).parameters.values() if each.kind is each.KEYWORD_ONLY
]
# The defaults of `rerank` and `stream` for the options of `score`.
SCORE_DEFAULTS = cast("ScoreOptions", {each.name: each.default for each in _OPTIONS_OF_SCORE})
for _method in (Engine.rerank, Engine.stream):  # `help` lists the options
    _own = inspect.signature(_method)
    _named = [each for each in _own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    setattr(_method, "__signature__", _own.replace(parameters=[*_named, *_OPTIONS_OF_SCORE]))  # noqa: B010
for _name, _method in vars(Engine).items():
    if inspect.isfunction(_method) and not _name.startswith("_"):
        complete_docstring(_method)


def _as_config(config: EngineConfig | str | None, options: Mapping[str, Any]) -> EngineConfig:
    """A configuration, from one or from a model's name and options. Raises TypeError for anything else, and
    ValueError for options that make no sense."""
    if isinstance(config, str):
        return EngineConfig(model=config, **options)
    if config is None:
        return EngineConfig(**options)
    if not isinstance(config, EngineConfig):
        raise TypeError(f"give an EngineConfig, or a model's folder or hub id, not {type(config).__name__}")
    if options:
        raise TypeError(f"put {' and '.join(options)} into the EngineConfig")
    return config
