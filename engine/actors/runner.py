"""The actors on the device thread's event loop, which run, pool and score steps.

A stage of a step is a transaction. Forward, pooling and scoring are attempts, whose only effects are keyed
overwrites, so that they can be retried. Then results are delivered. Then one commit releases queries,
windows, prefixes, and keys and values together.
"""

import asyncio
import hashlib
import logging
import queue
import threading
import time
import traceback
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from maxsimd.engine.actors.actor import (
    Actor,
    Commit,
    DropRequest,
    DropSequences,
    Mailbox,
    Pool,
    PoolingMessage,
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
from maxsimd.engine.requests import Value
from maxsimd.engine.scoring.scorer import (
    Arrival,
    CachedDocuments,
    DocumentScorer,
    Output,
    RequestFailure,
    SkippedSequence,
    StepOutcome,
)
from maxsimd.pooling.dispatch import DispatchPooler, Pooled
from maxsimd.scheduler import CachedBatch, Chunk, ImageJob, ResultSlot, Step, TokenSequence

log = logging.getLogger(__name__)

# The number of suspects that are remembered.
_MOST_SUSPECTS = 1_024
# The start of error messages of the device, its libraries and Triton.
_DEVICE_ERRORS = ("CUDA error", "HIP error", "Triton Error [CUDA]", "CUBLAS_STATUS", "CUDNN_STATUS")
_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")


class RunnerActor(Actor[RunnerMessage]):
    """Owns the model, the transaction of each step, and the policy for steps that fail.

    A step runs in stages, each a transaction. When the last stage starts, the scheduler is told and chooses
    the next step: at once on a GPU, near the stage's end on a CPU. It is not told when pictures start: their
    passes may take seconds, and a small request that comes meanwhile should be in the very next step. A stage
    that fails before delivery is retried in halves until the failing sequence is alone; only its request
    fails. If that sequence comes again, it runs alone at once. An error of the device, or one in delivery or
    commit, ends the engine.
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
        """With a `turn`, several models share the device, and each step waits for it."""
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
        if isinstance(message, DropRequest):
            self._free(self.cut_sequences.drop_request(message.request_id))
            self._scoring.tell(message)
            return
        if self._turn is None:
            await self._run_stages(message)
            return
        came = time.perf_counter()
        async with self._turn:
            self._waited = time.perf_counter() - came
            await self._run_stages(message)

    async def _run_stages(self, message: Step) -> None:
        self.cut_sequences.note(message)
        self._started = time.perf_counter()
        stages = [part for stage in message.stages() for part in self._suspects.isolate(stage)]
        if not stages:  # a fault of the scheduler, which must not end the engine
            log.error("step %d has no parts", message.step_id)
            self._scheduler.post(StepReport(message.step_id, 0))
            return
        *stages, last = stages
        for stage in stages:
            await self._run(stage)
        if not last.images:
            self._scheduler.post(StepEnding(message.step_id))
        await self._run(last)

    async def _run(self, step: Step) -> None:
        step = self._without_failed(step)
        if not step.num_parts:
            return
        try:
            attempt = await self._attempt(step)
            arrival = attempt.outcome.arrival
            results = attempt.outcome.results() if arrival is None else None
        except Exception as error:
            if is_device_error(error):
                raise
            failure, described = error, traceback.format_exc()
            # The traceback holds the attempt's tensors, whose memory the next attempt needs.
            failure.__traceback__ = None
        else:
            if arrival is None:
                self._finish(attempt, results or [])
            else:
                # The next step may start before these results have arrived.
                assert self._deliveries is not None
                self._deliveries.create_task(self._finish_later(attempt, arrival))
            return
        await self._recover(step, failure, described)

    def _without_failed(self, step: Step) -> Step:
        """Leaves out chunks that lack state because an earlier part has failed."""
        if not self.cut_sequences.have_failed:
            return step
        chunks = tuple(chunk for chunk in step.chunks if not self.cut_sequences.lacks_state(chunk.sequence))
        num_dropped = len(step.chunks) - len(chunks)
        if not num_dropped:
            return step
        self._scheduler.post(StepReport(step.step_id, num_dropped))
        return replace(step, chunks=chunks)

    async def _attempt(self, step: Step) -> "_Attempt":
        """Runs, pools and scores a stage. A second attempt overwrites its changes."""
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

    def _finish(self, attempt: "_Attempt", results: list[tuple[ResultSlot, Value]]) -> None:
        """Delivers a stage's results, then commits it. Errors end the engine, except those of the cache,
        which takes new embeddings and writes them in its own thread."""
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
                tuple(outcome.failures),
                attempt.score_seconds,
                waited=attempt.waited,
                device_seconds=self._charge(attempt.started),
            )
        )
        self._free(self.cut_sequences.finish(step))
        self._scoring.tell(Commit(outcome.releases))

    def _charge(self, started: float) -> float | None:
        """Charges the turn for a stage begun at `started`. Returns its seconds on a shared device."""
        return None if self._turn is None else self._turn.charge(started)

    def _stage(self, outcome: StepOutcome) -> None:
        if self._cache is not None:
            for embeddings in outcome.new_embeddings:
                self._cache.stage(embeddings)

    def _free(self, sequence_ids: frozenset[int]) -> None:
        for sequence_id in sequence_ids:
            self._runner.free(sequence_id)
        self._pooling.tell(DropSequences(sequence_ids))

    def _split_cached(self, step: Step) -> tuple[tuple[Chunk, ...], list[SkippedSequence]]:
        """Splits off documents that are cached by now, or duplicate an earlier document of the step."""
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
                skipped.append(SkippedSequence(chunk.sequence))
            elif (entry := self._look_up(key)) is not None:
                skipped.append(SkippedSequence(chunk.sequence, entry))
            else:
                coming.add(key)
                new.append(chunk)
        return tuple(new), skipped

    def _look_up(self, key: bytes) -> CachedEmbedding | None:
        """A cached embedding; None if there is none or the cache cannot be read."""
        assert self._cache is not None
        try:
            return self._cache.peek(key)
        except Exception:
            log.exception("the cache cannot be read; the document is run")
            return None

    async def _recover(self, step: Step, error: Exception, described: str) -> None:
        out_of_memory = is_out_of_memory(error)
        if out_of_memory:
            # Frees the accelerator's memory that torch holds without using it.
            getattr(torch.get_device_module(), "empty_cache", lambda: None)()
            self._scheduler.post(StepReport(step.step_id, 0, out_of_memory=True))
        self._scoring.tell(DropSequences(frozenset(chunk.sequence.sequence_id for chunk in step.chunks)))
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
        sequence_id = part.sequence_id if isinstance(part, TokenSequence) else None
        failure = RequestFailure(part.request_id, reason, _indexes_of(part), sequence_id)
        self._free(self.cut_sequences.fail(step))
        used = self._charge(self._started)
        self._scheduler.post(StepReport(step.step_id, 1, failures=(failure,), device_seconds=used))


def _indexes_of(part: TokenSequence | CachedBatch | ImageJob) -> tuple[int, ...]:
    """The indexes of the values that only this part makes; none for queries and prefixes."""
    if isinstance(part, CachedBatch):
        documents: CachedDocuments = part.documents
        return tuple(slot.index for slot in documents.slots)
    slot = part.slot if isinstance(part, ImageJob) else part.payload.slot
    return () if slot is None else (slot.index,)


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """A successful attempt at a stage of `num_tokens` tokens. Its step started at `started` (perf_counter)
    after it had `waited` for its turn; the host was scoring for `score_seconds`."""

    step: Step
    num_tokens: int
    started: float
    waited: float
    score_seconds: float
    outcome: StepOutcome


def is_device_error(error: BaseException) -> bool:
    """Whether the device itself has failed (an illegal address, a lost GPU), so that nothing will run on it
    again. Running out of memory is not such an error."""
    if is_out_of_memory(error):
        return False
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in _DEVICE_ERRORS)
    return said or isinstance(error, torch.AcceleratorError)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was not enough memory, on the device or the host."""
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)


