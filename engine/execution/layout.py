"""The layout of a step: which row each token takes, and which rows attend together. It is worked out on the
CPU before the model runs; `lay_out.py` makes it, and backends of attention read it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.ops.qkv import KV
from maxsimd.pooling.methods import PoolingCursor
from maxsimd.scheduler import Chunk, Step


class PrefillKV:
    """Keys and values of one sequence, [kv_heads, tokens, head_dim] a layer, by the chunk they came from.

    A sequence that begins with a shared `prefix` holds only what comes after it. Owned by the model runner.
    Writing a chunk twice has the effect of writing it once, so that a step may be retried.
    """

    def __init__(self, prefix: "PrefillKV | None" = None) -> None:
        self._prefix = prefix
        self._layers: dict[int, dict[int, KV]] = {}

    def extend(self, layer: int, start: int, chunk: KV, *, store: bool) -> KV:
        """All keys and values of a layer up to the end of the `chunk` that begins at token `start`.

        With `store`, the chunk's own are stored for the chunks after it."""
        chunks = self._layers.setdefault(layer, {})
        if store:
            # Clones: the originals are views of the whole step's tensors.
            chunks[start] = KV(chunk.key.clone(), chunk.value.clone())
        earlier = self._before(layer, start)
        return _concatenated([*earlier, chunk]) if earlier else chunk

    def all_of(self, layer: int) -> KV:
        """All keys and values that are stored of a layer."""
        chunks = self._layers[layer]
        if len(chunks) == 1:
            return next(iter(chunks.values()))
        return _concatenated([chunks[start] for start in sorted(chunks)])

    def _before(self, layer: int, start: int) -> list[KV]:
        """What the prefix and the chunks before token `start` left, in order."""
        chunks = self._layers.get(layer, {})
        earlier = [chunks[begin] for begin in sorted(chunks) if begin < start]
        return earlier if self._prefix is None else [self._prefix.all_of(layer), *earlier]


def _concatenated(parts: list[KV]) -> KV:
    return KV(
        torch.cat([part.key for part in parts], dim=1), torch.cat([part.value for part in parts], dim=1)
    )


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


# What one more batched product costs, counted in padding rows that would cost as much.
GROUP_COST_ROWS = 16


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Splits sequences into groups of similar length, each a list of indices into `lengths`.

    Ascending by length. A group takes in the next longer sequence as long as the padding rows that this adds
    cost less than a group of its own would."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    groups: list[list[int]] = []
    padding = 0
    for index in order:
        if groups:
            growth = lengths[index] - lengths[groups[-1][-1]]
            padding += growth * len(groups[-1])
            if padding <= GROUP_COST_ROWS:
                groups[-1].append(index)
                continue
        groups.append([index])
        padding = 0
    return groups


def round_length(length: int) -> int:
    """The number of rows for a sequence of `length` tokens: rounded up a little, so that few different
    numbers occur."""
    multiple = 4 if length <= 32 else 8 if length <= 128 else 16
    return length + -length % multiple


def in_powers_of_two(members: list[int]) -> list[list[int]]:
    """A group split into parts of 1, 2, 4, ... members, largest part first."""
    parts = []
    while members:
        size = 1 << (len(members).bit_length() - 1)
        parts.append(members[:size])
        members = members[size:]
    return parts


def lay_out(
    step: Step,
    prefill_kv: Mapping[int, PrefillKV],
    *,
    causal: bool,
    arrangement: Arrangement,
    position_offset: int,
    uncounted_id: int | None = None,
) -> PackedBatch:
    """Lays out a step, for which `prefill_kv` has the keys and values of cut sequences and of shared prefixes
    by sequence id. Positions count from `position_offset`, without the tokens `uncounted_id`.

    Padding rows hold token 0, and nothing reads them."""
    rows = _Rows()
    layout = Layout(
        causal,
        _whole(rows, step, arrangement),
        _shared(rows, step, arrangement, prefill_kv),
        _prefill_chunks(rows, step, prefill_kv),
        hides_ends=any(chunk.sequence.tokens.num_attended < len(chunk.sequence) for chunk in step.chunks),
    )
    count = rows.count + -rows.count % arrangement.row_multiple
    input_ids = np.zeros(count, dtype=np.int64)
    # One number a row, or three if some sequence counts in time, height and width.
    in_space = any(chunk.sequence.tokens.position_ids is not None for chunk in rows.chunks)
    position_ids = np.full((3, count) if in_space else count, position_offset, dtype=np.int64)
    type_ids = np.zeros(count, dtype=np.int64)
    attended = np.zeros(count, dtype=np.int64)
    for chunk, start in zip(rows.chunks, rows.starts, strict=True):
        of_chunk, part = slice(start, start + len(chunk)), slice(chunk.start, chunk.stop)
        tokens = chunk.sequence.tokens
        input_ids[of_chunk] = tokens.ids[part]
        attended[start : start + min(len(chunk), max(0, tokens.num_attended - chunk.start))] = 1
        if tokens.position_ids is None:
            position_ids[..., of_chunk] = np.arange(chunk.start, chunk.stop) + position_offset
        else:
            position_ids[:, of_chunk] = tokens.position_ids[:, part]
        if (types := tokens.type_ids) is not None:
            type_ids[of_chunk] = types[part]
    if uncounted_id is not None and (input_ids == uncounted_id).any():
        for chunk, start in zip(rows.chunks, rows.starts, strict=True):
            counted = chunk.sequence.tokens.ids != uncounted_id
            positions = counted.cumsum() * counted + (position_offset - 1)
            position_ids[start : start + len(chunk)] = positions[chunk.start : chunk.stop]
    return PackedBatch(
        torch.from_numpy(input_ids),
        torch.from_numpy(position_ids),
        torch.from_numpy(type_ids),
        torch.from_numpy(attended),
        layout,
        PoolingCursor(tuple(rows.chunks), tuple(rows.starts)),
        tuple(
            part
            for chunk, start in zip(rows.chunks, rows.starts, strict=True)
            for part in _images(chunk, start)
        ),
    )


