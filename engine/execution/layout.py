"""The layout of a step: which row each token takes, and which rows attend together.

All of it is worked out on the CPU before the model runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from maxsimd.engine.execution.first_token_gate import FirstRowsOnly
from maxsimd.engine.execution.prefill_kv import Carry
from maxsimd.pooling.cursor import PoolingCursor
from maxsimd.scheduler import Chunk, Step

# What one more group of attention costs, counted in padding rows that would cost as much.
GROUP_COST_ROWS = 16

# Matrix libraries compile a kernel for each new shape, which takes time, and memory that is hardly ever given
# back. So their steps have few shapes: rows in all are a multiple of this, and groups are rounded as below.
ROW_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How an attention wants the rows of a step: whole sequences side by side with those of like length, or
    end to end; likewise those that share a prefix; and how many rows in all, as a multiple."""

    groups_whole: bool
    groups_shared: bool
    row_multiple: int


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Chunks that attend in one batched product: `count` of them in `length` rows each, from `first_row`.

    `key_lengths` says how many keys each may see; those after are padding or must not be attended to."""

    first_row: int
    count: int
    length: int
    key_lengths: tuple[int, ...]

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.count * self.length)


@dataclass(frozen=True, slots=True, eq=False)
class SharedGroup:
    """Chunks that attend in one batched product to one prefix and then each to itself: `count` of them in
    `length` rows each, from `first_row`; causal, so that padding at their ends is never seen."""

    first_row: int
    count: int
    length: int
    prefix: Carry

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.count * self.length)


@dataclass(frozen=True, eq=False)
class Layout:
    """What the attention function must know of a step.

    Whole sequences are in `groups`; those whose beginnings are shared in `shared`; chunks of a cut sequence,
    which attend to keys of earlier steps, and prefixes in `carried` with their rows. With a `gate`, the last
    layer needs only the first row of each sequence.
    `masks` caches what the layers share, for the time of one forward pass."""

    groups: tuple[Group, ...]
    carried: tuple[tuple[Chunk, slice, Carry], ...]
    causal: bool
    gate: FirstRowsOnly | None = None
    shared: tuple[SharedGroup, ...] = ()
    masks: dict[object, torch.Tensor | None] = field(default_factory=dict)

    @cached_property
    def longest(self) -> int:
        """The rows of the longest whole sequence."""
        return max(group.length for group in self.groups)

    @cached_property
    def attends_to_all(self) -> bool:
        """Whether every whole sequence may see all of its keys."""
        return all(keys == group.length for group in self.groups for keys in group.key_lengths)


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """A step's tensors: `input_ids`, `position_ids` and `type_ids` are int64 [rows]."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    type_ids: torch.Tensor
    layout: Layout
    cursor: PoolingCursor


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Splits sequences into groups of like length, as lists of places in `lengths`.

    Ascending by length; a group takes in the next longer sequence while the rows that padding to it adds
    cost less than a group of its own would."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    groups: list[list[int]] = []
    padding = 0
    for place in order:
        if groups:
            growth = lengths[place] - lengths[groups[-1][-1]]
            padding += growth * len(groups[-1])
            if padding <= GROUP_COST_ROWS:
                groups[-1].append(place)
                continue
        groups.append([place])
        padding = 0
    return groups


def round_length(length: int) -> int:
    """The rows that a sequence of `length` tokens is given: few different numbers, each little more."""
    multiple = 4 if length <= 32 else 8 if length <= 128 else 16
    return length + -length % multiple


def in_powers_of_two(members: list[int]) -> list[list[int]]:
    """A group split into parts of 1, 2, 4, ... members, largest first."""
    parts = []
    while members:
        size = 1 << (len(members).bit_length() - 1)
        parts.append(members[:size])
        members = members[size:]
    return parts


def lay_out(
    step: Step,
    carries: dict[int, Carry],
    *,
    causal: bool,
    arrangement: Arrangement,
    position_offset: int,
    gate: FirstRowsOnly | None = None,
) -> PackedBatch:
    """Lays out a step.

    Grouped sequences are put side by side with those of like length and padded to the longest of them, which
    suits batched products; others stand in step order without any padding, which suits variable-length
    attention. Padding rows hold token 0 and nobody looks at them.
    """
    whole = [chunk for chunk in step.chunks if chunk.is_whole and not chunk.is_prefix]
    after = [chunk for chunk in step.chunks if chunk.is_all_after_prefix]
    # Prefixes first: the sequences that share them may be in the same step.
    cut = [chunk for chunk in step.chunks if chunk.is_prefix]
    cut += [
        chunk for chunk in step.chunks if not (chunk.is_whole or chunk.is_prefix or chunk.is_all_after_prefix)
    ]

    groups: list[Group] = []
    shared: list[SharedGroup] = []
    carried: list[tuple[Chunk, slice, Carry]] = []
    placed: list[Chunk] = []
    starts: list[int] = []
    row = 0
    for members, length in _in_groups(whole, arrangement.groups_whole):
        keys = tuple(chunk.sequence.tokens.num_attended for chunk in members)
        groups.append(Group(row, len(members), length, keys))
        for chunk in members:
            placed.append(chunk)
            starts.append(row)
            row += length
    for prefix in dict.fromkeys(chunk.sequence.prefix_id for chunk in after):
        assert prefix is not None
        of_prefix = [chunk for chunk in after if chunk.sequence.prefix_id == prefix]
        for members, length in _in_groups(of_prefix, arrangement.groups_shared):
            shared.append(SharedGroup(row, len(members), length, carries[prefix]))
            for chunk in members:
                placed.append(chunk)
                starts.append(row)
                row += length
    for chunk in cut:
        carried.append((chunk, slice(row, row + len(chunk)), carries[chunk.sequence.sequence_id]))
        placed.append(chunk)
        starts.append(row)
        row += len(chunk)

    row += -row % arrangement.row_multiple
    input_ids = np.zeros(row, dtype=np.int64)
    position_ids = np.full(row, position_offset, dtype=np.int64)
    type_ids = np.zeros(row, dtype=np.int64)
    for chunk, start in zip(placed, starts, strict=True):
        rows, part = slice(start, start + len(chunk)), slice(chunk.start, chunk.stop)
        input_ids[rows] = chunk.sequence.tokens.ids[part]
        position_ids[rows] = np.arange(chunk.start, chunk.stop) + position_offset
        if chunk.sequence.tokens.type_ids is not None:
            type_ids[rows] = chunk.sequence.tokens.type_ids[part]
    return PackedBatch(
        torch.from_numpy(input_ids),
        torch.from_numpy(position_ids),
        torch.from_numpy(type_ids),
        Layout(tuple(groups), tuple(carried), causal, gate, tuple(shared)),
        PoolingCursor(tuple(placed), tuple(starts)),
    )


def _in_groups(chunks: Sequence[Chunk], grouped: bool) -> list[tuple[list[Chunk], int]]:
    """Chunks that are put side by side, and the rows that each of them is given."""
    lengths = [len(chunk) for chunk in chunks]
    if not grouped:
        return [([chunk], length) for chunk, length in zip(chunks, lengths, strict=True)]
    lengths = [round_length(length) for length in lengths]
    parts = [part for members in group_by_length(lengths) for part in in_powers_of_two(members)]
    return [([chunks[i] for i in part], lengths[part[-1]]) for part in parts]
