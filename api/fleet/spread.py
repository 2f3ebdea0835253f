"""One request over several engines: planned, sent in parts, retried where an engine dies, and merged."""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, replace
from functools import partial
from random import getrandbits
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from maxsimd.api.fleet import messages as wire
from maxsimd.api.fleet.link import LostError, NotSentError, SilentError
from maxsimd.api.fleet.roster import Roster
from maxsimd.engine.config import ScoreType
from maxsimd.engine.device.facts import ModelFacts
from maxsimd.engine.errors import (
    EngineNotReadyError,
    RequestFailedError,
    RequestTimeoutError,
    UnknownDocumentsError,
)
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.media import Content
from maxsimd.engine.requests import (
    AddedDocuments,
    DocumentDigest,
    EmbedResult,
    Item,
    ScoreOptions,
    ScoreResult,
    Timings,
    Usage,
    as_scored,
    as_truncation,
)
from maxsimd.pooling.vectors import Vectors
from maxsimd.scheduler import fleet as fleets

# An engine hangs if it has not answered this many seconds after the deadline.
_HANGS = 1.0
# Retries beyond a tenth of all parts, for those at an engine when it dies.
_SPARE_TRIES = 1_000.0


class Job(ABC):
    """A request to spread: documents, by their digests [N] and estimated tokens [N]. With `is_cached`,
    engines look for them in their caches. Together they have at most `most_tokens`, where that is known.

    Where it has several parts, another job is done `first`, by the engine that has most of it. With
    `is_partial`, what is late is left out. An error says `deadly` where engines die of it, in place of naming
    documents."""

    split = fleets.Split.NEVER
    is_cached = False
    is_partial = False
    first: "WholeJob | None" = None
    deadly: str | None = None
    most_tokens = 0
    # Whether documents are named by digests, or will be.
    has_digests = False

    def __init__(self, digests: Sequence[int], sizes: Sequence[int], timeout: float | None) -> None:
        """`sizes` are in characters."""
        self.digests: NDArray[np.uint64] = np.array(digests, dtype=np.uint64)
        self.tokens: NDArray[np.int64] = np.array(sizes, dtype=np.int64) // _CHARACTERS_A_TOKEN + 4
        self.timeout = timeout
        # Digests that engines do not know.
        self.unknown: set[str] = set()

    @abstractmethod
    def question(self, indices: NDArray[np.int64], left: float | None) -> wire.Question:
        """The question about some documents, given the seconds that are left."""

    @abstractmethod
    def commit(self, indices: NDArray[np.int64], answer: wire.Answer) -> None:
        """Takes the answer about some documents, once for each."""

    def arrived(self, indices: NDArray[np.int64], new: wire.Arrived) -> None:
        """Takes scores of some documents before the answer, if the question asks for them."""
        raise NotImplementedError


class WholeJob(Job):
    """A question of about `size` characters to one engine; `answer` is there when it is done."""

    answer: wire.Answer | None = None

    def __init__(
        self,
        size: int,
        timeout: float | None,
        ask: Callable[[float | None], wire.Question],
        deadly: str | None = None,
        is_partial: bool = False,
    ) -> None:
        super().__init__([0], [size], timeout)
        self._ask, self.deadly, self.is_partial = ask, deadly, is_partial

    def question(self, indices: NDArray[np.int64], left: float | None) -> wire.Question:
        return self._ask(left)

    def commit(self, indices: NDArray[np.int64], answer: wire.Answer) -> None:
        self.answer = answer