class PoolingActor(Actor[PoolingMessage]):
    """Owns the `DispatchPooler` with the state of unfinished sequences, which a retry overwrites."""

    def __init__(self, mailbox: Mailbox[PoolingMessage], pooler: DispatchPooler) -> None:
        super().__init__(mailbox)
        self._pooler = pooler

    async def receive(self, message: PoolingMessage) -> list[Pooled] | None:
        if isinstance(message, Pool):
            with torch.inference_mode():
                return self._pooler.pool(message.states, message.cursor)
        for sequence_id in message.sequence_ids:
            self._pooler.free(sequence_id)
        return None


class ScoringActor(Actor[ScoringMessage]):
    """Owns the `DocumentScorer`, which stores queries and scores documents against them.

    The results of a stage leave the device in one transfer. If `num_labels` is 1, a classifier's result is a
    number, its logit."""

    def __init__(self, mailbox: Mailbox[ScoringMessage], scorer: DocumentScorer, num_labels: int) -> None:
        super().__init__(mailbox)
        self._scorer = scorer
        self._num_labels = num_labels

    async def receive(self, message: ScoringMessage) -> StepOutcome | None:
        match message:
            case Score():
                with torch.inference_mode():
                    return self._score(message)
            case Commit():
                self._scorer.commit(message.releases)
            case DropSequences():
                self._scorer.forget(message.sequence_ids)
            case DropRequest():
                self._scorer.drop_request(message.request_id)
        return None

    def _score(self, message: Score) -> StepOutcome:
        outcome = self._scorer.score(message.pooled, message.skipped, message.cached)
        for pooled in message.pooled:
            outcome.outputs += self._plain_items(pooled)
        outcome.send_to_host(self._scorer.device)
        return outcome

    def _plain_items(self, pooled: Pooled) -> list[Output]:
        """The items that are results themselves: all except those of queries and their documents."""
        plain = [
            i
            for i, sequence in enumerate(pooled.sequences)
            if sequence.payload.slot is not None and sequence.payload.document is None
        ]
        if not plain:
            return []
        slots = tuple(slot for i in plain if (slot := pooled.sequences[i].payload.slot) is not None)
        items = pooled.items
        if len(plain) < len(pooled.sequences):
            items = items.take(plain)
        return [Output(slots, items, scalar=pooled.task == "classify" and self._num_labels == 1)]


