"""The actor that scores documents against queries. Lives on the device thread's event loop."""

import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.actors.actor import Actor, Mailbox
from maxsimd.engine.actors.messages import (
    Attach,
    Free,
    PooledStep,
    Result,
    SchedulerMessage,
    ScoringMessage,
    StepReport,
)
from maxsimd.engine.cache import Arriving
from maxsimd.engine.requests import Value
from maxsimd.engine.scoring.document_scorer import DocumentScorer, Place
from maxsimd.engine.scoring.documents import Failure
from maxsimd.pooling.dispatch import Pooled
from maxsimd.pooling.ragged import Ragged
from maxsimd.pooling.transfer import to_host


@dataclass(frozen=True, slots=True, eq=False)
class _Output:
    """What goes to the host: item i of `items` is for place i, as a number where `scalar` is set."""

    places: list[Place]
    items: Ragged
    scalar: bool


class ScoringActor(Actor[ScoringMessage]):
    """Owns the `DocumentScorer`: stage one keeps a query's embedding, stage two scores documents against it.
    Only results leave the device, in one transfer a step.

    `labels` is the number of a classifier's labels; one label makes its logit a score.
    """

    def __init__(
        self,
        mailbox: Mailbox[ScoringMessage],
        scorer: DocumentScorer,
        labels: int,
        scheduler: Mailbox[SchedulerMessage],
    ) -> None:
        super().__init__(mailbox)
        self._scorer = scorer
        self._labels = labels
        self._scheduler = scheduler
        self._deliveries: set[asyncio.Task[None]] = set()

    async def receive(self, message: ScoringMessage) -> None:
        if isinstance(message, Free):
            self._scorer.drop_request(message.request)
            return
        if isinstance(message, Attach):
            self._scorer.attach(message.documents)
            return
        outputs: list[_Output] = []
        failures: list[Failure] = []
        with torch.inference_mode():
            for scored in self._scorer.score(message.pooled, message.known, failures):
                scores = Ragged(scored.scores[:, None], tuple(range(len(scored.places) + 1)))
                outputs.append(_Output(scored.places, scores, scalar=True))
            for pooled in message.pooled:
                outputs += self._plain_items(pooled)
            flat = torch.cat(
                [output.items.values.reshape(-1).float() for output in outputs] or [torch.empty(0)]
            )
        arriving = self._scorer.settle()
        host = to_host(flat)
        if self._scorer.device.type == "cpu":
            self._scorer.keep(arriving)
            self._report(message, outputs, failures, host)
            return
        arrived = torch.cuda.Event()
        arrived.record()
        # The next step may start meanwhile; this one's report follows when its numbers are there.
        delivery = asyncio.ensure_future(self._deliver(arrived, message, outputs, failures, host, arriving))
        self._deliveries.add(delivery)
        delivery.add_done_callback(self._deliveries.discard)

    def _plain_items(self, pooled: Pooled) -> list[_Output]:
        plain = [
            i for i, sequence in enumerate(pooled.sequences) if not sequence.uses and sequence.query is None
        ]
        if not plain:
            return []
        places: list[Place] = [pooled.sequences[i] for i in plain]
        items = pooled.items
        if len(plain) < len(pooled.sequences):
            items = Ragged.from_items([items[i] for i in plain])
        return [_Output(places, items, scalar=pooled.task == "classify" and self._labels == 1)]

    async def _deliver(
        self,
        arrived: torch.cuda.Event,
        message: PooledStep,
        outputs: list[_Output],
        failures: list[Failure],
        host: torch.Tensor,
        arriving: list[Arriving],
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, arrived.synchronize)
            self._scorer.keep(arriving)
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
            StepReport(step.id, len(step.chunks), message.tokens, results, failures, seconds)
        )


def _results(outputs: list[_Output], flat: NDArray[np.float32]) -> list[Result]:
    results = []
    position = 0
    for output in outputs:
        dim = output.items.values.shape[-1]
        if output.scalar:
            values: list[Value] = flat[position : position + len(output.places)].tolist()
        else:
            rows = flat[position : position + output.items.values.numel()].reshape(-1, dim)
            values = [rows[start:stop] for start, stop in pairwise(output.items.offsets)]
        position += output.items.values.numel()
        results += [
            Result(place.request, place.index, value)
            for place, value in zip(output.places, values, strict=True)
        ]
    return results