class Spreader:
    """Spreads one front's requests. Without a timeout they wait `patience` seconds for an engine. For one
    event loop."""

    def __init__(self, roster: Roster, patience: float) -> None:
        self._roster = roster
        self._patience = patience
        self._planner = fleets.Planner()
        self.loads = self._planner.loads
        self._budget = fleets.RetryBudget(spare=_SPARE_TRIES)

    async def run(self, job: Job, least_tokens: int) -> None:
        """Returns when all documents are committed. Raises `Engine`'s errors, and ReplacedError."""
        loop = asyncio.get_running_loop()
        deadline = None if job.timeout is None else loop.time() + job.timeout
        try:
            await self._until(self._roster.until_another(set()), deadline)
            cells, documents = fleets.cells_of(self._roster.members), (job.digests, job.tokens, job.split)
            reach, parts = self._planner.plan(
                cells, *documents, least_tokens, loop.time(), getrandbits(64), job.is_cached
            )
            if job.first is not None and len(parts) > 1:
                members = max(parts, key=lambda part: part.weight).members
                weight = int(job.first.tokens.sum())
                whole = fleets.Part(members, np.zeros(1, dtype=np.int64), weight, is_whole=True)
                await self._run_parts(job.first, [whole], reach, deadline)
                if job.first.answer is None:
                    return  # out of time, and a partial result may have no scores
            await self._run_parts(job, parts, reach, deadline)
            if job.unknown:
                raise UnknownDocumentsError.of(sorted(job.unknown))
        except TimeoutError:
            assert job.timeout is not None
            raise RequestTimeoutError.after(job.timeout) from None

    async def _run_parts(
        self, job: Job, parts: list[fleets.Part], reach: fleets.Reach, deadline: float | None
    ) -> None:
        attempts = fleets.Attempts(parts, self._budget)
        under_way: dict[asyncio.Task[wire.Reply], fleets.Send] = {}
        try:
            sends = attempts.begin()
            while True:
                for send in sends:
                    under_way[asyncio.create_task(self._send(job, send, deadline))] = send
                if attempts.is_over:
                    return
                done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                sends = []
                for task in done:
                    send = under_way.pop(task)
                    try:
                        sends += await self._ended(job, attempts, reach, send, task, deadline)
                    except TimeoutError:
                        if not job.is_partial:
                            raise
                        attempts.answered(send.attempt)
        except fleets.FleetError as error:
            if error.indices:
                raise RequestFailedError(job.deadly or str(error)) from None
            raise EngineNotReadyError(str(error)) from None
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _ended(
        self,
        job: Job,
        attempts: fleets.Attempts,
        reach: fleets.Reach,
        send: fleets.Send,
        task: "asyncio.Task[wire.Reply]",
        deadline: float | None,
    ) -> list[fleets.Send]:
        """The next attempts after one that has ended."""
        error = task.exception()
        if isinstance(error, LostError):
            # The part goes to an engine that did not die with it, once there is one.
            alive = await self._others(attempts, send, deadline)
            self.loads.forget_others(self._roster.members)
            match error:
                case NotSentError():
                    return attempts.unsent(send.attempt, alive)
                case SilentError():
                    return attempts.unanswered(send.attempt, alive)
            return attempts.lost(send.attempt, alive)
        if error is not None:
            raise error
        answer = task.result().answer
        if not isinstance(answer, wire.Failed):
            if attempts.answered(send.attempt):
                job.commit(send.part.indices, answer)
                if job.is_cached:
                    digests = job.digests[send.part.indices]
                    self._planner.seen.remember(reach, digests.tolist(), send.member)
            return []
        if answer.kind == wire.UNKNOWN:
            if attempts.answered(send.attempt):
                job.unknown.update(answer.digests)
            return []
        if answer.kind in ("not ready", "dead"):
            return attempts.lost(send.attempt, await self._others(attempts, send, deadline))
        if answer.kind == "full" and answer.reason != "rate" and not job.has_digests:
            alive = self._roster.alike(send.member.fingerprint)
            try:
                return attempts.full(send.attempt, answer.retry_after, alive)
            except fleets.FleetError as refused:
                # The last refusal, with the longest wait.
                raise wire.as_error(
                    msgspec.structs.replace(answer, retry_after=refused.retry_after)
                ) from None
        if answer.kind == "timeout":
            raise TimeoutError
        message = wire.in_whole(answer.message, send.part.indices.tolist())
        raise wire.as_error(msgspec.structs.replace(answer, message=message))

    async def _send(self, job: Job, send: fleets.Send, deadline: float | None) -> wire.Reply:
        """The engine enforces the deadline; the front does so somewhat later, in case the engine hangs."""
        part, queued = send.part, None
        alone = self._roster.connected(send.member).alone if send.is_suspect else nullcontext()
        async with asyncio.timeout_at(None if deadline is None else deadline + _HANGS), alone:
            link = self._roster.connected(send.member).link  # it may have gone meanwhile
            self.loads.sent(send.member, part.weight)
            try:
                left = None if deadline is None else deadline - asyncio.get_running_loop().time()
                question = job.question(part.indices, left)
                reply = await link.ask(question, partial(job.arrived, part.indices))
                queued = reply.queued_tokens
                return reply
            finally:
                self.loads.answered(send.member, part.weight, queued)

    async def _others(
        self, attempts: fleets.Attempts, send: fleets.Send, deadline: float | None
    ) -> tuple[fleets.Member, ...]:
        """Engines that may take a failed attempt's part, once there are some."""
        fingerprint, avoided = send.member.fingerprint, attempts.avoided(send.attempt)
        await self._until(self._roster.until_another(avoided, fingerprint), deadline)
        return self._roster.alike(fingerprint)

    async def _until(self, there: Coroutine[Any, Any, None], deadline: float | None) -> None:
        """Raises TimeoutError at the deadline, or EngineNotReadyError after `patience`."""
        loop = asyncio.get_running_loop()
        patience = loop.time() + self._patience
        try:
            async with asyncio.timeout_at(patience if deadline is None else min(deadline, patience)):
                await there
        except TimeoutError:
            if deadline is not None and loop.time() >= deadline:
                raise
            raise EngineNotReadyError("no engine is there; try again shortly") from None


