"""Token pooling: fewer vectors a document, each the mean of a cluster of similar ones."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from maxsimd.pooling.ragged import Ragged
from maxsimd.scheduler import Role, TokenSequence

if TYPE_CHECKING:
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling


@dataclass(frozen=True, slots=True, eq=False)
class TokenPooling:
    """Merges the token embeddings of sequences in the given roles.

    Source: Clavié, Chaffin & Adams 2024, "Reducing the Footprint of Multi-Vector Retrieval with Minimal
    Performance Impact via Token Pooling" (arXiv 2409.14683); clustered by sentence-transformers.
    """

    method: "HierarchicalTokenPooling"
    roles: frozenset[Role]

    def pool(self, items: Ragged, sequences: tuple[TokenSequence, ...]) -> Ragged:
        """Items [tokens, dim] of these sequences, those in the roles with fewer rows."""
        if not any(sequence.payload.role in self.roles for sequence in sequences):
            return items
        return Ragged.from_items(
            [
                self.method.pool_one(item) if sequence.payload.role in self.roles else item
                for sequence, item in zip(sequences, items, strict=True)
            ]
        )


def merging_documents(factor: float, left_alone: int = 1) -> TokenPooling:
    """
    Documents with about one vector for every `factor` tokens; the first
    `left_alone` tokens are left as they are.
    """
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

    method = HierarchicalTokenPooling(factor, num_protected_tokens=left_alone)
    return TokenPooling(method, frozenset({Role.DOCUMENT}))
