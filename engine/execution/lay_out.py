"""Lays out a step: gives each chunk its rows, and fills in the model's inputs. What a `Layout` means is in
`layout.py`.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from maxsimd.engine.execution.grouping import group_by_length, in_powers_of_two, round_length
from maxsimd.engine.execution.layout import (
    Arrangement,
    Group,
    ImageRows,
    Layout,
    PackedBatch,
    PrefillChunk,
    SharedGroup,
)
from maxsimd.engine.execution.prefill_kv import PrefillKV
from maxsimd.pooling.methods import PoolingCursor
from maxsimd.scheduler import Chunk, Step


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
