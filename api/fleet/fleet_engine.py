"""The engine that handlers have where engines are other processes: the same methods, spread."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any, TypeVar, Unpack, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from maxsimd.api.answer import ApiError
from maxsimd.api.config import SetupError
from maxsimd.api.fleet import messages as wire
from maxsimd.api.fleet.link import Address, Door, Link, LostError, Send
from maxsimd.api.fleet.roster import Connected, Listed, ReplacedError, Roster, Served
from maxsimd.api.fleet.spread import (
    EmbedJob,
    Job,
    ScoreJob,
    Spreader,
    num_characters,
    run_of,
)
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.facts import ModelFacts
from maxsimd.engine.engine import SCORE_DEFAULTS, DocumentStream
from maxsimd.engine.errors import EngineNotReadyError, InvalidRequestError
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.metrics import EngineStats
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.requests import (
    ClassifyResult,
    EmbedResult,
    Item,
    RankedDocument,
    RerankResult,
    ScoreOptions,
    ScoreResult,
    SparseEmbedResult,
    TokenEmbedResult,
    Usage,
    as_inputs,
    as_scored,
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
        scored = ScoreJob(self._engine.facts, *self._request)
        self._documents = scored.documents
        try:
            await self._engine._run(scored.job(self._arrived), scored.most_tokens)
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
# Seconds for answers to a question to all engines; late ones are left out.
_ENGINE_SECONDS = 5.0


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

    async def ask_all(self, question: wire.Question) -> list[tuple[int, wire.Answer]]:
        """Answers by slot; engines that die or hang are left out."""

        async def ask(each: Connected) -> list[tuple[int, wire.Answer]]:
            with suppress(LostError, TimeoutError):
                reply = await asyncio.wait_for(each.link.ask(question), _ENGINE_SECONDS)
                if isinstance(reply.answer, wire.Failed):
                    raise wire.as_error(reply.answer)
                return [(each.member.slot, reply.answer)]
            return []

        return [*chain(*await asyncio.gather(*map(ask, self._roster.all_connected())))]

    async def conversation(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool, continue_final_message: bool
    ) -> tuple[str, bool]:
        flags = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        answer = cast("wire.Conversation", await self._whole(wire.Converse(messages=list(messages), **flags)))
        return answer.text, answer.is_complete

    async def score(self, queries: Any, documents: Any, **options: Unpack[ScoreOptions]) -> ScoreResult:
        complete: ScoreOptions = {**SCORE_DEFAULTS, **options}

        async def scored_by_one_kind(left: float | None) -> ScoreResult:
            scored = ScoreJob(self.facts, queries, documents, {**complete, "timeout": left})
            await self._run(scored.job(), scored.most_tokens)
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
        scored = ScoreJob(self.facts, query, documents, options)
        none = ScoreResult([], Usage(0), 0, tuple(range(len(scored.documents))))
        answers: list[wire.Answer] = [wire.Ranked(none, [])]

        def question(indices: NDArray[np.int64], left: float | None) -> wire.Question:
            return wire.Rank(score=scored.question(indices, left), top_n=top_n, score_threshold=threshold)

        job = replace(scored.job(), question=question, commit=lambda _, answer: answers.append(answer))
        await self._run_whole(job)
        ranked = cast("wire.Ranked", answers[-1])
        result = ranked.result
        documents = [
            RankedDocument(i, score, scored.documents[i], result.explanations.get(i))
            for i, score in zip(ranked.indices, result.scores, strict=True)
        ]
        return _reranked(documents, result)

    def stream(self, queries: Any, documents: Any, **options: Unpack[ScoreOptions]) -> FleetStream:
        return FleetStream(self, queries, documents, {**SCORE_DEFAULTS, **options})

    async def embed(self, texts: Any, **options: Any) -> EmbedResult:
        check_task("embed" if options.get("encoding") is None else "token_embed", self.facts.dims)
        if options.get("late_chunking") or options.get("chunks") is not None:
            # All texts are one document, which one engine reads.
            return cast("wire.Embedded", await self._embed_whole("embed", texts, options)).result
        given = as_inputs(texts, self.facts.reads_pictures)

        async def embedded_by_one_kind(left: float | None) -> EmbedResult:
            embedding = EmbedJob(given, {**options, "timeout": left})
            await self._run(embedding.job(), embedding.most_tokens)
            return await run_in_thread_if_large(len(embedding.texts), embedding.result)

        return await _until_not_replaced(embedded_by_one_kind, options.get("timeout"))

    async def embed_tokens(self, texts: Any, **options: Any) -> TokenEmbedResult:
        return cast("wire.EmbeddedTokens", await self._embed_whole("token_embed", texts, options)).result

    async def embed_sparse(self, texts: Any, **options: Any) -> SparseEmbedResult:
        return cast("wire.EmbeddedSparse", await self._embed_whole("sparse_embed", texts, options)).result

    async def _embed_whole(self, task: wire.EmbedTask, texts: Any, options: dict[str, Any]) -> wire.Answer:
        check_task(task, self.facts.dims)
        embedding = EmbedJob(as_inputs(texts, self.facts.reads_pictures), options)
        return await self._whole(embedding.question_of_all(task), options.get("timeout"))

    async def classify(
        self,
        texts: Any,
        *,
        text_pairs: Sequence[str] | None = None,
        use_activation: bool = True,
        **options: Any,
    ) -> ClassifyResult:
        check_task("classify", self.facts.dims)
        question = wire.Classify(
            texts=wire.sent_inputs(as_inputs(texts, takes_pictures=False)),
            text_pairs=None if text_pairs is None else list(text_pairs),
            run=run_of(options, options.get("timeout")),
            use_activation=use_activation,
        )
        return cast("wire.Classified", await self._whole(question, options.get("timeout"))).result

    async def _run(self, job: Job, most_tokens: int) -> None:
        """Spreads a request. One that may be too large goes to one engine whole, which refuses it."""
        if most_tokens > self.config.max_request_tokens:
            job = replace(job, split=Split.NEVER)
        # A request of at most one step is not split.
        await self._spreader.run(job, self.facts.step_tokens)

    async def _whole(
        self, question: wire.Converse | wire.Classify | wire.Embed, timeout: float | None = None
    ) -> wire.Answer:
        """One engine's answer."""
        answers: list[wire.Answer] = []

        def asked(indices: NDArray[np.int64], left: float | None) -> wire.Question:
            if isinstance(question, wire.Converse):
                return question
            return msgspec.structs.replace(question, run=msgspec.structs.replace(question.run, timeout=left))

        size = num_characters(question)
        await self._run_whole(Job.of_one(size, timeout, asked, lambda _, answer: answers.append(answer)))
        return answers[0]

    async def _run_whole(self, job: Job) -> None:
        async def run(left: float | None) -> None:
            await self._spreader.run(replace(job, timeout=left), self.facts.step_tokens)

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


