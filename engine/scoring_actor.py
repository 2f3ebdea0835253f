"""The actor that scores documents against queries. Lives on the device thread's event loop."""

import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.actor import Actor, Mailbox
from maxsimd.engine.messages import (
    Failure,
    Free,
    PooledStep,
    Result,
    SchedulerMessage,
    ScoringMessage,
    StepReport,
    Value,
)
from maxsimd.pooling.dispatch import Pooled
from maxsimd.pooling.maxsim import MaxSim
from maxsimd.pooling.ragged import Ragged
from maxsimd.pooling.registry import QueryRegistry
from maxsimd.pooling.similarity import score_pairs
from maxsimd.pooling.windows import WindowRegistry
from maxsimd.scheduler import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class _Output:
    """What goes to the host: item i of `items` belongs to sequence i, as a number where `scalar` is set."""

    sequences: list[Sequence]
    items: Ragged
    scalar: bool


class ScoringActor(Actor[ScoringMessage]):
    """Owns the query registry. Stage one keeps a query's embedding, stage two scores documents against it,
    in one batch a step whatever requests they belong to; only results leave the device, in one transfer.

    `labels` is the number of a classifier's labels; one label makes its logit a score.
    """

    def __init__(
        self,
        mailbox: Mailbox[ScoringMessage],
        similarity: str,
        maxsim: MaxSim,
        labels: int,
        scheduler: Mailbox[SchedulerMessage],
    ) -> None:
        super().__init__(mailbox)
        self._similarity = similarity
        self._maxsim = maxsim
        self._labels = labels
        self._scheduler = scheduler
        self._queries = QueryRegistry()
        self._windows = WindowRegistry()
        self._deliveries: set[asyncio.Task[None]] = set()

    async def receive(self, message: ScoringMessage) -> None:
        if isinstance(message, Free):
            self._queries.drop_request(message.request)
            self._windows.drop_request(message.request)
            return
        outputs: list[_Output] = []
        failures: list[Failure] = []
        with torch.inference_mode():
            for pooled in message.pooled:
                self._keep_queries(pooled)
                outputs += self._score_documents(pooled, failures)
                outputs += self._plain_items(pooled)
            flat = torch.cat(
                [output.items.values.reshape(-1).float() for output in outputs] or [torch.empty(0)]
            )
        if flat.device.type == "cpu":
            self._report(message, outputs, failures, flat)
            return
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        host.copy_(flat, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        # The next step may start meanwhile; this one's report follows when its numbers are there.
        delivery = asyncio.ensure_future(self._deliver(arrived, message, outputs, failures, host))
        self._deliveries.add(delivery)
        delivery.add_done_callback(self._deliveries.discard)

    def _keep_queries(self, pooled: Pooled) -> None:
        for sequence, item in pooled:
            if sequence.uses:
                self._queries.put(sequence, item)

    def _score_documents(self, pooled: Pooled, failures: list[Failure]) -> list[_Output]:
        documents, items = self._complete_documents(pooled)
        places: dict[int, int] = {}
        embeddings: list[torch.Tensor] = []
        pairs: list[tuple[int, int]] = []
        scored: list[Sequence] = []
        for i, document in enumerate(documents):
            query = document.query
            assert query is not None
            if query not in places:
                try:
                    embeddings.append(self._queries.get(query))
                except KeyError:
                    failures.append(Failure(document.request, "the query's embedding is gone"))
                    continue
                places[query] = len(embeddings) - 1
            pairs.append((places[query], i))
            scored.append(document)
        if not pairs:
            return []
        scores = score_pairs(self._similarity, Ragged.from_items(embeddings), items, pairs, self._maxsim)
        for document in scored:
            assert document.query is not None
            self._queries.release(document.query, document.windows)
            if document.document is not None:
                self._windows.release(document.document)
        return [_Output(scored, Ragged(scores[:, None], tuple(range(len(scores) + 1))), scalar=True)]

    def _complete_documents(self, pooled: Pooled) -> tuple[list[Sequence], Ragged]:
        """The documents that are complete with this step, and their embeddings; a document that is read
        through windows is when its last one is there."""
        if all(sequence.query is not None and sequence.document is None for sequence in pooled.sequences):
            return list(pooled.sequences), pooled.items
        documents, items = [], []
        for sequence, item in pooled:
            if sequence.query is None:
                continue
            whole = item if sequence.document is None else self._windows.put(sequence, item)
            if whole is not None:
                documents.append(sequence)
                items.append(whole)
        return documents, Ragged.from_items(items) if items else pooled.items

    def _plain_items(self, pooled: Pooled) -> list[_Output]:
        plain = [
            i for i, sequence in enumerate(pooled.sequences) if not sequence.uses and sequence.query is None
        ]
        if not plain:
            return []
        sequences = [pooled.sequences[i] for i in plain]
        items = pooled.items
        if len(plain) < len(pooled.sequences):
            items = Ragged.from_items([items[i] for i in plain])
        return [_Output(sequences, items, scalar=pooled.task == "classify" and self._labels == 1)]

    async def _deliver(
        self,
        arrived: torch.cuda.Event,
        message: PooledStep,
        outputs: list[_Output],
        failures: list[Failure],
        host: torch.Tensor,
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, arrived.synchronize)
        except Exception as error:
            reason = f"the device failed: {error}"
            failures += [Failure(chunk.sequence.request, reason) for chunk in message.step.chunks]
            outputs = []
        self._report(message, outputs, failures, host)

    def _report(
        self, message: PooledStep, outputs: list[_Output], failures: list[Failure], host: torch.Tensor
    ) -> None:
        results = _results(outputs, host.numpy())
        seconds = time.perf_counter() - message.started
        step = message.step
        self._scheduler.post(
            StepReport(step.id, len(step.chunks), step.num_tokens, results, failures, seconds)
        )


def _results(outputs: list[_Output], flat: NDArray[np.float32]) -> list[Result]:
    results = []
    place = 0
    for output in outputs:
        dim = output.items.values.shape[-1]
        if output.scalar:
            values: list[Value] = flat[place : place + len(output.sequences)].tolist()
        else:
            rows = flat[place : place + output.items.values.numel()].reshape(-1, dim)
            values = [rows[start:stop] for start, stop in pairwise(output.items.offsets)]
        place += output.items.values.numel()
        results += [
            Result(sequence.request, sequence.index, value)
            for sequence, value in zip(output.sequences, values, strict=True)
        ]
    return results
