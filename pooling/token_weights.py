"""Items that are made of weights of a sequence's own tokens: sparse vectors, and these with dense vectors
beside them. A token that comes several times counts once, by its greatest weight.
"""

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.pooling.cursor import PoolingCursor, take_rows
from maxsimd.pooling.methods import Head, PoolingMethod
from maxsimd.pooling.ragged import Ragged, offsets_of
from maxsimd.pooling.transfer import to_device
from maxsimd.scheduler import TokenSequence


class TokenWeights(ABC):
    """A head that gives each row the weight of its token: [n, hidden] to [n, 1], 0 or more. Tokens with the
    ids in `weightless` have none. Where several tokens count as one word, `words` has for each id that of the
    word; None where each is its own."""

    weightless: NDArray[np.int64]
    words: NDArray[np.int64] | None = None

    @abstractmethod
    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


class HybridHead(TokenWeights):
    """A head that gives each row a vector and, in the last column, the weight of its token: [n, dim + 1]."""

    @abstractmethod
    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """The vectors [n, dim] of whole sequences, by the row of each one's first token."""


class _WholeSequences(PoolingMethod):
    """Common ground of the methods that look at all tokens of a sequence, those too that take no part in
    pooling. Rows of unfinished sequences are held as they are, by the token at which each chunk began."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._chunks: dict[int, dict[int, torch.Tensor]] = {}

    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        finished, parts = [], []
        for chunk, start in zip(cursor.chunks, cursor.starts, strict=True):
            sequence_id = chunk.sequence.sequence_id
            rows = np.arange(start, start + len(chunk))
            if not chunk.is_last:
                self._chunks.setdefault(sequence_id, {})[chunk.start] = take_rows(hidden, rows).clone()
                continue
            earlier = {} if chunk.is_first else self._chunks.get(sequence_id, {})
            parts += [earlier[first] for first in sorted(earlier)]
            parts.append(take_rows(hidden, rows))
            finished.append(chunk.sequence)
        if not finished:
            return self._items(take_rows(hidden, np.empty(0, dtype=np.int64)), [])
        return self._items(parts[0] if len(parts) == 1 else torch.cat(parts), finished)

    def free(self, sequence_id: int) -> None:
        self._chunks.pop(sequence_id, None)

    @property
    def num_states(self) -> int:
        return len(self._chunks)

    @abstractmethod
    def _items(self, rows: torch.Tensor, sequences: list[TokenSequence]) -> Ragged:
        """The items of whole sequences, of their rows [tokens of all, hidden] end to end."""


class TokenWeightsPool(_WholeSequences):
    """The tokens of a sequence with their weights, [entries, 2]: a sparse vector (`maxsimd.pooling.sparse`),
    in which weights may be 0.

    Source: the lexical weights of BGE M3, Chen et al. 2024 (arXiv 2402.03216), section 3.2."""

    def _items(self, rows: torch.Tensor, sequences: list[TokenSequence]) -> Ragged:
        assert isinstance(self.head, TokenWeights)
        heaviest = heaviest_of(sequences, self.head(rows)[:, 0], self.head.weightless, self.head.words)
        ids = to_device(heaviest.ids.astype(np.float32), rows.device)
        return Ragged.from_lengths(torch.stack([ids, heaviest.weights], dim=1), heaviest.counts)

    def comparable(self, item: torch.Tensor) -> torch.Tensor:
        """The weights, [entries, 1]: the ids are no numbers to compare by."""
        return item[:, 1:]


class HybridPool(_WholeSequences):
    """A row a token, [tokens, dim + 2]: its vector, its id, and its weight where it is the first of its id,
    else 0. The first row has the vector of the whole sequence in place of its own."""

    def _items(self, rows: torch.Tensor, sequences: list[TokenSequence]) -> Ragged:
        head = self.head
        assert isinstance(head, HybridHead)
        lengths = [len(sequence) for sequence in sequences]
        made = head(rows)  # [tokens, dim + 1]
        vectors = made[:, :-1].clone()
        starts = to_device(offsets_of(lengths)[:-1], rows.device)
        vectors[starts] = head.whole(rows[starts])
        heaviest = heaviest_of(sequences, made[:, -1], head.weightless)
        weights = torch.zeros(len(rows), device=rows.device)
        weights[to_device(heaviest.rows, rows.device)] = heaviest.weights
        ids = np.concatenate([*(sequence.tokens.ids for sequence in sequences), np.empty(0, dtype=np.int32)])
        numbers = torch.stack([to_device(ids.astype(np.float32), rows.device), weights], dim=1)
        return Ragged.from_lengths(torch.cat([vectors, numbers], dim=1), lengths)

    def comparable(self, item: torch.Tensor) -> torch.Tensor:
        """Without the ids, which are no numbers to compare by."""
        return torch.cat([item[:, :-2], item[:, -1:]], dim=1)


class Heaviest(NamedTuple):
    """Each token of some sequences once, one sequence after the other and ids ascending: its id, the first of
    its rows, and its greatest weight; and how many each sequence has."""

    ids: NDArray[np.int64]
    rows: NDArray[np.int64]
    weights: torch.Tensor
    counts: NDArray[np.int64]


def heaviest_of(
    sequences: list[TokenSequence],
    weights: torch.Tensor,
    weightless: NDArray[np.int64],
    words: NDArray[np.int64] | None = None,
) -> Heaviest:
    """Of the `weights` [tokens of all] of the sequences' tokens end to end, without `weightless` ids, and by
    the ids of their `words` if there are any. Which tokens there are the CPU knows, so that nothing waits for
    the device."""
    offsets = offsets_of([len(sequence) for sequence in sequences])
    ids, first, inverse, counts = [], [], [], []
    num_entries = 0
    for sequence, (start, _) in zip(sequences, pairwise(offsets.tolist()), strict=True):
        own = sequence.tokens.ids.astype(np.int64)
        unique, at, of_token = np.unique(
            own if words is None else words[own], return_index=True, return_inverse=True
        )
        ids.append(unique)
        first.append(at + start)
        inverse.append(of_token + num_entries)
        num_entries += len(unique)
        counts.append(int((~np.isin(unique, weightless)).sum()))
    if not ids:
        none = np.empty(0, dtype=np.int64)
        return Heaviest(none, none, weights[:0], none)
    owner = to_device(np.concatenate(inverse), weights.device)
    greatest = torch.zeros(num_entries, device=weights.device).scatter_reduce(0, owner, weights, "amax")
    all_ids = np.concatenate(ids)
    weighing = np.flatnonzero(~np.isin(all_ids, weightless))
    return Heaviest(
        all_ids[weighing],
        np.concatenate(first)[weighing],
        greatest[to_device(weighing, weights.device)],
        np.array(counts, dtype=np.int64),
    )


TOKEN_WEIGHT_METHODS: dict[str, type[PoolingMethod]] = {
    "token-weights": TokenWeightsPool,
    "hybrid": HybridPool,
}
