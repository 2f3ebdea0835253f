"""The actor that runs steps. Lives on the device thread's event loop.

A stage of a step is a transaction, and the runner owns it: forward, pooling and scoring are attempts, without
effect beyond what they return (state is overwritten by key, so that a second attempt does no harm). Then
results are delivered; then one commit releases queries, windows, prefixes, and keys and values together.
"""

import asyncio
import hashlib
import logging
import queue
import threading
import time
import traceback
from collections import Counter, OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from maxsimd.engine.actors.actor import (
    Actor,
    Commit,
    DropRequest,
    ForgetAttempt,
    FreeSequences,
    Mailbox,
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
from maxsimd.engine.actors.turns import Turn
from maxsimd.engine.cache import CachedEmbedding, EmbeddingCache
from maxsimd.engine.execution import ModelRunner
from maxsimd.engine.execution.devices import use_device
from maxsimd.engine.scoring.scorer import (
    Arrival,
    CachedDocuments,
    CacheHit,
    Duplicate,
    RequestFailure,
    Result,
    SkippedSequence,
    StepOutcome,
)
from maxsimd.pooling.dispatch import Pooled
from maxsimd.scheduler import CachedBatch, Chunk, ImageJob, Step, TokenSequence


class Arrivals:
    """Waits for one arrival after the other, in the order in which the device comes to them, in a thread that
    begins with the first. No process waits for that thread as it ends: the device may be stuck."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked: queue.SimpleQueue[tuple[Arrival, Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def until(self, arrival: Arrival) -> None:
        """Returns when the device has come to it; raises what waiting for it raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="maxsimd-arrivals", daemon=True)
            self._thread.start()
        arrived: Future[None] = Future()
        self._asked.put((arrival, arrived))
        await asyncio.wrap_future(arrived)

    def close(self) -> None:
        """Ends the thread, when it next can; does not wait for it."""
        self._asked.put(None)

    def _run(self) -> None:
        use_device(self._device)
        while (asked := self._asked.get()) is not None:
            arrival, arrived = asked
            if not arrived.set_running_or_notify_cancel():
                continue
            try:
                arrival.synchronize()
            except BaseException as error:
                arrived.set_exception(error)
            else:
                arrived.set_result(None)


class CutSequences:
    """The sequences that are cut between steps, by request, the prefixes that other sequences run behind, and
    the pictures that sequences wait for.

    Owned by the runner actor. Noting a step again, when it is retried, does no harm."""

    def __init__(self) -> None:
        self._of_request: dict[int, set[int]] = {}
        self._consumers_left: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of_request.values()))

    def note(self, step: Step) -> None:
        """Notes what will have state once the step has run."""
        for image in step.images:
            self._of_request.setdefault(image.request_id, set()).add(image.image_id)
        for chunk in step.chunks:
            sequence = chunk.sequence
            if chunk.is_prefix:
                self._consumers_left.setdefault(sequence.sequence_id, sequence.num_consumers)
            if chunk.is_prefix or not chunk.is_whole:
                self._of_request.setdefault(sequence.request_id, set()).add(sequence.sequence_id)

    def finish(self, step: Step) -> frozenset[int]:
        """The ids of sequences and pictures whose state is not needed once the step is delivered; forgets
        them."""
        finished: set[int] = set()
        for chunk in step.chunks:
            sequence = chunk.sequence
            for image in sequence.tokens.images if chunk.is_last else ():
                self._forget(sequence.request_id, image.image_id)
                finished.add(image.image_id)
            if not chunk.is_last or chunk.is_first or chunk.is_prefix:
                continue
            self._forget(sequence.request_id, sequence.sequence_id)
            finished.add(sequence.sequence_id)
            prefix_id = sequence.prefix_id
            if prefix_id is not None and self._count_consumer(prefix_id):
                self._forget(sequence.request_id, prefix_id)
                finished.add(prefix_id)
        return frozenset(finished)

    def drop_request(self, request_id: int) -> frozenset[int]:
        """The ids of all sequences and pictures of a request that have state; forgets them."""
        dropped = frozenset(self._of_request.pop(request_id, ()))
        for sequence_id in dropped:
            self._consumers_left.pop(sequence_id, None)
        return dropped

    def _count_consumer(self, prefix_id: int) -> bool:
        """Counts a sequence that has run behind a prefix; True after the last."""
        left = self._consumers_left.get(prefix_id, 0) - 1
        self._consumers_left[prefix_id] = left
        if left > 0:
            return False
        del self._consumers_left[prefix_id]
        return True

    def _forget(self, request_id: int, sequence_id: int) -> None:
        cut = self._of_request.get(request_id, set())
        cut.discard(sequence_id)
        if not cut:
            self._of_request.pop(request_id, None)


# How many sequences are remembered; those that broke a step longest ago are forgotten first.
_MOST = 1_024


class Suspects:
    """Digests of what sequences have the model read. Owned by the runner actor.

    While there are none nothing is computed, and else only for sequences as long as one of them."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._lengths_by_digest: OrderedDict[bytes, int] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._lengths_by_digest)

    def add(self, sequence: TokenSequence) -> None:
        """Remembers a sequence that has broken a step alone."""
        self.discard(sequence)
        self._lengths_by_digest[_digest(sequence)] = len(sequence)
        self._lengths[len(sequence)] += 1
        if len(self) > self._most:
            self._forget(next(iter(self._lengths_by_digest)))

    def discard(self, sequence: TokenSequence) -> None:
        """Forgets a sequence that has run well, if it was one of them."""
        if sequence in self:
            self._forget(_digest(sequence))

    def __contains__(self, sequence: TokenSequence) -> bool:
        return len(sequence) in self._lengths and _digest(sequence) in self._lengths_by_digest

    def isolate(self, stage: Step) -> list[Step]:
        """A stage in parts, in the order in which to run them: each suspect stands alone.

        A suspect that others wait for comes first; those of them that are in the stage follow together, since
        they fail if it does. The other suspects come last, because they may wait for any of the rest."""
        if not self or stage.num_parts == 1:
            return [stage]
        suspects = {chunk.sequence.sequence_id for chunk in stage.chunks if chunk.sequence in self}
        if not suspects:
            return [stage]
        first, behind, rest, last = list[Chunk](), list[Chunk](), list[Chunk](), list[Chunk]()
        for chunk in stage.chunks:
            sequence = chunk.sequence
            if sequence.sequence_id in suspects:
                (first if sequence.num_consumers else last).append(chunk)
            else:
                waits = sequence.waits_for in suspects or sequence.prefix_id in suspects
                (behind if waits else rest).append(chunk)
        groups = [*([chunk] for chunk in first), behind, rest, *([chunk] for chunk in last)]
        return [Step(stage.step_id, tuple(group)) for group in groups if group]

    def _forget(self, digest: bytes) -> None:
        length = self._lengths_by_digest.pop(digest)
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]


def _digest(sequence: TokenSequence) -> bytes:
    tokens = sequence.tokens
    digest = hashlib.blake2b(f"{sequence.payload.role} {sequence.payload.task} ".encode(), digest_size=16)
    digest.update(f"{tokens.num_attended} ".encode())
    digest.update(tokens.ids.tobytes())
    if tokens.type_ids is not None:
        digest.update(tokens.type_ids.tobytes())
    for image in tokens.images:
        digest.update(image.digest)
    return digest.digest()


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
