"""The actor that runs steps. Lives on the device thread's event loop.

A stage of a step is a transaction, and the runner owns it: forward, pooling and scoring are attempts, without
effect beyond what they return (state is overwritten by key, so that a second attempt does no harm). Then
results are delivered; then one commit releases queries, windows, prefixes, and keys and values together.
"""

import asyncio
import logging
import time
import traceback
from dataclasses import dataclass

import torch

from maxsimd.engine.actors.actor import Actor, Mailbox
from maxsimd.engine.actors.arrivals import Arrivals
from maxsimd.engine.actors.cut_sequences import CutSequences
from maxsimd.engine.actors.messages import (
    Commit,
    DropRequest,
    ForgetAttempt,
    FreeSequences,
    Pool,
    PoolingMessage,
    Release,
    RunnerMessage,
    SchedulerMessage,
    Score,
    ScoringMessage,
    StepEnding,
    StepReport,
)
from maxsimd.engine.actors.suspects import Suspects
from maxsimd.engine.actors.turns import Turn
from maxsimd.engine.cache import CachedEmbedding, EmbeddingCache
from maxsimd.engine.execution import ModelRunner
from maxsimd.engine.scoring.documents import CachedDocuments, CacheHit, Duplicate, SkippedSequence
from maxsimd.engine.scoring.outcome import Arrival, RequestFailure, Result, StepOutcome
from maxsimd.pooling.dispatch import Pooled
from maxsimd.scheduler import CachedBatch, Chunk, ImageJob, Step, TokenSequence

log = logging.getLogger(__name__)


class RunnerActor(Actor[RunnerMessage]):
    """Owns the model, the transaction of each step, and the policy for steps that fail.

    A step is run in stages, each a transaction by itself; when the last begins, the scheduler is told and
    chooses the next step meanwhile. Only after pictures it chooses when they are done: their passes may take
    seconds, and a small request that comes meanwhile is to be in the very next step. A stage that fails on
    the way to delivery is tried again in halves, until the sequence that breaks it stands alone; only that
    sequence's request fails. When that sequence comes again it runs alone at once. An error of the device,
    and whatever fails in delivery or commit, ends the engine.
    """

    def __init__(
        self,
        mailbox: Mailbox[RunnerMessage],
        runner: ModelRunner,
        pooling: Mailbox[PoolingMessage],
        scoring: Mailbox[ScoringMessage],
        scheduler: Mailbox[SchedulerMessage],
        cache: EmbeddingCache | None,
        device: torch.device,
        *,
        turn: Turn | None = None,
    ) -> None:
        """Where several models share the device, each step waits for its `turn`."""
        super().__init__(mailbox)
        self._runner = runner
        self._pooling = pooling
        self._scoring = scoring
        self._scheduler = scheduler
        self._cache = cache
        self._deliveries: asyncio.TaskGroup | None = None
        self._arrivals = Arrivals(device)
        self._suspects = Suspects()
        self._started = self._waited = 0.0
        self._turn = turn
        self.cut_sequences = CutSequences()

    async def run(self) -> None:
        """Reads messages until cancelled; raises when a message or a delivery fails."""
        try:
            async with asyncio.TaskGroup() as self._deliveries:
                await super().run()
        finally:
            self._arrivals.close()

    async def receive(self, message: RunnerMessage) -> None:
        if isinstance(message, Release):
            self._free(self.cut_sequences.drop_request(message.request_id))
            self._scoring.tell(DropRequest(message.request_id))
            return
        if self._turn is None:
            await self._run_stages(message)
            return
        asked = time.perf_counter()
        async with self._turn:
            self._waited = time.perf_counter() - asked
            await self._run_stages(message)

    async def _run_stages(self, message: Step) -> None:
        self.cut_sequences.note(message)
        self._started = time.perf_counter()
        *stages, last = [part for stage in message.stages() for part in self._suspects.isolate(stage)]
        for stage in stages:
            await self._run(stage)
        if not last.images:
            self._scheduler.post(StepEnding(message.step_id))
        await self._run(last)

    async def _run(self, step: Step) -> None:
        try:
            attempt = await self._attempt(step)
            arrival = attempt.outcome.arrival
            results = attempt.outcome.results() if arrival is None else None
        except Exception as error:
            if is_device_error(error):
                raise
            failure, described = error, traceback.format_exc()
            # The traceback holds the attempt's frames and so its tensors, whose memory the next one needs.
            failure.__traceback__ = None
        else:
            if arrival is None:
                self._finish(attempt, results or [])
            else:
                # The next step may start meanwhile; this one's results follow when they have arrived.
                assert self._deliveries is not None
                self._deliveries.create_task(self._finish_later(attempt, arrival))
            return
        await self._recover(step, failure, described)

    async def _attempt(self, step: Step) -> "_Attempt":
        """Runs, pools and scores a stage of a step. What it changes, a second attempt overwrites."""
        started, waited = self._started, self._waited
        chunks, skipped = self._split_cached(step)
        pooled: list[Pooled] = []
        if chunks:
            states, cursor = self._runner.forward(Step(step.step_id, chunks))
            pooled = await self._pooling.ask(Pool(states, cursor))
        if step.images:
            self._runner.encode(step.images)
        pooled_at = time.perf_counter()
        outcome = await self._scoring.ask(Score(pooled, skipped, step.cached))
        score_seconds = time.perf_counter() - pooled_at
        return _Attempt(step, sum(map(len, chunks)), started, waited, score_seconds, outcome)

    async def _finish_later(self, attempt: "_Attempt", arrival: Arrival) -> None:
        await self._arrivals.until(arrival)
        self._finish(attempt, attempt.outcome.results())

    def _finish(self, attempt: "_Attempt", results: list[Result]) -> None:
        """Delivers a step's results, then commits it. If delivery or commit fails, the engine ends.

        New embeddings can be found in the cache from then on; a thread of the cache's own writes them. That
        the cache takes them is no condition."""
        step, outcome = attempt.step, attempt.outcome
        if self._suspects and step.num_parts == 1 and step.chunks and step.chunks[0].is_last:
            self._suspects.discard(step.chunks[0].sequence)
        try:
            self._stage(outcome)
        except Exception:
            log.exception("the new embeddings of a step are not cached")
        self._scheduler.post(
            StepReport(
                step.step_id,
                step.num_parts,
                attempt.num_tokens,
                step.other_price,
                time.perf_counter() - attempt.started,
                tuple(results),
                outcome.failures,
                attempt.score_seconds,
                waited=attempt.waited,
                device_seconds=self._charge(attempt.started),
            )
        )
        self._free(self.cut_sequences.finish(step))
        self._scoring.tell(Commit(outcome.releases))

    def _charge(self, started: float) -> float | None:
        """The seconds that what was begun then had of a shared device, which are now paid for."""
        return None if self._turn is None else self._turn.charge(started)

    def _stage(self, outcome: StepOutcome) -> None:
        """Makes new embeddings findable in the cache."""
        if self._cache is None:
            return
        for embeddings in outcome.new_embeddings:
            self._cache.stage(embeddings)

    def _free(self, sequence_ids: frozenset[int]) -> None:
        for sequence_id in sequence_ids:
            self._runner.free(sequence_id)
        self._pooling.tell(FreeSequences(sequence_ids))

    def _split_cached(self, step: Step) -> tuple[tuple[Chunk, ...], list[SkippedSequence]]:
        """Splits off documents that are cached by now or that duplicate an earlier document of this step."""
        if self._cache is None:
            return step.chunks, []
        new: list[Chunk] = []
        skipped: list[SkippedSequence] = []
        coming: set[bytes] = set()
        for chunk in step.chunks:
            document = chunk.sequence.payload.document
            key = None if document is None or document.window is not None else document.cache_key
            if key is None or not chunk.is_whole:
                new.append(chunk)
            elif key in coming:
                skipped.append(Duplicate(chunk.sequence))
            elif (entry := self._look_up(key)) is not None:
                skipped.append(CacheHit(chunk.sequence, entry))
            else:
                coming.add(key)
                new.append(chunk)
        return tuple(new), skipped

    def _look_up(self, key: bytes) -> CachedEmbedding | None:
        """A cached embedding; none where the cache cannot be read, which fails no step."""
        assert self._cache is not None
        try:
            return self._cache.peek(key)
        except Exception:
            log.exception("the cache cannot be read; the document is run")
            return None

    async def _recover(self, step: Step, error: Exception, described: str) -> None:
        out_of_memory = is_out_of_memory(error)
        if out_of_memory:
            _give_back_memory()
            self._scheduler.post(StepReport(step.step_id, 0, out_of_memory=True))
        self._scoring.tell(ForgetAttempt(frozenset(chunk.sequence.sequence_id for chunk in step.chunks)))
        if step.num_parts > 1:
            log.warning("a step of %d parts failed and is tried in halves: %s", step.num_parts, error)
            for half in step.halves():
                await self._run(half)
            return
        log.error("a step of one part (%d tokens) cannot be run:\n%s", step.num_tokens, described)
        part = step.chunks[0].sequence if step.chunks else step.others[0]
        if isinstance(part, TokenSequence) and not out_of_memory:
            self._suspects.add(part)
        reason = (
            "the device has not enough memory for this input" if out_of_memory else "the model failed on it"
        )
        failure = RequestFailure(part.request_id, reason, _indexes_of(part))
        used = self._charge(self._started)
        self._scheduler.post(StepReport(step.step_id, 1, failures=(failure,), device_seconds=used))


