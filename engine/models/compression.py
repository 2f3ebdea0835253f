"""Token compression: the rows of a document become fewer behind some layers, each the mean of its neighbors.

Source: the card of BAAI/bge-reranker-v2.5-gemma2-lightweight and FlagEmbedding's `CostWiseGemmaModel`.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Compression:
    """Behind each of the `layers`, counted from 1 and ascending, every `ratio` rows of a document become
    their mean."""

    ratio: int
    layers: tuple[int, ...]

    def __str__(self) -> str:
        behind = " and ".join(map(str, self.layers))
        layers = "layers" if len(self.layers) > 1 else "layer"
        return f"every {self.ratio} rows of a document become one behind {layers} {behind}"


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Which rows of a padded batch are attended to, and which of these are a document's: bool [n, rows]
    each."""

    attended: torch.Tensor
    of_document: torch.Tensor

    @property
    def last(self) -> torch.Tensor:
        """The last attended row of each sequence [n]; padding stands behind it."""
        return self.attended.sum(dim=1) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The neighbouring rows that become one: the `first` of each group, and its `size`, 0 for padding; int64
    [n, longest] each. No group has more than `most` rows."""

    first: torch.Tensor
    size: torch.Tensor
    most: int

    def to(self, device: torch.device) -> "Groups":
        return Groups(self.first.to(device), self.size.to(device), self.most)

    def means(self, states: torch.Tensor) -> torch.Tensor:
        """The mean of each group's rows of `states` [n, rows, hidden], taken in float32: [n, longest,
        hidden]. It depends on the group's own rows alone."""
        total = states.new_zeros((*self.first.shape, states.shape[-1]), dtype=torch.float32)
        for i in range(self.most):
            rows = (self.first + i).clamp(max=states.shape[1] - 1)[..., None]
            taken = states.gather(1, rows.expand(-1, -1, states.shape[-1])).float()
            total += torch.where((i < self.size)[..., None], taken, 0.0)
        return (total / self.size.clamp(min=1)[..., None]).to(states.dtype)


def compressed(rows: Rows, ratio: int) -> tuple[Groups, Rows]:
    """How the rows of each sequence are grouped where those of its document become fewer, the last group
    perhaps with fewer rows than the others; and the rows that there are then."""
    within = rows.of_document.cumsum(dim=1) - 1  # [n, rows], counted from the document's first row
    begins = rows.attended & (~rows.of_document | (within % ratio == 0))
    number = (begins.cumsum(dim=1) - 1).clamp(min=0)  # [n, rows], the group of each row
    size = torch.zeros(len(begins), int(begins.sum(dim=1).max()), dtype=torch.int64)
    size.scatter_add_(1, number, rows.attended.long())
    first = torch.zeros_like(size)
    sequence, row = begins.nonzero(as_tuple=True)
    first[sequence, number[sequence, row]] = row
    attended = size > 0
    return Groups(first, size, ratio), Rows(attended, rows.of_document.gather(1, first) & attended)