class Arrivals:
    """Waits for arrivals in their order on the device, in a daemon thread: the device may be stuck."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._awaited: queue.SimpleQueue[tuple[Arrival, Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def until(self, arrival: Arrival) -> None:
        """Returns when the device has reached it. Raises the device's errors."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="maxsimd-arrivals", daemon=True)
            self._thread.start()
        arrived: Future[None] = Future()
        self._awaited.put((arrival, arrived))
        await asyncio.wrap_future(arrived)

    def close(self) -> None:
        """Makes the thread end, without waiting for it."""
        self._awaited.put(None)

    def _run(self) -> None:
        use_device(self._device)
        while (awaited := self._awaited.get()) is not None:
            arrival, arrived = awaited
            if not arrived.set_running_or_notify_cancel():
                continue
            try:
                arrival.synchronize()
            except BaseException as error:
                arrived.set_exception(error)
            else:
                arrived.set_result(None)


class CutSequences:
    """The sequences and pictures with state on the device: sequences split between steps, prefixes, and
    pictures whose sequences have not run. Noting a step again, when it is retried, changes nothing.

    Also remembers those that failed until their request ends: chunks that need their state must not run."""

    def __init__(self) -> None:
        self._of_request: dict[int, set[int]] = {}
        self._consumers_left: dict[int, int] = {}
        self._failed: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of_request.values()))

    def note(self, step: Step) -> None:
        """Notes the sequences and pictures that will have state once the step has run."""
        for image in step.images:
            self._of_request.setdefault(image.request_id, set()).add(image.image_id)
        for chunk in step.chunks:
            sequence = chunk.sequence
            if chunk.is_prefix:
                self._consumers_left.setdefault(sequence.sequence_id, sequence.num_consumers)
            if chunk.is_prefix or not chunk.is_whole:
                self._of_request.setdefault(sequence.request_id, set()).add(sequence.sequence_id)

    def finish(self, step: Step) -> frozenset[int]:
        """Forgets the sequences and pictures whose state a delivered step has used up. Returns their ids."""
        finished: set[int] = set()
        for chunk in step.chunks:
            if chunk.is_last and (not chunk.is_first or chunk.sequence.tokens.images):
                finished |= self._end(chunk)
        return frozenset(finished)

    def fail(self, step: Step) -> frozenset[int]:
        """Notes that the only part of a step has failed. Forgets its state, and returns the ids."""
        for image in step.images:
            self._failed.setdefault(image.request_id, set()).add(image.image_id)
        for chunk in step.chunks:
            self._failed.setdefault(chunk.sequence.request_id, set()).add(chunk.sequence.sequence_id)
            return frozenset(self._end(chunk))
        return frozenset()

    @property
    def have_failed(self) -> bool:
        """Whether parts of open requests have failed."""
        return bool(self._failed)

    def lacks_state(self, sequence: TokenSequence) -> bool:
        """Whether an earlier chunk, the prefix or a picture of a sequence has failed."""
        failed = self._failed.get(sequence.request_id)
        if failed is None:
            return False
        images = (image.image_id for image in sequence.tokens.images)
        return any(each in failed for each in (sequence.sequence_id, sequence.prefix_id, *images))

    def drop_request(self, request_id: int) -> frozenset[int]:
        """Forgets all sequences and pictures of a request. Returns their ids."""
        self._failed.pop(request_id, None)
        dropped = frozenset(self._of_request.pop(request_id, ()))
        for sequence_id in dropped:
            self._consumers_left.pop(sequence_id, None)
        return dropped

    def _end(self, chunk: Chunk) -> set[int]:
        """Forgets the sequence of a chunk and what it alone still needed. Returns the ids."""
        sequence = chunk.sequence
        ended = {image.image_id for image in sequence.tokens.images}
        if not (chunk.is_whole or chunk.is_prefix):
            ended.add(sequence.sequence_id)
            if sequence.prefix_id is not None and self._count_consumer(sequence.prefix_id):
                ended.add(sequence.prefix_id)
        held = self._of_request.get(sequence.request_id, set())
        held -= ended
        if not held:
            self._of_request.pop(sequence.request_id, None)
        return ended

    def _count_consumer(self, prefix_id: int) -> bool:
        """Counts a sequence that has run behind a prefix. Returns True after the last one."""
        left = self._consumers_left.get(prefix_id, 0) - 1
        self._consumers_left[prefix_id] = left
        if left > 0:
            return False
        del self._consumers_left[prefix_id]
        return True


