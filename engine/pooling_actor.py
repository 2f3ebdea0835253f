"""The actor that pools hidden states. Lives on the device thread's event loop."""

import torch

from maxsimd.engine.actor import Actor, Mailbox
from maxsimd.engine.messages import PooledStep, PoolingMessage, Release, ScoringMessage
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
        self._cut_sequences: dict[int, set[int]] = {}

    async def receive(self, message: PoolingMessage) -> None:
        if isinstance(message, Release):
            for key in self._cut_sequences.pop(message.request, ()):
                self._pooler.free(key)
            await self._scoring.ask(message)
            return
        for chunk in message.cursor.chunks:
            if not chunk.is_last:
                self._cut_sequences.setdefault(chunk.sequence.request, set()).add(chunk.sequence.key)
        with torch.inference_mode():
            pooled = self._pooler.pool(message.states, message.cursor)
        await self._scoring.ask(PooledStep(message.step, pooled, message.started))
        for chunk in message.cursor.chunks:
            if chunk.is_last and not chunk.is_first:
                self._free(chunk.sequence.request, chunk.sequence.key)

    def _free(self, request: int, key: int) -> None:
        self._pooler.free(key)
        keys = self._cut_sequences.get(request, set())
        keys.discard(key)
        if not keys:
            self._cut_sequences.pop(request, None)
