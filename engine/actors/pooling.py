"""The actor that pools hidden states. Lives on the device thread's event loop."""

import torch

from maxsimd.engine.actors.actor import Actor, Mailbox
from maxsimd.engine.actors.messages import Attach, Free, PooledStep, PoolingMessage, ScoringMessage
from maxsimd.pooling.dispatch import DispatchPooler


class PoolingActor(Actor[PoolingMessage]):
    """Owns the `DispatchPooler`, and so the state of sequences that are cut between steps."""

    def __init__(
        self,
        mailbox: Mailbox[PoolingMessage],
        pooler: DispatchPooler,
        scoring: Mailbox[ScoringMessage],
    ) -> None:
        super().__init__(mailbox)
        self._pooler = pooler
        self._scoring = scoring

    async def receive(self, message: PoolingMessage) -> None:
        if isinstance(message, Attach):
            await self._scoring.ask(message)
            return
        if isinstance(message, Free):
            for key in message.keys:
                self._pooler.free(key)
            await self._scoring.ask(message)
            return
        with torch.inference_mode():
            pooled = self._pooler.pool(message.states, message.cursor)
        tokens = sum(len(chunk) for chunk in message.cursor.chunks)
        await self._scoring.ask(PooledStep(message.step, message.known, tokens, pooled, message.started))
        for chunk in message.cursor.chunks:
            if chunk.is_last and not chunk.is_first:
                self._pooler.free(chunk.sequence.key)