class Suspects:
    """Digests of sequences that have broken a step alone; the oldest are forgotten first. Digests are only
    computed for sequences as long as one of them."""

    def __init__(self, most: int = _MOST_SUSPECTS) -> None:
        self._most = most
        # The oldest first.
        self._lengths_by_digest: dict[bytes, int] = {}
        self._lengths: set[int] = set()

    def __len__(self) -> int:
        return len(self._lengths_by_digest)

    def add(self, sequence: TokenSequence) -> None:
        self.discard(sequence)
        self._lengths_by_digest[_digest(sequence)] = len(sequence)
        if len(self) > self._most:
            del self._lengths_by_digest[next(iter(self._lengths_by_digest))]
        self._lengths = {*self._lengths_by_digest.values()}

    def discard(self, sequence: TokenSequence) -> None:
        """Forgets a sequence that has run well."""
        if sequence in self:
            del self._lengths_by_digest[_digest(sequence)]
            self._lengths = {*self._lengths_by_digest.values()}

    def __contains__(self, sequence: TokenSequence) -> bool:
        return len(sequence) in self._lengths and _digest(sequence) in self._lengths_by_digest

    def isolate(self, stage: Step) -> list[Step]:
        """Splits a stage so that each suspect runs alone. Suspects that others wait for come first; these
        follow together, since they fail if it does. Other suspects come last: they may wait for any of the
        rest."""
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
