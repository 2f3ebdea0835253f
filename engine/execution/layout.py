"""Lays out a step on the CPU before the model runs: which row each token takes, and which rows attend
together."""

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
    """The keys and values that the chunks of a sequence leave for later ones, or a shared prefix for the
    sequences that begin with it: [kv_heads, tokens, head_dim] for each layer and chunk.

    A sequence with a shared `prefix` holds only the tokens after it. Owned by the model runner. Writing a
    chunk again replaces it, so a step may be retried."""

    def __init__(self, prefix: "PrefillKV | None" = None) -> None:
        self._prefix = prefix
        self._layers: dict[int, dict[int, KV]] = {}

    def extend(self, layer: int, start: int, chunk: KV, *, store: bool) -> KV:
        """All keys and values of a layer up to the end of the `chunk` that begins at token `start`. With
        `store`, those of the chunk are kept for later chunks."""
        chunks = self._layers.setdefault(layer, {})
        if store:
            # Clones: the originals are views of the whole step's tensors.
            chunks[start] = KV(chunk.key.clone(), chunk.value.clone())
        earlier = [chunks[begin] for begin in sorted(chunks) if begin < start]
        prefix = [] if self._prefix is None else [self._prefix.all_of(layer)]
        return _concatenated([*prefix, *earlier, chunk])

    def all_of(self, layer: int) -> KV:
        chunks = self._layers[layer]
        return _concatenated([chunks[start] for start in sorted(chunks)])


def _concatenated(parts: list[KV]) -> KV:
    if len(parts) == 1:
        return parts[0]
    keys, values = zip(*parts, strict=True)
    return KV(torch.cat(keys, dim=1), torch.cat(values, dim=1))


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The order in which an attention backend wants the rows of a step.

    `groups_whole` puts whole sequences of similar length side by side, padded to one length, instead of end
    to end; `groups_shared` does so with sequences that share a prefix. A step's number of rows is a multiple
    of `row_multiple`."""

    groups_whole: bool
    groups_shared: bool
    row_multiple: int


@dataclass(frozen=True, slots=True, eq=False)
class RowGroup:
    """Sequences that attend in one batched product: `count` sequences of `length` rows each, from `first_row`
    on."""

    first_row: int
    count: int
    length: int

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.count * self.length)


@dataclass(frozen=True, slots=True, eq=False)
class Group(RowGroup):
    """Whole sequences. Queries see the first `key_lengths` keys of their sequence; the others are padding or
    masked."""

    key_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SharedGroup(RowGroup):
    """Causal sequences. Each attends to the shared `prefix`, then to itself."""

    prefix: PrefillKV


@dataclass(frozen=True, slots=True, eq=False)
class PrefillChunk:
    """The tokens `start` to `stop` of a sequence that is cut between steps, or of a shared prefix, in the
    rows from `first_row` on.

    They attend to themselves and to the earlier tokens, whose keys and values are in `prefill_kv`.
    `is_stored` says whether theirs are needed after the step."""

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
    """The rows of a step that attend together, in order: whole sequences, sequences that share a
    prefix, and chunks that use or fill a `PrefillKV`.

    `hides_ends` says whether some whole sequences end in masked tokens."""

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
        """First row, rows and visible keys of each whole sequence, [sequences, 3]."""
        groups = np.array(
            [(group.first_row, group.length, group.count) for group in self.groups], dtype=np.int64
        ).reshape(-1, 3)
        first_row, length, count = groups.T
        among = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
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
    """The `rows` of a step for the features of a picture from number `first` on."""

    image_id: int
    first: int
    rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """A step's tensors on the CPU, int64 [rows] each. `position_ids` may be [3, rows]: time, height and
    width. `attended_rows` is 1 where other tokens may attend to a row. `images` replace the tokens of some
    rows."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    token_type_ids: torch.Tensor
    attended_rows: torch.Tensor
    layout: Layout
    cursor: PoolingCursor
    images: tuple[ImageRows, ...] = ()


