"""Sparse vectors: weights of some words of a vocabulary. As an item one is a row a word, [entries, 2] in
float32: the word's id, each once, and its weight.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.pooling.methods import Head, PoolingCursor, PoolingMethod, take_rows
from maxsimd.pooling.ragged import Ragged, offsets_of, to_device
from maxsimd.scheduler import Role, TokenSequence

# The columns of an item.
COLUMNS = 2
# What the numbers of all words may take for the rows that are pooled at a time.
_PIECE_BYTES = 64 * 1024 * 1024
_BYTES_A_NUMBER = 4


class WordsHead(ABC):
    """A head that gives each row a number for every word: [n, hidden] to [n, num_words].

    A sparse vector has at most `most` entries, the heaviest; all of them for None. What the model makes of
    texts in the `static_roles` is not used: their pooled tokens, each once, have these `static_weights`
    [num_words]."""

    num_words: int
    most: int | None = None
    static_roles: frozenset[Role] = frozenset()
    static_weights: torch.Tensor | None = None

    @abstractmethod
    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def weights(self, numbers: torch.Tensor) -> torch.Tensor:
        """What such numbers weigh: 0 or more, and the more the higher they are."""

    def without_limit(self) -> Self:
        """The same head for sparse vectors of any number of entries: which are the heaviest may hang on
        rounding."""
        unlimited = copy.copy(self)
        unlimited.most = None
        return unlimited


class WordsPool(PoolingMethod):
    """From a number for every word and token to one sparse vector a sequence.

    The numbers of a whole step are never there at once, which of a large vocabulary would take gigabytes.
    Between chunks there is one number a word of each, by the token at which the chunk began."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        assert isinstance(head, WordsHead)
        self._head = head
        self._chunks: dict[int, dict[int, torch.Tensor]] = {}
        self._most_rows = max(1, _PIECE_BYTES // (_BYTES_A_NUMBER * head.num_words))

    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        if not any(self._is_static(chunk.sequence) for chunk in cursor.chunks):
            return self._read(hidden, cursor)
        read = self._read(hidden, cursor.select(lambda chunk: not self._is_static(chunk.sequence)))
        complete = [chunk.sequence for chunk in cursor.chunks if chunk.is_last]
        looked_up = self._looked_up([each for each in complete if self._is_static(each)])
        # The first items are those that were read; each sequence takes the next of its own.
        of_read, of_static = iter(range(len(read))), iter(range(len(read), len(complete)))
        order = [next(of_static if self._is_static(each) else of_read) for each in complete]
        return Ragged.join([read, looked_up]).take(order)

    def _is_static(self, sequence: TokenSequence) -> bool:
        return sequence.payload.role in self._head.static_roles

    def _looked_up(self, sequences: list[TokenSequence]) -> Ragged:
        """The static weights of each sequence's tokens."""
        weights = self._head.static_weights
        assert weights is not None
        tokens = [np.unique(_pooled_ids(sequence)) for sequence in sequences]
        found = [weights[to_device(each, weights.device)] for each in tokens]
        items = [
            torch.stack([to_device(ids, part.device).float(), part], dim=1)[part != 0]
            for ids, part in zip(tokens, found, strict=True)
        ]
        return Ragged.from_items(items) if items else Ragged(weights.new_empty(0, COLUMNS), (0,))

    def _read(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        """What the model makes of texts, or of the parts of them in a step."""
        rows, lengths = cursor.pooled_rows()
        parts: list[Ragged] = []
        start = 0
        for first, last in _groups(lengths, self._most_rows):
            of_group = lengths[first:last]
            stop = start + sum(of_group)
            finished = []
            pooled = self._pooled(hidden, rows[start:stop], of_group)
            for chunk, part in zip(cursor.chunks[first:last], pooled, strict=True):
                sequence_id = chunk.sequence.sequence_id
                if not chunk.is_last:
                    self._chunks.setdefault(sequence_id, {})[chunk.start] = part
                    continue
                earlier = self._chunks.get(sequence_id)
                finished.append(self._joined([*earlier.values(), part]) if earlier else part)
            if finished:
                parts.append(entries_of(self._finished(torch.stack(finished)), self._head.most))
            start = stop
        return Ragged.join(parts) if parts else Ragged(hidden.new_empty(0, COLUMNS).float(), (0,))

    def free(self, sequence_id: int) -> None:
        self._chunks.pop(sequence_id, None)

    @property
    def num_states(self) -> int:
        return len(self._chunks)

    def comparable(self, item: torch.Tensor) -> torch.Tensor:
        """A weight for every word, [1, words]: which of them are exactly 0 may hang on rounding."""
        return dense_of(item, self._head.num_words)[None]

    def _pooled(
        self, hidden: torch.Tensor, rows: NDArray[np.int64], lengths: list[int]
    ) -> list[torch.Tensor]:
        """A number a word for each chunk of a group, [words]; `rows` are those of its tokens."""
        if len(lengths) > 1:
            numbers = self._head(take_rows(hidden, rows))  # [rows, words]
            return [self._reduced(part) for part in numbers.split(lengths)]
        pieces = [rows[first : first + self._most_rows] for first in range(0, len(rows), self._most_rows)]
        reduced = [self._reduced(self._head(take_rows(hidden, piece))) for piece in pieces or [rows]]
        return [self._joined(reduced)]

    @abstractmethod
    def _reduced(self, numbers: torch.Tensor) -> torch.Tensor:
        """One number a word, [words], of those of some tokens [n, words]."""

    @abstractmethod
    def _joined(self, reduced: list[torch.Tensor]) -> torch.Tensor:
        """One number a word of those of several runs of tokens."""

    @abstractmethod
    def _finished(self, pooled: torch.Tensor) -> torch.Tensor:
        """Weights of what was pooled of whole sequences, [n, words]."""


class MaxWordsPool(WordsPool, name="max-words"):
    """Each word's greatest weight among the tokens. The weight rises with the number, so that it is taken of
    the greatest number alone.

    Source: SPLADE v2, Formal et al. 2021 (arXiv 2109.10086), eq. 6."""

    def _reduced(self, numbers: torch.Tensor) -> torch.Tensor:
        if not len(numbers):
            return numbers.new_full((self._head.num_words,), -torch.inf)
        return numbers.amax(dim=0)

    def _joined(self, reduced: list[torch.Tensor]) -> torch.Tensor:
        return reduced[0] if len(reduced) == 1 else torch.stack(reduced).amax(dim=0)

    def _finished(self, pooled: torch.Tensor) -> torch.Tensor:
        return self._head.weights(pooled)


class SumWordsPool(WordsPool, name="sum-words"):
    """The sum of each word's weights over the tokens.

    Source: SPLADE, Formal et al. 2021 (arXiv 2107.05720), eq. 1."""

    def _reduced(self, numbers: torch.Tensor) -> torch.Tensor:
        return self._head.weights(numbers).sum(dim=0)

    def _joined(self, reduced: list[torch.Tensor]) -> torch.Tensor:
        return reduced[0] if len(reduced) == 1 else torch.stack(reduced).sum(dim=0)

    def _finished(self, pooled: torch.Tensor) -> torch.Tensor:
        return pooled


class GivenWordsPool(MaxWordsPool, name="given-words"):
    """For whole sequences of which each has one row: the weights of all words."""

    def _read(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        rows = take_rows(hidden, np.array(cursor.starts, dtype=np.int64))
        return entries_of(rows, self._head.most)


class GivenWords(WordsHead):
    """In place of another head, for rows that are weights of all words already."""

    def __init__(self, head: WordsHead) -> None:
        self.num_words, self.most = head.num_words, head.most
        self.static_roles, self.static_weights = head.static_roles, head.static_weights

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def weights(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers


def _pooled_ids(sequence: TokenSequence) -> NDArray[np.int64]:
    """The tokens of a sequence that take part in pooling."""
    tokens = sequence.tokens
    positions = tokens.pooled_positions
    return (tokens.ids if positions is None else tokens.ids[positions]).astype(np.int64)


def entries_of(weights: torch.Tensor, most: int | None = None) -> Ragged:
    """The words that have a weight other than 0 in each row of `weights` [n, words]; the heaviest of them, if
    there are more than `most`. How many they are only the device knows, which this waits for."""
    if most is not None and most < weights.shape[1]:
        heaviest = torch.topk(weights, most, dim=1).indices
        weights = torch.zeros_like(weights).scatter(1, heaviest, weights.gather(1, heaviest))
    row, word = weights.nonzero(as_tuple=True)
    values = torch.stack([word.float(), weights[row, word].float()], dim=1)  # [entries, 2]
    return Ragged.from_lengths(values, torch.bincount(row, minlength=len(weights)).cpu().numpy())


def dense_of(item: torch.Tensor, num_words: int) -> torch.Tensor:
    """The weight of every word, [num_words], in an item [entries, 2]."""
    weights = torch.zeros(num_words, device=item.device)
    return weights.index_put((item[:, 0].long(),), item[:, 1])


def _groups(lengths: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Runs of chunks that have at most `most` rows together and are at most as many, or of one larger one."""
    first, rows = 0, 0
    for i, length in enumerate(lengths):
        if i > first and (rows + length > most or i - first == most):
            yield first, i
            first, rows = i, 0
        rows += length
    if lengths:
        yield first, len(lengths)


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


class TokenWeightsPool(_WholeSequences, name="token-weights"):
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


class HybridPool(_WholeSequences, name="hybrid"):
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