_DEADLY = "three engines died while they encoded the query; send another one"
# Estimated characters of a token, and cost of a picture, in characters.
_CHARACTERS_A_TOKEN, _PICTURE = 4, 4_096
# Estimated characters of a text that is named by its digest.
_NAMED_TEXT = 512
# Most tokens of prompts and markers around a text.
_MOST_AROUND = 1_024
# Called with indices, scores and explanations.
NewScores = Callable[[list[int], list[float], Mapping[int, Explanation]], None]


# Options of `Engine.score` that are sent as they are.
_SENT_AS_THEY_ARE = ("use_activation", "normalize", "cache", "on_timeout", "on_error", "explain")


class ScoreJob(Job):
    """A score request: its split, its parts' questions and its merged result. In several parts a query that
    has an embedding is encoded once, so that all documents meet the same vectors."""

    def __init__(
        self,
        facts: ModelFacts,
        queries: Any,
        documents: Any,
        options: ScoreOptions,
        told: NewScores | None = None,
    ) -> None:
        """`told` gets scores as they come, some more than once. Raises InvalidRequestError."""
        takes_vectors = facts.score_type.encodes_apart
        self.documents = as_scored(documents, "documents", takes_vectors, facts.reads_pictures)
        self.queries = as_scored(queries, "queries", takes_vectors, facts.reads_pictures)
        sizes = [*map(size_of, self.documents)]
        super().__init__([*map(_digest, self.documents)], sizes, options["timeout"])
        self._options, self._told = options, told
        self.has_digests = any(isinstance(each, DocumentDigest) for each in self.documents)
        self.split = self._split(facts.score_type)
        is_split_apart = takes_vectors and self.split is not fleets.Split.NEVER
        self.is_cached = is_split_apart and options["cache"] != "bypass"
        self.is_partial = options["on_timeout"] == "partial"
        if is_split_apart and not isinstance(self.queries[0], Vectors):
            query = self.queries[0]
            ask = partial(_question_of_query, query, options)
            self.first = WholeJob(size_of(query), self.timeout, ask, _DEADLY, self.is_partial)
        # Upper bound: pairs repeat the query.
        of_query = max(map(_most_tokens, self.queries))
        self.most_tokens = sum(_most_tokens(each) + of_query + _MOST_AROUND for each in self.documents)
        self._scores: dict[int, float] = {}
        self._ranking_scores: dict[int, float] = {}
        self._results: list[ScoreResult] = []
        self._arrived: dict[int, float] = {}
        self._errors: dict[int, str] = {}
        self._unscored: list[int] = []
        self._explanations: dict[int, Explanation] = {}

    def arrived(self, indices: NDArray[np.int64], new: wire.Arrived) -> None:
        assert self._told is not None
        given = indices.tolist()
        whole = [given[i] for i in new.indices]
        self._arrived.update(zip(whole, new.result.scores, strict=True))
        why = {given[i]: each for i, each in new.result.explanations.items()}
        self._told(whole, new.result.scores, why)

    def _split(self, kind: ScoreType) -> fleets.Split:
        """Listwise models, explanations, N:N pairs and windows need the whole request at one engine. (A
        window may have many times a document's tokens.)"""
        options = self._options
        reads_windows = as_truncation(options["truncation"]).windows
        if kind.scores_together or len(self.queries) > 1 or options["explain"] or reads_windows:
            return fleets.Split.NEVER
        if self.has_digests:
            return fleets.Split.AT_OWNER
        return fleets.Split.BY_TOKENS if kind is ScoreType.CROSS_ENCODER else fleets.Split.BY_OWNER

    def question(self, indices: NDArray[np.int64], left: float | None) -> wire.Question:
        return self._score(indices, left)

    def _score(self, indices: NDArray[np.int64], left: float | None) -> wire.Score:
        options: Mapping[str, Any] = self._options
        encoded = None if self.first is None else cast("wire.SentQuery | None", self.first.answer)
        return wire.Score(
            queries=wire.sent_items(self.queries) if encoded is None else [encoded],
            documents=wire.sent_items([self.documents[i] for i in indices.tolist()]),
            run=run_of(options, left),
            # It is a part of an encoded query.
            instruction=options["instruction"] if encoded is None else None,
            streams=self._told is not None,
            **{name: options[name] for name in _SENT_AS_THEY_ARE},
        )

    def commit(self, indices: NDArray[np.int64], answer: wire.Answer) -> None:
        result = cast("wire.Scored", answer).result
        whole = indices.tolist()
        self._scores.update(zip(whole, result.scores, strict=True))
        self._ranking_scores.update(zip(whole, result.ranking_scores, strict=True))
        self._results.append(result)
        self._errors |= {whole[i]: wire.in_whole(reason, whole) for i, reason in result.errors.items()}
        self._unscored += [whole[i] for i in result.unscored]
        self._explanations |= {whole[i]: why for i, why in result.explanations.items()}

    def result(self) -> ScoreResult:
        """One score per document. The query counts once. Partial results may lack parts."""
        count, ranking = len(self.documents), self._ranking_scores
        if self.is_partial and (late := [i for i in range(count) if i not in self._scores]):
            scores = [self._arrived.get(i, math.nan) for i in late]
            if self._arrived.keys() & {*late}:
                ranking = self._scores  # raw scores of these did not arrive
            unscored = tuple(i for i, score in enumerate(scores) if math.isnan(score))
            self.commit(np.array(late), wire.Scored(ScoreResult(scores, Usage(0), 0, unscored)))
        results = self._results
        usage = _total([each.usage for each in results])
        truncated_queries = max(each.truncated_queries for each in results)
        return ScoreResult(
            [self._scores[i] for i in range(count)],
            usage,
            sum(each.truncated - each.truncated_queries for each in results) + truncated_queries,
            tuple(sorted(self._unscored)),
            {i: self._errors[i] for i in sorted(self._errors)},
            slowest([each.timings for each in results]),
            self._explanations,
            truncated_queries,
            [ranking[i] for i in range(count)],
        )


