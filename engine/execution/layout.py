"""The layout of a step: which row each token takes, and which rows attend together. It is worked out on the
CPU before the model runs; `lay_out.py` makes it, and backends of attention read it.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.execution.prefill_kv import PrefillKV
from maxsimd.pooling.methods import PoolingCursor


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How an attention backend wants the rows of a step.

    `groups_whole` asks for whole sequences of similar length side by side, padded to one length, instead of
    end to end without padding; `groups_shared` asks the same for sequences that share a prefix. The number of
    rows of a step is a multiple of `row_multiple`."""

    groups_whole: bool
    groups_shared: bool
    row_multiple: int


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Whole sequences that attend in one batched product: `count` of them in `length` rows each, from
    `first_row` on.

    `key_lengths` says how many keys the queries of each sequence may see; the keys after these are padding,
    or not to be attended to."""

    first_row: int
    count: int
    length: int
    key_lengths: tuple[int, ...]

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.count * self.length)


@dataclass(frozen=True, slots=True, eq=False)
class SharedGroup:
    """Sequences that attend in one batched product, each to one prefix that all share and then to itself:
    `count` of them in `length` rows each, from `first_row` on. They are causal, so that no token sees the
    padding behind it."""

    first_row: int
    count: int
    length: int
    prefix: PrefillKV

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.count * self.length)


@dataclass(frozen=True, slots=True, eq=False)
class PrefillChunk:
    """A chunk of a sequence whose keys and values outlive the step: a chunk of a cut sequence, or a prefix
    that other sequences share.

    The rows from `first_row` on hold the tokens `start` to `stop` of the sequence. They attend to the
    sequence's earlier tokens, whose keys and values are in `prefill_kv`, and to themselves. `is_stored` says
    whether their own keys and values are needed after the step."""

    first_row: int
    start: int
    stop: int
    prefill_kv: PrefillKV
    is_stored: bool

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_tokens)


@dataclass(frozen=True, eq=False)
class Layout:
    """Which rows of a step attend together: `groups` of whole sequences come first, then those that share a
    prefix, then the chunks that use or make `PrefillKV`.

    `hides_ends` says whether some whole sequences end in tokens that none attends to. The padding of a group
    is no such end: causal tokens cannot see what is behind them."""

    causal: bool
    groups: tuple[Group, ...] = ()
    shared_groups: tuple[SharedGroup, ...] = ()
    prefill_chunks: tuple[PrefillChunk, ...] = ()
    hides_ends: bool = False

    @property
    def has_only_whole_sequences(self) -> bool:
        return not self.shared_groups and not self.prefill_chunks

    @cached_property
    def whole_sequences(self) -> NDArray[np.int64]:
        """The whole sequences in the order of their rows: first row, rows, and keys that may be seen,
        [sequences, 3]."""
        groups = np.array(
            [(group.first_row, group.length, group.count) for group in self.groups], dtype=np.int64
        ).reshape(-1, 3)
        first_row, length, count = groups.T
        before = np.repeat(np.cumsum(count) - count, count)
        among = np.arange(len(before)) - before
        lengths = np.repeat(length, count)
        keys = np.fromiter((keys for group in self.groups for keys in group.key_lengths), dtype=np.int64)
        return np.stack([np.repeat(first_row, count) + among * lengths, lengths, keys], axis=1)

    @cached_property
    def longest(self) -> int:
        """The rows of the longest whole sequence."""
        return int(self.whole_sequences[:, 1].max())

    @cached_property
    def attends_to_all(self) -> bool:
        """Whether every whole sequence may see all of its keys."""
        return bool((self.whole_sequences[:, 1] == self.whole_sequences[:, 2]).all())


@dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """Part of a picture in a step: the `rows` in which its features from the `first` on stand."""

    image_id: int
    first: int
    rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """A step's tensors on the CPU: `input_ids`, `position_ids`, `type_ids` and `attended_rows`, which is 1
    where other tokens may attend to a row, are int64 [rows], and positions in time, height and width
    [3, rows]. In some rows stand `images` in place of tokens."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    type_ids: torch.Tensor
    attended_rows: torch.Tensor
    layout: Layout
    cursor: PoolingCursor
    images: tuple[ImageRows, ...] = ()
