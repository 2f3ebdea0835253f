"""The engine that handlers have where engines are other processes: the same methods, spread."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar, Unpack, cast

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from maxsimd.api.answer import ApiError
from maxsimd.api.config import SetupError
from maxsimd.api.fleet import messages as wire
from maxsimd.api.fleet.link import Address, Door, Link, LostError, Send
from maxsimd.api.fleet.roster import Listed, ReplacedError, Roster, Served
from maxsimd.api.fleet.spread import (
    AddJob,
    EmbedJob,
    Job,
    RankJob,
    ScoreJob,
    Spreader,
    WholeJob,
    run_of,
    size_of,
)
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.facts import ModelFacts
from maxsimd.engine.engine import SCORE_DEFAULTS, DocumentStream
from maxsimd.engine.errors import EngineNotReadyError, InvalidRequestError, RequestTooLargeError
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.metrics import EngineStats, MergedMetrics
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.requests import (
    AddedDocuments,
    AggregationStrategy,
    ClassifyResult,
    EmbedResult,
    Item,
    LabelScores,
    RankedDocument,
    RerankResult,
    ScoreOptions,
    ScoreResult,
    SparseEmbedResult,
    TokenClassifyResult,
    TokenEmbedResult,
    as_inputs,
    as_labels,
    as_prompts,
    as_scored,
    as_texts,
    as_truncation,
    check_strategy,
    check_task,
    rank,
)
from maxsimd.engine.tenants import Tenant
from maxsimd.engine.workers import WorkerPool, run_in_thread_if_large
from maxsimd.scheduler.fleet import Split

log = logging.getLogger("maxsimd.fleet")

_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_queued_tokens", "max_request_tokens")


def check_limits(tenants: Mapping[str, Tenant], replicas: int) -> None:
    """Raises SetupError for limits that would not hold with several replicas."""
    limited = [
        name for name, tenant in tenants.items() if any(getattr(tenant, each) is not None for each in _LIMITS)
    ]
    if replicas > 1 and limited:
        raise SetupError(
            f"the tenant {limited[0]!r} has limits ({', '.join(_LIMITS)}), which hold for one replica only; "
            "leave them out of --api-key-file, or serve with --replicas 1"
        )


class FleetStream(DocumentStream):
    """A stream over engines. A document that is scored again, because an engine died, is given once."""

    def __init__(self, engine: "FleetEngine", queries: Any, documents: Any, options: ScoreOptions) -> None:
        super().__init__()
        self._engine = engine
        self._request = queries, documents, options
        self._new: list[RankedDocument] = []
        self._documents: Sequence[Item] = ()

    async def _score_all(self) -> ScoreResult:
        scored = ScoreJob(self._engine.facts, *self._request, self._arrived)
        self._documents = scored.documents
        try:
            await self._engine._run(scored)
        except ReplacedError:  # what has been given cannot be taken back
            raise EngineNotReadyError("another model has taken over; ask again") from None
        result = await run_in_thread_if_large(len(scored.documents), scored.result)
        without = {*result.unscored, *result.errors}
        rest = [i for i in range(len(result.scores)) if i not in without]
        self._arrived(rest, [result.scores[i] for i in rest], result.explanations)
        return result

    async def _new_documents(self) -> list[RankedDocument]:
        new, self._new = self._new, []
        return new

    def _arrived(self, indices: list[int], scores: list[float], why: Mapping[int, Explanation]) -> None:
        for index, score in zip(indices, scores, strict=True):
            if index not in self._given:
                self._given.add(index)
                self._new.append(RankedDocument(index, score, self._documents[index], why.get(index)))
        self._news.set()


T = TypeVar("T")
# Threads for large bodies and answers.
_THREADS = 2
# Characters that are hashed in the time of one item of an answer.
_HASHED_PER_ITEM = 1_000


class FleetEngine:
    """Has `Engine`'s methods and raises its errors, but asks the engines on the roster. While there is none,
    requests without a timeout wait for `patience` seconds. For one event loop."""

    def __init__(
        self,
        roster: Roster,
        patience: float = 30.0,
        spreader: Spreader | None = None,
        caches_by_tenant: bool = False,
    ) -> None:
        self._roster = roster
        self.caches_by_tenant = caches_by_tenant
        self._spreader = Spreader(roster, patience) if spreader is None else spreader
        self._pool = WorkerPool(_THREADS)
        self._tenants: Mapping[str, Tenant] = {}
        self.metrics = SimpleNamespace(registry=CollectorRegistry())
        Gauge(
            "maxsimd_replicas_silent",
            "Replicas that did not answer in time and get no work until they do",
            registry=self.metrics.registry,
        ).set_function(lambda: roster.num_silent)
        self.death: str | None = None
        self.restart_obstacle: str | None = None

    async def start(self) -> None:
        """Returns once an engine is there."""
        self._roster.start()
        await self._roster.until_another(set())

    async def stop(self, grace: float | None = None) -> None:
        """Closes connections; engines go on."""
        await self._roster.close()
        self._pool.close(0)

    async def until_dead(self) -> None:
        """Never returns: dead engines are restarted."""
        await asyncio.Event().wait()

    @property
    def is_healthy(self) -> bool:
        return bool(self._roster.members)

    @property
    def size(self) -> tuple[int, int]:
        """Engines that are there, and engines that should be."""
        return len(self._roster.members), self._roster.num_listed

    @property
    def facts(self) -> ModelFacts:
        return self._served.facts

    @property
    def config(self) -> EngineConfig:
        return self._served.config

    @property
    def tokenizer(self) -> TextTokenizer:
        return self._served.tokenizer

    @property
    def max_tokens(self) -> int:
        return self.facts.max_tokens

    @property
    def _served(self) -> Served:
        if self._roster.served is None:
            raise EngineNotReadyError("no engine is there yet")
        return self._roster.served

    def stats(self) -> EngineStats:
        """Tokens that this front has sent and waits for."""
        waiting = int(self._spreader.loads.of(self._roster.members).sum())
        return EngineStats(waiting_tokens=waiting)

    def set_tenants(self, tenants: Mapping[str, Tenant]) -> None:
        """Weights and priorities hold at every engine, limits only at a single one: those of a changed key
        file are dropped and logged."""
        self._tenants = tenants
        try:
            check_limits(tenants, self._num_engines)
        except SetupError as error:
            log.error("%s; until then there are none", error)
            tenants = {
                name: Tenant(weight=each.weight, priority=each.priority) for name, each in tenants.items()
            }
        self._roster.set_tenants(dict(tenants))

    def set_listed(self, listed: Sequence[Listed]) -> None:
        """Changes the engines that should be there."""
        were_several = self._num_engines > 1
        self._roster.set_listed(listed)
        if (self._num_engines > 1) != were_several:
            self.set_tenants(self._tenants)

    @property
    def _num_engines(self) -> int:
        """Upper bound."""
        return max(self._roster.most, self._roster.num_listed)

    def check_rate(self, tenant: str) -> None:
        """Engines check rates themselves."""

    async def in_thread(self, function: Callable[[], T], size: int) -> T:
        work = self._pool.submit(function, size)
        try:
            return await asyncio.wrap_future(work.future)
        except asyncio.CancelledError:
            work.withdraw()
            raise
        finally:
            del work  # it holds the error, which holds this frame

    async def clear_cache(self) -> None:
        """Clears every engine's cache. Raises ApiError if some are late."""
        late = ", ".join(f"replica {slot}" for slot in await self._roster.clear_caches())
        if late:
            message = f"the cache is not cleared yet by {late}; ask again"
            raise ApiError(503, message, retry_after=5)

    @property
    def links(self) -> dict[int, Link]:
        """Connections to engines by slot."""
        return self._roster.links

    async def conversation(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool, continue_final_message: bool
    ) -> tuple[str, bool]:
        question = wire.Converse(
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        job = WholeJob(sum(len(each["content"]) for each in messages), None, lambda left: question)
        await self._run_whole(job)
        answer = cast("wire.Conversation", job.answer)
        return answer.text, answer.is_complete

    async def score(self, queries: Any, documents: Any, **options: Unpack[ScoreOptions]) -> ScoreResult:
        complete: ScoreOptions = {**SCORE_DEFAULTS, **options}

        async def scored_by_one_kind(left: float | None) -> ScoreResult:
            scored = ScoreJob(self.facts, queries, documents, {**complete, "timeout": left})
            await self._run(scored)
            return await run_in_thread_if_large(len(scored.documents), scored.result)

        return await _until_not_replaced(scored_by_one_kind, complete["timeout"])

    async def rerank(
        self,
        query: Any,
        documents: Any,
        *,
        top_n: int | None = None,
        score_threshold: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> RerankResult:
        if top_n is not None and top_n < 0:
            raise InvalidRequestError(f"top_n must not be negative, not {top_n}", "top_n")
        complete: ScoreOptions = {**SCORE_DEFAULTS, **options}
        if complete["explain"]:
            return await self._explained(query, documents, top_n, score_threshold, complete)
        given = as_scored(documents, "documents", takes_vectors=True, takes_pictures=True)
        result = await self.score(query, given, **complete)
        ranked = await run_in_thread_if_large(
            len(given), rank, result.scores, given, top_n, score_threshold, result.ranking_scores
        )
        return _reranked(ranked, result)

    async def _explained(
        self, query: Any, documents: Any, top_n: int | None, threshold: float | None, options: ScoreOptions
    ) -> RerankResult:
        """One engine ranks and explains only what it returns."""
        job = RankJob(self.facts, query, documents, options, top_n, threshold)
        await self._run_whole(job)
        ranked = job.answer
        result = ranked.result
        documents = [
            RankedDocument(i, score, job.documents[i], result.explanations.get(i))
            for i, score in zip(ranked.indices, result.scores, strict=True)
        ]
        return _reranked(documents, result)

    def stream(self, queries: Any, documents: Any, **options: Unpack[ScoreOptions]) -> FleetStream:
        return FleetStream(self, queries, documents, {**SCORE_DEFAULTS, **options})

    async def add_documents(self, documents: Any, **options: Any) -> AddedDocuments:
        texts = as_texts(documents, "documents")

        windows = as_truncation(options.get("truncation", "cut")).windows
        if self._num_engines > 1 and (windows or self.facts.score_type.scores_together):
            raise InvalidRequestError(
                "with several replicas, documents are not kept for listwise models or in windows: no replica "
                "has all of them; truncate them, or give texts with each request",
                "documents",
            )

        async def added_by_one_kind(left: float | None) -> AddedDocuments:
            make = partial(AddJob, self.facts, texts, {**options, "timeout": left})
            adding = await run_in_thread_if_large(sum(map(len, texts)) // _HASHED_PER_ITEM, make)
            await self._run(adding)
            return adding.result()

        return await _until_not_replaced(added_by_one_kind, options.get("timeout"))

    async def embed(self, texts: Any, **options: Any) -> EmbedResult:
        check_task("embed" if options.get("encoding") is None else "token_embed", self.facts.dims)
        given = as_inputs(texts, self.facts.reads_pictures)

        async def embedded_by_one_kind(left: float | None) -> EmbedResult:
            embedding = EmbedJob(given, {**options, "timeout": left})
            await self._run(embedding)
            return cast("EmbedResult", await run_in_thread_if_large(len(given), embedding.result))

        return await _until_not_replaced(embedded_by_one_kind, options.get("timeout"))

    async def embed_tokens(self, texts: Any, **options: Any) -> TokenEmbedResult:
        return cast("TokenEmbedResult", await self._embed_whole("token_embed", texts, options))

    async def embed_sparse(self, texts: Any, **options: Any) -> SparseEmbedResult:
        return cast("SparseEmbedResult", await self._embed_whole("sparse_embed", texts, options))

    async def _embed_whole(self, task: wire.EmbedTask, texts: Any, options: dict[str, Any]) -> Any:
        check_task(task, self.facts.dims)
        embedding = EmbedJob(as_inputs(texts, self.facts.reads_pictures), options, task)
        await self._run_whole(embedding)
        return embedding.result()

    async def classify(
        self,
        texts: Any,
        *,
        text_pairs: Sequence[str] | None = None,
        use_activation: bool = True,
        **options: Any,
    ) -> ClassifyResult:
        check_task("classify", self.facts.dims)
        inputs = as_inputs(texts, takes_pictures=False)
        pairs = None if text_pairs is None else list(text_pairs)

        def ask(left: float | None) -> wire.Classify:
            sent, run = wire.sent_inputs(inputs), run_of(options, left)
            return wire.Classify(texts=sent, text_pairs=pairs, run=run, use_activation=use_activation)

        job = WholeJob(sum(map(size_of, inputs)), options.get("timeout"), ask)
        await self._run_whole(job)
        return cast("wire.Classified", job.answer).result

    async def label_scores(
        self,
        query: Any,
        documents: Any,
        labels: Sequence[int | str],
        *,
        apply_softmax: bool = False,
        document_first: bool = False,
        tokenize_apart: bool = False,
        add_special_tokens: bool = True,
        **options: Any,
    ) -> LabelScores:
        check_task("label_scores", self.facts.dims)
        first, others = as_prompts(query, documents)
        prompts = (first, *others)

        def ask(left: float | None) -> wire.ScoreLabels:
            return wire.ScoreLabels(
                prompts=wire.sent_inputs(prompts),
                labels=[*labels],
                run=run_of(options, left),
                apply_softmax=apply_softmax,
                document_first=document_first,
                tokenize_apart=tokenize_apart,
                add_special_tokens=add_special_tokens,
            )

        job = WholeJob(sum(map(size_of, prompts)), options.get("timeout"), ask)
        await self._run_whole(job)
        return cast("wire.ScoredLabels", job.answer).result

    async def token_classify(
        self,
        texts: Any,
        *,
        aggregation_strategy: AggregationStrategy = "none",
        ignore_labels: Sequence[str] = ("O",),
        stride: int | None = None,
        return_logits: bool = False,
        max_tokens: int | None = None,
        **options: Any,
    ) -> TokenClassifyResult:
        check_task("token_classify", self.facts.dims)
        check_strategy(aggregation_strategy, stride, return_logits)
        given = as_texts(texts, "input")

        def ask(left: float | None) -> wire.TokenClassify:
            return wire.TokenClassify(
                texts=cast("list[str | wire.SentBroken]", wire.sent_items(given)),
                run=run_of(options, left),
                aggregation_strategy=aggregation_strategy,
                ignore_labels=sorted(as_labels(ignore_labels)),
                stride=stride,
                return_logits=return_logits,
                max_tokens=max_tokens,
            )

        job = WholeJob(sum(map(size_of, given)), options.get("timeout"), ask)
        await self._run_whole(job)
        return cast("wire.TokenClassified", job.answer).result

    async def _run(self, job: Job) -> None:
        """Spreads a request. One that may be too large goes to one engine whole, which refuses it. Raises
        InvalidRequestError for documents by digests that no engine has all of."""
        if job.has_digests and job.split is Split.NEVER and self._num_engines > 1:
            raise InvalidRequestError(
                "with several replicas, documents are named by digests only if each is scored by itself: "
                "send one query, without explain and windows, to a model that is not listwise, or give texts",
                "documents",
            )
        most = self.config.max_request_tokens
        if job.has_digests and int(job.tokens.sum()) > most:
            raise RequestTooLargeError(
                f"this request has more than {most} tokens, by estimate; send it in parts, or raise "
                "max_request_tokens"
            )
        if job.most_tokens > most and not job.has_digests:
            job.split = Split.NEVER
        # A request of at most one step is not split.
        await self._spreader.run(job, self.facts.step_tokens)

    async def _run_whole(self, job: Job) -> None:
        """Has one engine answer."""

        async def run(left: float | None) -> None:
            job.timeout = left
            await self._run(job)

        await _until_not_replaced(run, job.timeout)


def _reranked(documents: list[RankedDocument], scored: ScoreResult) -> RerankResult:
    rest = scored.usage, scored.truncated, scored.unscored, scored.errors, scored.timings
    return RerankResult(documents, *rest)


async def _until_not_replaced(work: Callable[[float | None], Awaitable[T]], timeout: float | None) -> T:
    """Runs `work` with the seconds left of a timeout; again where other engines take over meanwhile."""
    loop = asyncio.get_running_loop()
    begun, left = loop.time(), timeout
    while True:
        try:
            return await work(left)
        except ReplacedError:
            if timeout is not None:
                left = max(0.001, begun + timeout - loop.time())


# Seconds for the metrics of another front and of an engine; late ones are left out.
_FRONT_SECONDS, _ENGINE_SECONDS = 2.0, 5.0


class FrontView:
    """One front's view of the fleet: the engines, and the `others`, fronts by slot. They ask it at its
    `door`. Only fronts know the `secret`."""

    def __init__(
        self,
        engine: FleetEngine,
        slot: Callable[[], int],
        others: Callable[[], Mapping[int, Address]],
        secret: bytes,
    ) -> None:
        self._engine = engine
        self._slot = slot
        self._others = others
        self.secret = secret
        self.door = Door(self._answer, lambda: 0)

    @property
    def replicas(self) -> tuple[int, int]:
        return self._engine.size

    async def metrics(self) -> bytes:
        """The page of all fronts and engines."""
        asked = {
            ("front", slot): _metrics_in_time(_ask_front(address), _FRONT_SECONDS)
            for slot, address in self._others().items()
        }
        for slot, link in self._engine.links.items():
            asked["replica", slot] = _metrics_in_time(link.ask(wire.Command.SHOW_METRICS), _ENGINE_SECONDS)
        found = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
        found["front", self._slot()] = wire.Metrics.of(self._engine.metrics.registry)
        parts = [
            ({process: str(slot)}, metrics.collect())
            for (process, slot), metrics in sorted(found.items())
            if metrics is not None
        ]
        registry = CollectorRegistry()
        registry.register(MergedMetrics(lambda: parts))
        return await asyncio.to_thread(generate_latest, registry)

    async def _answer(self, question: wire.Question, send: Send) -> wire.Answer:
        if question is wire.Command.SHOW_METRICS:
            return wire.Metrics.of(self._engine.metrics.registry)
        return wire.Failed(kind="invalid", message="a front is asked for its metrics and nothing else")


async def _metrics_in_time(asked: Awaitable[wire.Reply], seconds: float) -> wire.Metrics | None:
    """The metrics of another process; None if it is late or gone."""
    with suppress(LostError, TimeoutError):
        answer = (await asyncio.wait_for(asked, seconds)).answer
        return answer if isinstance(answer, wire.Metrics) else None
    return None


async def _ask_front(address: Address) -> wire.Reply:
    link = await Link.open(address)
    try:
        return await link.ask(wire.Command.SHOW_METRICS)
    finally:
        await link.close()
