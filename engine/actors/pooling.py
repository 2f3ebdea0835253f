"""The actor that pools hidden states. Lives on the device thread's event loop."""

import torch

from maxsimd.engine.actors.actor import Actor, Mailbox
from maxsimd.engine.actors.messages import Pool, PoolingMessage
from maxsimd.pooling.dispatch import DispatchPooler, Pooled


class PoolingActor(Actor[PoolingMessage]):
    """Owns the `DispatchPooler`, and so the state of sequences that are cut between steps.

    Pooling a step again, when a later stage has failed, overwrites the same state."""

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
