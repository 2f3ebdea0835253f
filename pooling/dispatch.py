"""Pools each chunk with the method of its task, and gathers finished items."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import maxsimd.pooling.sparse  # noqa: F401 (adds its methods)
from maxsimd.pooling.methods import (
    CONCATENATED,
    METHODS,
    ConcatenatedPool,
    Head,
    PoolingCursor,
    PoolingMethod,
)
from maxsimd.pooling.ragged import Ragged
from maxsimd.scheduler import Role, TokenSequence

if TYPE_CHECKING:
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling


@dataclass(frozen=True, slots=True, eq=False)
class TokenPooling:
    """Merges the token embeddings of sequences in the given roles.

    Source: Clavié, Chaffin & Adams 2024, "Reducing the Footprint of Multi-Vector Retrieval with Minimal
    Performance Impact via Token Pooling" (arXiv 2409.14683); clustered by sentence-transformers."""

    method: "HierarchicalTokenPooling"
    roles: frozenset[Role]

    def pool(self, items: Ragged, sequences: tuple[TokenSequence, ...]) -> Ragged:
        """Merges the items [tokens, dim] of the sequences in the roles."""
        if not any(sequence.payload.role in self.roles for sequence in sequences):
            return items
        return Ragged.from_items(
            [
                self.method.pool_one(item) if sequence.payload.role in self.roles else item
                for sequence, item in zip(sequences, items, strict=True)
            ]
        )


def merging_documents(factor: float, left_alone: int = 1) -> TokenPooling:
    """Merges documents to about one vector per `factor` tokens. The first `left_alone` tokens stay."""
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

    method = HierarchicalTokenPooling(factor, num_protected_tokens=left_alone)
    return TokenPooling(method, frozenset({Role.DOCUMENT}))


# The task whose items are one vector per token.
TOKENS = "token_embed"


def pooling_method(name: str, head: Head) -> PoolingMethod:
    """Makes the method of a name, or of several joined names, with a head for the pooled rows."""
    if CONCATENATED in name:
        return ConcatenatedPool(head, [METHODS[each] for each in name.split(CONCATENATED)])
    return METHODS[name](head)


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """The finished sequences of one task in one step; item i of `items` belongs to `sequences[i]`."""

    task: str
    sequences: tuple[TokenSequence, ...]
    items: Ragged

    def __iter__(self) -> Iterator[tuple[TokenSequence, torch.Tensor]]:
        return zip(self.sequences, self.items, strict=True)


class DispatchPooler:
    """Owns one pooling method per task, and the token pooling behind them."""

    def __init__(
        self, methods: Mapping[str, PoolingMethod], token_pooling: TokenPooling | None = None
    ) -> None:
        self._methods = dict(methods)
        self._token_pooling = token_pooling

    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> list[Pooled]:
        """Pools `hidden` [rows, hidden]: one entry per task with finished sequences. Others have state until
        `free`."""
        pooled = []
        # A prefix runs for its keys and values alone.
        cursor = cursor.select(lambda chunk: not chunk.is_prefix)
        for task in dict.fromkeys(chunk.sequence.payload.task for chunk in cursor.chunks):
            group = cursor.select(lambda chunk, task=task: chunk.sequence.payload.task == task)  # type: ignore[misc]
            items = self._methods[task].pool(hidden, group)
            sequences = tuple(chunk.sequence for chunk in group.chunks if chunk.is_last)
            if self._token_pooling is not None and task == TOKENS:
                items = self._token_pooling.pool(items, sequences)
            if sequences:
                pooled.append(Pooled(task, sequences, items))
        return pooled

    def comparable(self, pooled: Pooled) -> Iterator[tuple[TokenSequence, torch.Tensor]]:
        """The sequences with their items as comparable numbers."""
        method = self._methods[pooled.task]
        return ((sequence, method.comparable(item)) for sequence, item in pooled)

    def free(self, sequence_id: int) -> None:
        for method in self._methods.values():
            method.free(sequence_id)

    @property
    def num_states(self) -> int:
        return sum(method.num_states for method in self._methods.values())