# The cost of one more batched product, in padding rows.
GROUP_COST_ROWS = 16


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Splits sequences into groups of similar length: indices into `lengths`, shortest first.

    A group takes the next longer sequence as long as the padding costs less than another group."""
    groups: list[list[int]] = []
    padding = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups:
            padding += (lengths[index] - lengths[groups[-1][-1]]) * len(groups[-1])
        if groups and padding <= GROUP_COST_ROWS:
            groups[-1].append(index)
        else:
            groups.append([index])
            padding = 0
    return groups


def round_length(length: int) -> int:
    """`length` rounded up, so that few different lengths occur."""
    multiple = 4 if length <= 32 else 8 if length <= 128 else 16
    return length + -length % multiple


def in_powers_of_two(members: list[int]) -> list[list[int]]:
    """A group in parts of 1, 2, 4, ... members, largest first."""
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
    """Lays out a step. `prefill_kv` has the keys and values of cut sequences and shared prefixes by sequence
    id. Positions count from `position_offset`, without the tokens `uncounted_id`. Padding rows hold token
    0."""
    rows = _Rows()
    layout = Layout(
        causal,
        _groups(rows, step, arrangement),
        _shared_groups(rows, step, arrangement, prefill_kv),
        _prefill_chunks(rows, step, prefill_kv),
        hides_ends=any(chunk.sequence.tokens.num_attended < len(chunk.sequence) for chunk in step.chunks),
    )
    count = rows.count + -rows.count % arrangement.row_multiple
    input_ids, type_ids, attended = np.zeros((3, count), dtype=np.int64)
    # One position a row, or three (time, height, width) if a sequence has pictures.
    in_space = any(chunk.sequence.tokens.position_ids is not None for chunk in rows.chunks)
    position_ids = np.full((3, count) if in_space else count, position_offset, dtype=np.int64)
    for chunk, start in zip(rows.chunks, rows.starts, strict=True):
        rows_of_chunk, part = slice(start, start + len(chunk)), slice(chunk.start, chunk.stop)
        tokens = chunk.sequence.tokens
        input_ids[rows_of_chunk] = tokens.ids[part]
        attended[start : start + min(len(chunk), max(0, tokens.num_attended - chunk.start))] = 1
        if tokens.position_ids is None:
            position_ids[..., rows_of_chunk] = np.arange(chunk.start, chunk.stop) + position_offset
        else:
            position_ids[:, rows_of_chunk] = tokens.position_ids[:, part]
        if (types := tokens.type_ids) is not None:
            type_ids[rows_of_chunk] = types[part]
    if uncounted_id is not None and (input_ids == uncounted_id).any():
        for chunk, start in zip(rows.chunks, rows.starts, strict=True):
            counted = chunk.sequence.tokens.ids != uncounted_id
            positions = counted.cumsum() * counted + (position_offset - 1)
            position_ids[start : start + len(chunk)] = positions[chunk.start : chunk.stop]
    placed = zip(rows.chunks, rows.starts, strict=True)
    return PackedBatch(
        torch.from_numpy(input_ids),
        torch.from_numpy(position_ids),
        torch.from_numpy(type_ids),
        torch.from_numpy(attended),
        layout,
        PoolingCursor(tuple(rows.chunks), tuple(rows.starts)),
        tuple(part for chunk, start in placed for part in _images(chunk, start)),
    )


def _images(chunk: Chunk, start: int) -> Iterator[ImageRows]:
    """The rows of pictures in a chunk that begins in row `start`."""
    for image in chunk.sequence.tokens.images:
        low, high = np.searchsorted(image.positions, (chunk.start, chunk.stop))
        if low < high:
            yield ImageRows(image.image_id, int(low), image.positions[low:high] + (start - chunk.start))


class _Rows:
    """The rows given away so far: chunks in the order of their rows, and the first row of each."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.starts: list[int] = []
        self.count = 0

    def take(self, chunks: Sequence[Chunk], length: int) -> int:
        """Gives each chunk the next `length` rows; returns the first row."""
        first = self.count
        self.chunks += chunks
        self.count += length * len(chunks)
        self.starts += [first + i * length for i in range(len(chunks))]
        return first


def _groups(rows: _Rows, step: Step, arrangement: Arrangement) -> tuple[Group, ...]:
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


def _shared_groups(
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
    """Chunks that stand side by side, and the rows that each gets."""
    lengths = [len(chunk) for chunk in chunks]
    if not grouped:
        return [([chunk], length) for chunk, length in zip(chunks, lengths, strict=True)]
    lengths = [round_length(length) for length in lengths]
    parts = [part for members in group_by_length(lengths) for part in in_powers_of_two(members)]
    return [([chunks[i] for i in part], lengths[part[-1]]) for part in parts]