def _images(chunk: Chunk, start: int) -> Iterator[ImageRows]:
    """What a chunk that begins in the row `start` has of its sequence's pictures."""
    for image in chunk.sequence.tokens.images:
        low, high = np.searchsorted(image.positions, (chunk.start, chunk.stop))
        if low < high:
            yield ImageRows(image.image_id, int(low), image.positions[low:high] + (start - chunk.start))


class _Rows:
    """The rows that are given away so far: chunks in the order of their rows, with the first row of each."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.starts: list[int] = []
        self.count = 0

    def take(self, chunks: Sequence[Chunk], length: int) -> int:
        """Gives each chunk the next `length` rows; returns the first of them all."""
        first = self.count
        self.chunks += chunks
        self.count += length * len(chunks)
        self.starts += [first + i * length for i in range(len(chunks))]
        return first


def _whole(rows: _Rows, step: Step, arrangement: Arrangement) -> tuple[Group, ...]:
    whole = [chunk for chunk in step.chunks if chunk.is_whole and not chunk.is_prefix]
    return tuple(
        Group(
            rows.take(members, length),
            len(members),
            length,
            tuple(chunk.sequence.tokens.num_attended for chunk in members),
        )
        for members, length in _in_groups(whole, arrangement.groups_whole)
    )


def _shared(
    rows: _Rows, step: Step, arrangement: Arrangement, prefill_kv: Mapping[int, PrefillKV]
) -> tuple[SharedGroup, ...]:
    by_prefix: dict[int, list[Chunk]] = {}
    for chunk in step.chunks:
        if chunk.is_all_after_prefix:
            assert chunk.sequence.prefix_id is not None
            by_prefix.setdefault(chunk.sequence.prefix_id, []).append(chunk)
    return tuple(
        SharedGroup(rows.take(members, length), len(members), length, prefill_kv[prefix])
        for prefix, chunks in by_prefix.items()
        for members, length in _in_groups(chunks, arrangement.groups_shared)
    )


def _prefill_chunks(rows: _Rows, step: Step, prefill_kv: Mapping[int, PrefillKV]) -> tuple[PrefillChunk, ...]:
    # Prefixes first: sequences that share them may be in the same step.
    chunks = [chunk for chunk in step.chunks if chunk.is_prefix]
    chunks += [
        chunk for chunk in step.chunks if not (chunk.is_whole or chunk.is_prefix or chunk.is_all_after_prefix)
    ]
    return tuple(
        PrefillChunk(
            rows.take([chunk], len(chunk)),
            chunk.start,
            chunk.stop,
            prefill_kv[chunk.sequence.sequence_id],
            is_stored=chunk.is_prefix or not chunk.is_last,
        )
        for chunk in chunks
    )


def _in_groups(chunks: Sequence[Chunk], grouped: bool) -> list[tuple[list[Chunk], int]]:
    """Chunks that stand side by side, and the number of rows that each of them is given."""
    lengths = [len(chunk) for chunk in chunks]
    if not grouped:
        return [([chunk], length) for chunk, length in zip(chunks, lengths, strict=True)]
    lengths = [round_length(length) for length in lengths]
    parts = [part for members in group_by_length(lengths) for part in in_powers_of_two(members)]
    return [([chunks[i] for i in part], lengths[part[-1]]) for part in parts]