def _question_of_query(query: Item, options: ScoreOptions, left: float | None) -> wire.EncodeQuery:
    sent, run = wire.sent_item(query), run_of(options, left)
    return wire.EncodeQuery(query=sent, run=run, instruction=options["instruction"])


class AddJob(Job):
    """Texts to make known by their digests, each at its owner."""

    split = fleets.Split.AT_OWNER
    is_cached = has_digests = True

    def __init__(self, facts: ModelFacts, texts: tuple[str, ...], options: Mapping[str, Any]) -> None:
        self.named = [*map(DocumentDigest.of, texts)]
        super().__init__([*map(_digest, self.named)], [*map(size_of, texts)], options.get("timeout"))
        self.texts, self._options = texts, options
        if facts.score_type.scores_together:
            self.split = fleets.Split.NEVER
        self._added: list[wire.Added] = []
        self._not_kept: list[int] = []

    def question(self, indices: NDArray[np.int64], left: float | None) -> wire.AddDocuments:
        sent = wire.sent_items([self.texts[i] for i in indices.tolist()])
        texts = cast("list[str | wire.SentBroken]", sent)
        return wire.AddDocuments(documents=texts, run=run_of(self._options, left))

    def commit(self, indices: NDArray[np.int64], answer: wire.Answer) -> None:
        added = cast("wire.Added", answer)
        self._added.append(added)
        whole = indices.tolist()
        self._not_kept += [whole[i] for i in added.not_kept]

    def result(self) -> AddedDocuments:
        added = self._added
        usage, timings = _total([each.usage for each in added]), slowest([each.timings for each in added])
        truncated = sum(each.truncated for each in added)
        return AddedDocuments(self.named, usage, truncated, tuple(sorted(self._not_kept)), timings)


class RankJob(ScoreJob):
    """A ranking that one engine makes, which explains only what it returns."""

    def __init__(
        self,
        facts: ModelFacts,
        query: Any,
        documents: Any,
        options: ScoreOptions,
        top_n: int | None,
        threshold: float | None,
    ) -> None:
        super().__init__(facts, query, documents, options)
        self._top_n, self._threshold = top_n, threshold
        # Without an answer in time.
        self.answer = wire.Scored(ScoreResult([], Usage(0), 0, tuple(range(len(self.documents)))))

    def question(self, indices: NDArray[np.int64], left: float | None) -> wire.Rank:
        score = self._score(indices, left)
        return wire.Rank(score=score, top_n=self._top_n, score_threshold=self._threshold)

    def commit(self, indices: NDArray[np.int64], answer: wire.Answer) -> None:
        self.answer = cast("wire.Scored", answer)