_NAME = re.compile(r"[\w:]+")


def joined(pages: Iterable[tuple[str, int, bytes]]) -> bytes:
    """Joins pages in Prometheus's text format, each with a label and its value (`replica`, 0). Every family
    is described once."""
    described: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for label, value, page in pages:
        known, family, own = {*described}, "", f'{label}="{value}"'
        for line in page.decode().split("\n"):
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                if family not in known:
                    described.setdefault(family, []).append(line)
            elif found := _NAME.match(line):
                name, rest = found[0], line[found.end() :]
                sample = f"{name}{{{own},{rest[1:]}" if rest[0] == "{" else f"{name}{{{own}}}{rest}"
                samples.setdefault(family, []).append(sample)
    lines = [line for name in described for line in (*described[name], *samples.get(name, ()))]
    return ("\n".join(lines) + "\n").encode()


# Seconds for another front's answer; a late one is left out.
_FRONT_SECONDS = 2.0


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

    async def metrics(self, own: bytes) -> bytes:
        """The page of all fronts and engines; `own` is this front's."""
        others = self._others()
        asked = asyncio.gather(*(self._page_of(address) for address in others.values()))
        engines = await self._engine.ask_all(wire.ShowMetrics())
        pages = [("front", self._slot(), own)]
        pages += [("front", slot, page) for slot, page in zip(others, await asked, strict=True) if page]
        pages += [
            ("replica", slot, answer.page) for slot, answer in engines if isinstance(answer, wire.Metrics)
        ]
        return joined(sorted(pages, key=lambda page: page[:2]))

    async def _page_of(self, address: Address) -> bytes:
        """Another front's page; empty if it does not answer."""
        with suppress(LostError, TimeoutError):
            async with asyncio.timeout(_FRONT_SECONDS):
                link = await Link.open(address)
                try:
                    answer = (await link.ask(wire.ShowMetrics())).answer
                finally:
                    await link.close()
                if isinstance(answer, wire.Metrics):
                    return answer.page
        return b""

    async def _answer(self, question: wire.Question, send: Send) -> wire.Answer:
        if isinstance(question, wire.ShowMetrics):
            return wire.Metrics(generate_latest(self._engine.metrics.registry))
        return wire.Failed(kind="invalid", message="a front is asked for its metrics and nothing else")