def _indexes_of(part: TokenSequence | CachedBatch | ImageJob) -> tuple[int, ...]:
    """Which of its request's values are made of it alone; none for queries and prefixes."""
    if isinstance(part, CachedBatch):
        documents: CachedDocuments = part.documents
        return tuple(slot.index for slot in documents.slots)
    slot = part.slot if isinstance(part, ImageJob) else part.payload.slot
    return () if slot is None else (slot.index,)


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """An attempt at a stage that succeeded, with `num_tokens` run; its step was begun at `started`
    (perf_counter), for whose turn it had `waited`, and the host was scoring for `score_seconds`."""

    step: Step
    num_tokens: int
    started: float
    waited: float
    score_seconds: float
    outcome: StepOutcome


def _give_back_memory() -> None:
    """Gives back what torch holds of the accelerator's memory without using it, where it can."""
    empty = getattr(torch.get_device_module(), "empty_cache", None)
    if empty is not None:
        empty()


# How the device, its libraries and Triton begin the messages of their errors.
_DEVICE_ERRORS = ("CUDA error", "HIP error", "Triton Error [CUDA]", "CUBLAS_STATUS", "CUDNN_STATUS")
_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")


def is_device_error(error: BaseException) -> bool:
    """Whether the device itself has failed (an illegal address, a lost GPU): nothing will run on it again.

    torch says so by a class of its own, or in words, as Triton does. Running out of memory is none."""
    if is_out_of_memory(error):
        return False
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in _DEVICE_ERRORS)
    return said or isinstance(error, torch.AcceleratorError)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was not enough memory, on the device or the host: torch says it in several ways."""
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)
