"""Sparse vectors: weights of some words of a vocabulary, and hybrid items with dense vectors beside them.

A sparse vector is an item [entries, 2] in float32: a word's id, each once, and its weight.
"""

import copy
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.pooling.methods import Head, PoolingCursor, PoolingMethod, take_rows
from maxsimd.pooling.ragged import Ragged, offsets_of, runs, to_device
from maxsimd.scheduler import Role, TokenSequence

# The columns of an item.
COLUMNS = 2
# Memory for the numbers of all words, for the rows that are pooled at a time.
_PIECE_BYTES = 64 * 1024 * 1024
_BYTES_A_NUMBER = 4


class WordsHead(ABC):
    """A head that gives each row a number for every word: [n, hidden] to [n, num_words].

    A sparse vector has the `most` heaviest entries, or all for None. Texts in the `static_roles` do not use
    the model's output: each of their pooled tokens has its weight in `static_weights` [num_words]."""

    num_words: int
    most: int | None = None
    static_roles: frozenset[Role] = frozenset()
    static_weights: torch.Tensor | None = None

    @abstractmethod
    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def weights(self, numbers: torch.Tensor) -> torch.Tensor:
        """The weights of such numbers: 0 or more, rising with the number."""

    def without_limit(self) -> Self:
        """The same head without `most`. For comparisons: rounding may decide which entries are heaviest."""
        unlimited = copy.copy(self)
        unlimited.most = None
        return unlimited


