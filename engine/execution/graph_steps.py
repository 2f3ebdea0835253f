"""Steps that fill a CUDA graph of some size, with which it is captured and compared."""

from collections.abc import Iterator, Sequence

import numpy as np

from maxsimd.engine.execution.attention.base import CaptureSize
from maxsimd.scheduler import Chunk, ResultSlot, Step, Tokens, TokenSequence
from maxsimd.scheduler.sequence import AnyTokens


def filling_steps(size: CaptureSize, samples: Sequence[TokenSequence]) -> tuple[Step, ...]:
    """Two steps of the tokens of samples: one of as many sequences and rows as the graph takes, the samples
    themselves among them; and one of few long sequences that leaves some rows empty."""
    return (
        _step(samples, [*_many(size, [sample.tokens for sample in samples])]),
        _step(samples, [*_split(max(1, size.rows - size.rows // 10), size.longest, size.sequences)]),
    )


def _many(size: CaptureSize, samples: Sequence[AnyTokens]) -> Iterator[AnyTokens | int]:
    """Samples for half of the sequences, as long as the others can have a row each; and the lengths of the
    others, which take the rows that are left if they are not too many."""
    rows, sequences = size.rows, size.sequences
    for number in range(size.sequences // 2):
        tokens = samples[number % len(samples)]
        if len(tokens) <= rows - (sequences - 1):
            yield tokens
            rows, sequences = rows - len(tokens), sequences - 1
    yield from _random_lengths(rows, size.longest, sequences)


def _random_lengths(rows: int, longest: int, count: int) -> Iterator[int]:
    """`count` lengths from 1 to `longest`, `rows` in all if that is possible, else fewer."""
    random = np.random.default_rng(rows)
    for others in range(count - 1, -1, -1):
        least = max(1, min(longest, rows - others * longest))
        most = max(least, min(longest, rows - others, 2 * rows // (others + 1)))
        length = int(random.integers(least, most + 1)) if others else min(longest, rows)
        yield length
        rows -= length


def _split(rows: int, longest: int, most: int) -> Iterator[int]:
    """The lengths of up to `most` sequences in `rows` rows: all of `longest` but the last."""
    for first in range(0, rows, longest)[:most]:
        yield min(longest, rows - first)


def _step(samples: Sequence[TokenSequence], parts: Sequence[AnyTokens | int]) -> Step:
    """A step of these tokens, and of the samples' tokens one after the other in sequences of these
    lengths."""
    ids = np.concatenate([sample.tokens.ids for sample in samples])
    types = [sample.tokens.type_ids for sample in samples]
    given = [part for part in types if part is not None]
    of_type = np.concatenate(given) if len(given) == len(types) else None
    chunks = []
    for key, part in enumerate(parts):
        if isinstance(part, int):
            part_types = None if of_type is None else np.resize(of_type, part)
            tokens: AnyTokens = Tokens(np.resize(ids, part), part_types)
        else:
            tokens = part
        sequence = TokenSequence.text(key, ResultSlot(0, key), samples[0].payload.task, tokens)
        chunks.append(Chunk(sequence, 0, len(sequence)))
    return Step(0, tuple(chunks))
