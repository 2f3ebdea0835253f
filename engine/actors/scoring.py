"""The actors that pool hidden states and score documents, on the device thread's event loop."""

import torch

from maxsimd.engine.actors.actor import (
    Actor,
    Commit,
    DropRequest,
    ForgetAttempt,
    Mailbox,
    Pool,
    PoolingMessage,
    Score,
    ScoringMessage,
)
from maxsimd.engine.scoring.scorer import Arrival, DocumentScorer, Output, StepOutcome
from maxsimd.pooling.dispatch import DispatchPooler, Pooled
from maxsimd.pooling.ragged import to_host


class ScoringActor(Actor[ScoringMessage]):
    """Owns the `DocumentScorer`, which stores queries and scores documents against them.

    Only results leave the device, in one transfer per step. A classifier with one of `num_labels` labels has
    its logit as a score."""

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
            case ForgetAttempt():
                self._scorer.forget(message.sequence_ids)
            case DropRequest():
                self._scorer.drop_request(message.request_id)
        return None

    def _score(self, message: Score) -> StepOutcome:
        scored = self._scorer.score(message.pooled, message.skipped, message.cached)
        outputs = [*scored.outputs]
        for pooled in message.pooled:
            outputs += self._plain_items(pooled)
        flat = torch.cat([output.items.values.reshape(-1).float() for output in outputs] or [torch.empty(0)])
        host = to_host(flat)
        return StepOutcome(
            tuple(outputs),
            host,
            tuple(scored.failures),
            scored.releases,
            tuple(scored.new_embeddings),
            record_arrival(self._scorer.device),
        )

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


def record_arrival(device: torch.device) -> Arrival | None:
    """An event that completes when all work launched on a CUDA device so far is done. None for other devices,
    for which `to_host` has waited. Waiting for it sleeps and does not spin."""
    if device.type != "cuda":
        return None
    # Waiting for another kind of event keeps a core busy.
    event = torch.cuda.Event(blocking=True)
    # By its device: the current stream may belong to another GPU.
    event.record(torch.cuda.current_stream(device))
    return event


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