class WordsPool(PoolingMethod):
    """Pools a number for each word and token into one sparse vector per sequence, a few rows at a time: a
    whole step's numbers would take gigabytes. The state of a chunk is one number per word."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        assert isinstance(head, WordsHead)
        self._head = head
        self._most_rows = max(1, _PIECE_BYTES // (_BYTES_A_NUMBER * head.num_words))

    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        if not any(self._is_static(chunk.sequence) for chunk in cursor.chunks):
            return self._read(hidden, cursor)
        read = self._read(hidden, cursor.select(lambda chunk: not self._is_static(chunk.sequence)))
        complete = [chunk.sequence for chunk in cursor.chunks if chunk.is_last]
        looked_up = self._looked_up([each for each in complete if self._is_static(each)])
        # The joined items are those of `read`, then the static ones.
        of_read, of_static = iter(range(len(read))), iter(range(len(read), len(complete)))
        order = [next(of_static if self._is_static(each) else of_read) for each in complete]
        return Ragged.join([read, looked_up]).take(order)

    def _is_static(self, sequence: TokenSequence) -> bool:
        return sequence.payload.role in self._head.static_roles

    def _looked_up(self, sequences: list[TokenSequence]) -> Ragged:
        weights = self._head.static_weights
        assert weights is not None
        tokens = [np.unique(sequence.tokens.pooled_ids.astype(np.int64)) for sequence in sequences]
        found = [weights[to_device(each, weights.device)] for each in tokens]
        items = [
            torch.stack([to_device(ids, part.device).float(), part], dim=1)[part != 0]
            for ids, part in zip(tokens, found, strict=True)
        ]
        return Ragged.from_items(items) if items else Ragged(weights.new_empty(0, COLUMNS), (0,))

    def _read(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        """The sparse vectors that the model gives."""
        rows, lengths = cursor.pooled_rows()
        parts: list[Ragged] = []
        start = 0
        for group in runs(lengths, self._most_rows, self._most_rows):
            of_group = lengths[group]
            stop = start + sum(of_group)
            finished = []
            pooled = self._pooled(hidden, rows[start:stop], of_group)
            for chunk, part in zip(cursor.chunks[group], pooled, strict=True):
                if chunk.is_last:
                    finished.append(self._joined([*self._earlier(chunk), part]))
                else:
                    self._keep(chunk, part)
            if finished:
                parts.append(entries_of(self._finished(torch.stack(finished)), self._head.most))
            start = stop
        return Ragged.join(parts) if parts else Ragged(hidden.new_empty(0, COLUMNS).float(), (0,))

    def comparable(self, item: torch.Tensor) -> torch.Tensor:
        """A weight for every word, [1, words]: rounding may decide which of them are exactly 0."""
        return dense_of(item, self._head.num_words)[None]

    def _pooled(
        self, hidden: torch.Tensor, rows: NDArray[np.int64], lengths: list[int]
    ) -> list[torch.Tensor]:
        """One number per word, [words], for each chunk of a group. `rows` are the rows of its tokens."""
        if len(lengths) > 1:
            numbers = self._head(take_rows(hidden, rows))  # [rows, words]
            return [self._reduced(part) for part in numbers.split(lengths)]
        pieces = [rows[first : first + self._most_rows] for first in range(0, len(rows), self._most_rows)]
        reduced = [self._reduced(self._head(take_rows(hidden, piece))) for piece in pieces or [rows]]
        return [self._joined(reduced)]

    @abstractmethod
    def _reduced(self, numbers: torch.Tensor) -> torch.Tensor:
        """Reduces the numbers of some tokens [n, words] to one per word, [words]."""

    @abstractmethod
    def _over(self, numbers: torch.Tensor) -> torch.Tensor:
        """Reduces numbers [n, words] to one per word, [words]."""

    def _joined(self, reduced: list[torch.Tensor]) -> torch.Tensor:
        """Reduces the results of several runs of tokens to one number per word."""
        return reduced[0] if len(reduced) == 1 else self._over(torch.stack(reduced))

    @abstractmethod
    def _finished(self, pooled: torch.Tensor) -> torch.Tensor:
        """The weights of whole sequences, [n, words]."""


class MaxWordsPool(WordsPool, name="max-words"):
    """Each word's greatest weight among the tokens: the weight of its greatest number.

    Source: SPLADE v2, Formal et al. 2021 (arXiv 2109.10086), eq. 6."""

    def _reduced(self, numbers: torch.Tensor) -> torch.Tensor:
        if not len(numbers):
            return numbers.new_full((self._head.num_words,), -torch.inf)
        return self._over(numbers)

    def _over(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.amax(dim=0)

    def _finished(self, pooled: torch.Tensor) -> torch.Tensor:
        return self._head.weights(pooled)


class SumWordsPool(WordsPool, name="sum-words"):
    """The sum of each word's weights over the tokens.

    Source: SPLADE, Formal et al. 2021 (arXiv 2107.05720), eq. 1."""

    def _reduced(self, numbers: torch.Tensor) -> torch.Tensor:
        return self._over(self._head.weights(numbers))

    def _over(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.sum(dim=0)

    def _finished(self, pooled: torch.Tensor) -> torch.Tensor:
        return pooled


class GivenWordsPool(MaxWordsPool, name="given-words"):
    """For sequences with one row each that already has the weights of all words."""

    def _read(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        rows = take_rows(hidden, np.array(cursor.starts, dtype=np.int64))
        return entries_of(rows, self._head.most)


class GivenWords(WordsHead):
    """Stands in for a head whose rows already are the weights of all words."""

    def __init__(self, head: WordsHead) -> None:
        self.num_words, self.most = head.num_words, head.most
        self.static_roles, self.static_weights = head.static_roles, head.static_weights

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def weights(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers


def entries_of(weights: torch.Tensor, most: int | None = None) -> Ragged:
    """The words with a weight other than 0 in each row of `weights` [n, words], at most the `most` heaviest.
    Waits for the device, which alone knows their number."""
    if most is not None and most < weights.shape[1]:
        heaviest = torch.topk(weights, most, dim=1).indices
        weights = torch.zeros_like(weights).scatter(1, heaviest, weights.gather(1, heaviest))
    row, word = weights.nonzero(as_tuple=True)
    values = torch.stack([word.float(), weights[row, word].float()], dim=1)  # [entries, 2]
    return Ragged.from_lengths(values, torch.bincount(row, minlength=len(weights)).cpu().numpy())


def dense_of(item: torch.Tensor, num_words: int) -> torch.Tensor:
    """An item [entries, 2] as the weights of all words, [num_words]."""
    weights = torch.zeros(num_words, device=item.device, dtype=torch.float32)
    return weights.index_put((item[:, 0].long(),), item[:, 1])


class TokenWeights(ABC):
    """A head that gives each row the weight of its token: [n, hidden] to [n, 1], 0 or more. Ids in
    `weightless` have no weight. `words` maps ids to word ids if several tokens count as one word."""

    weightless: NDArray[np.int64]
    words: NDArray[np.int64] | None = None

    @abstractmethod
    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


class HybridHead(TokenWeights):
    """A head that gives each row a vector and, in the last column, the weight of its token: [n, dim + 1]."""

    @abstractmethod
    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """The vectors [n, dim] of whole sequences, from the rows of their first tokens."""


class _WholeSequences(PoolingMethod):
    """Base of the methods that read all tokens, pooled or not. The state of a chunk is its rows."""

    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        finished, parts = [], []
        for chunk, start in zip(cursor.chunks, cursor.starts, strict=True):
            rows = take_rows(hidden, np.arange(start, start + len(chunk)))
            if chunk.is_last:
                parts += [*self._earlier(chunk), rows]
                finished.append(chunk.sequence)
            else:
                self._keep(chunk, rows.clone())
        if not finished:
            return self._items(take_rows(hidden, np.empty(0, dtype=np.int64)), [])
        return self._items(parts[0] if len(parts) == 1 else torch.cat(parts), finished)

    @abstractmethod
    def _items(self, rows: torch.Tensor, sequences: list[TokenSequence]) -> Ragged:
        """The items of whole sequences. `rows` [all tokens, hidden] are theirs, end to end."""


class TokenWeightsPool(_WholeSequences, name="token-weights"):
    """The tokens of a sequence with their weights: a sparse vector [entries, 2], in which weights may be 0.

    Source: the lexical weights of BGE M3, Chen et al. 2024 (arXiv 2402.03216), section 3.2."""

    def _items(self, rows: torch.Tensor, sequences: list[TokenSequence]) -> Ragged:
        assert isinstance(self.head, TokenWeights)
        heaviest = heaviest_of(sequences, self.head(rows)[:, 0], self.head.weightless, self.head.words)
        ids = to_device(heaviest.ids.astype(np.float32), rows.device)
        return Ragged.from_lengths(torch.stack([ids, heaviest.weights], dim=1), heaviest.counts)

    def comparable(self, item: torch.Tensor) -> torch.Tensor:
        """The weights, [entries, 1], without the ids."""
        return item[:, 1:]


class HybridPool(_WholeSequences, name="hybrid"):
    """One row per token, [tokens, dim + 2]: its vector, its id, and its weight, or 0 if the id came before.
    The first row has the vector of the whole sequence instead of its own."""

    def _items(self, rows: torch.Tensor, sequences: list[TokenSequence]) -> Ragged:
        head = self.head
        assert isinstance(head, HybridHead)
        lengths = [len(sequence) for sequence in sequences]
        made = head(rows)  # [tokens, dim + 1]
        vectors = made[:, :-1].clone()
        starts = to_device(offsets_of(lengths)[:-1], rows.device)
        vectors[starts] = head.whole(rows[starts])
        heaviest = heaviest_of(sequences, made[:, -1], head.weightless)
        weights = torch.zeros(len(rows), device=rows.device, dtype=torch.float32)
        weights[to_device(heaviest.rows, rows.device)] = heaviest.weights
        ids = np.concatenate([*(sequence.tokens.ids for sequence in sequences), np.empty(0, dtype=np.int32)])
        numbers = torch.stack([to_device(ids.astype(np.float32), rows.device), weights], dim=1)
        return Ragged.from_lengths(torch.cat([vectors, numbers], dim=1), lengths)

    def comparable(self, item: torch.Tensor) -> torch.Tensor:
        """All columns without the ids."""
        return torch.cat([item[:, :-2], item[:, -1:]], dim=1)


class Heaviest(NamedTuple):
    """The distinct tokens of some sequences, in the sequences' order and by ascending id: id, first row and
    greatest weight. `counts` is the number of each sequence's tokens."""

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
    """The distinct tokens without `weightless` ids; with `words`, the distinct words. `weights` [all tokens]
    are those of the sequences' tokens, end to end. This does not wait for the device."""
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
    greatest = torch.zeros(num_entries, device=weights.device, dtype=torch.float32).scatter_reduce(
        0, owner, weights, "amax"
    )
    all_ids = np.concatenate(ids)
    weighing = np.flatnonzero(~np.isin(all_ids, weightless))
    return Heaviest(
        all_ids[weighing],
        np.concatenate(first)[weighing],
        greatest[to_device(weighing, weights.device)],
        np.array(counts, dtype=np.int64),
    )
