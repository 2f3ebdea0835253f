"""The actor that runs the model. Lives on the device thread's event loop."""

import logging
import time

import torch

from maxsimd.engine.actors.actor import Actor, Mailbox
from maxsimd.engine.actors.messages import (
    Attach,
    Free,
    Hidden,
    PoolingMessage,
    Release,
    RunnerMessage,
    SchedulerMessage,
    StepReport,
)
from maxsimd.engine.cache import EmbeddingCache
from maxsimd.engine.execution import ModelRunner
from maxsimd.engine.scoring.documents import Failure, KnownSequence
from maxsimd.pooling.cursor import PoolingCursor
from maxsimd.scheduler import Step

log = logging.getLogger(__name__)


class RunnerActor(Actor[RunnerMessage]):
    """Owns the model and the policy for steps that fail.

    A step flows through pooling and scoring before the next one is run. Whatever fails on the way fails the
    step, which is then tried again in halves, until the sequence that breaks it stands alone; only that
    one's request fails.
    """

    def __init__(
        self,
        mailbox: Mailbox[RunnerMessage],
        runner: ModelRunner,
        pooling: Mailbox[PoolingMessage],
        scheduler: Mailbox[SchedulerMessage],
        cache: EmbeddingCache | None,
    ) -> None:
        super().__init__(mailbox)
        self._runner = runner
        self._cache = cache
        self._pooling = pooling
        self._scheduler = scheduler
        self._cut_sequences: dict[int, set[int]] = {}
        self._prefix_uses: dict[int, int] = {}

    async def receive(self, message: RunnerMessage) -> None:
        if isinstance(message, Attach):
            await self._pooling.ask(message)
            return
        if isinstance(message, Release):
            keys = frozenset(self._cut_sequences.pop(message.request, ()))
            for key in keys:
                self._runner.free(key)
                self._prefix_uses.pop(key, None)
            await self._pooling.ask(Free(message.request, keys))
            return
        for chunk in message.chunks:
            if chunk.is_prefix:
                self._prefix_uses.setdefault(chunk.sequence.key, chunk.sequence.uses)
            if chunk.is_prefix or not chunk.is_whole:
                self._cut_sequences.setdefault(chunk.sequence.request, set()).add(chunk.sequence.key)
        await self._run(message)

    async def _run(self, step: Step) -> None:
        started = time.perf_counter()
        try:
            new, known = self._without_known(step)
            if new.chunks:
                states, cursor = self._runner.forward(new)
            else:
                states, cursor = torch.empty(0, 0), PoolingCursor((), ())
            await self._pooling.ask(Hidden(step, known, states, cursor, started))
        except Exception as error:
            await self._recover(step, error)
        else:
            self._free_finished(step)

    def _without_known(self, step: Step) -> tuple[Step, list[KnownSequence]]:
        """The step without sequences whose embeddings are kept by now, or come with an equal sequence before
        them, and these sequences: equal documents that waited together are run once."""
        if self._cache is None or not any(chunk.sequence.cache_key for chunk in step.chunks):
            return step, []
        new, known = [], []
        coming: set[bytes] = set()
        for chunk in step.chunks:
            key = chunk.sequence.cache_key
            if key is None or not chunk.is_whole or chunk.sequence.windows > 1:
                new.append(chunk)
            elif key in coming:
                known.append(KnownSequence(chunk.sequence, None))
            elif (entry := self._cache.get(key)) is not None:
                known.append(KnownSequence(chunk.sequence, entry))
            else:
                coming.add(key)
                new.append(chunk)
        return Step(step.id, tuple(new)), known

    async def _recover(self, step: Step, error: Exception) -> None:
        out_of_memory = _is_out_of_memory(error)
        if out_of_memory:
            torch.cuda.empty_cache()
            self._report(step, chunks=0, out_of_memory=True)
        if len(step.chunks) > 1:
            log.warning("a step of %d sequences failed and is tried in halves: %s", len(step.chunks), error)
            for half in step.halves():
                await self._run(half)
            return
        log.exception("a sequence of %d tokens cannot be run", step.num_tokens, exc_info=error)
        request = step.chunks[0].sequence.request
        reason = (
            "the device has not enough memory for this input" if out_of_memory else "the model failed on it"
        )
        self._report(step, chunks=1, failures=[Failure(request, reason)])

    def _report(
        self, step: Step, chunks: int, failures: list[Failure] | None = None, out_of_memory: bool = False
    ) -> None:
        self._scheduler.post(StepReport(step.id, chunks, 0, [], failures or [], 0.0, out_of_memory))

    def _free_finished(self, step: Step) -> None:
        for chunk in step.chunks:
            if chunk.is_last and not chunk.is_first and not chunk.is_prefix:
                self._free(chunk.sequence.request, chunk.sequence.key)
                if chunk.sequence.prefix is not None:
                    self._count_use(chunk.sequence.request, chunk.sequence.prefix)

    def _count_use(self, request: int, prefix: int) -> None:
        """Counts a sequence as done with its prefix, which goes after the last."""
        left = self._prefix_uses.get(prefix, 0) - 1
        self._prefix_uses[prefix] = left
        if left <= 0:
            del self._prefix_uses[prefix]
            self._free(request, prefix)

    def _free(self, request: int, key: int) -> None:
        self._runner.free(key)
        keys = self._cut_sequences.get(request, set())
        keys.discard(key)
        if not keys:
            self._cut_sequences.pop(request, None)


def _is_out_of_memory(error: Exception) -> bool:
    # torch has a class of its own for the GPU, but says it in words on the CPU.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