def _total(parts: list[Usage]) -> Usage:
    """Usage of a request whose parts all have its query, which counts once. A part that ran out of time may
    not have read it."""
    of_query = max(each.query_tokens for each in parts)
    prompt_tokens = sum(each.prompt_tokens - each.query_tokens for each in parts) + of_query
    cached = sum(each.cached_tokens for each in parts), sum(each.cached_documents for each in parts)
    return Usage(prompt_tokens, *cached, of_query)


def slowest(timings: list[Timings]) -> Timings:
    """The maxima of parts that ran side by side, with the sum of their time on devices."""
    if len(timings) == 1:
        return timings[0]
    device = sum(each.device for each in timings)
    return replace(Timings(*map(max, *map(astuple, timings))), device=device)


def _digest(item: Item | tuple[int, ...]) -> int:
    """By content; embeddings are not cached and go by identity."""
    match item:
        case Vectors():
            return id(item)
        case Content():
            return fleets.digest_of(wire.encode(wire.sent_item(item)))
        case tuple():
            return fleets.digest_of(repr(item).encode())
        case str():
            item = DocumentDigest.of(item)
    return fleets.digest_of(item.value)


def size_of(item: Item | tuple[int, ...]) -> int:
    """Cost, as characters of a text."""
    match item:
        case str():
            return len(item)
        case tuple():
            return _CHARACTERS_A_TOKEN * len(item)
        case Vectors():
            return len(item) // 32
        case DocumentDigest():
            return _NAMED_TEXT
    return sum(map(len, item.texts)) + _PICTURE * len(item.pictures)


def _most_tokens(item: Item | tuple[int, ...]) -> int:
    """Upper bound: a token of a text is at least a byte."""
    if isinstance(item, tuple):
        return len(item)
    if isinstance(item, Vectors | DocumentDigest):
        return size_of(item)
    texts, pictures = ([item], 0) if isinstance(item, str) else (item.texts, len(item.pictures))
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) + _PICTURE * pictures


_OF_THE_RUN = frozenset({"truncation", "priority", "tenant", "timeout"})


class EmbedJob(Job):
    """A request to embed texts. One engine does another task than `embed`, late chunking, and `chunks`,
    whose texts are one document."""

    def __init__(
        self,
        texts: tuple[str | tuple[int, ...] | Content, ...],
        options: Mapping[str, Any],
        task: wire.EmbedTask = "embed",
    ) -> None:
        super().__init__([*map(_digest, texts)], [*map(size_of, texts)], options.get("timeout"))
        self.texts, self._task = texts, task
        self._run = run_of(options, self.timeout)
        self._options = {name: value for name, value in options.items() if name not in _OF_THE_RUN}
        if task == "embed" and not options.get("late_chunking") and options.get("chunks") is None:
            # Token vectors of documents may be cached where these were scored.
            has_encoding = options.get("encoding") is not None
            self.is_cached = has_encoding and options.get("input_type") == "document"
            self.split = fleets.Split.BY_OWNER if self.is_cached else fleets.Split.BY_TOKENS
            self.most_tokens = sum(_most_tokens(text) + _MOST_AROUND for text in texts)
        self._parts: list[tuple[NDArray[np.int64], Any]] = []

    def question(self, indices: NDArray[np.int64], left: float | None) -> wire.Embed:
        texts = wire.sent_inputs([self.texts[i] for i in indices.tolist()])
        run = msgspec.structs.replace(self._run, timeout=left)
        return wire.Embed(texts=texts, run=run, task=self._task, **self._options)

    def commit(self, indices: NDArray[np.int64], answer: wire.Answer) -> None:
        self._parts.append((indices, cast("wire.Embedded", answer).result))

    def result(self) -> Any:
        """The result of the task."""
        results = [result for _, result in self._parts]
        if len(results) == 1:
            return results[0]
        rows = np.empty((len(self.texts), results[0].embeddings.shape[1]), dtype=np.float32)
        for indices, result in self._parts:
            rows[indices] = result.embeddings
        usage, timings = _total([each.usage for each in results]), slowest([each.timings for each in results])
        truncated = sum(each.truncated for each in results)
        return EmbedResult(rows, usage, truncated, timings, results[0].encoding)


def run_of(options: Mapping[str, Any], left: float | None) -> wire.Run:
    truncation = as_truncation(options.get("truncation", "cut"))
    return wire.Run(truncation, options.get("priority", 0), options.get("tenant", ""), left)
