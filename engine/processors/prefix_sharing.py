"""Prefixes: tokens that all pairs of a query begin with, which are run once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from maxsimd.engine.processors.pairs import BuiltPair
from maxsimd.engine.processors.request_ids import RequestIds
from maxsimd.engine.workers import yield_to_smaller
from maxsimd.scheduler import Tokens, TokenSequence
from maxsimd.scheduler.sequence import TokenIds

# Fewer tokens are run again rather than shared.
SHORTEST_PREFIX = 8


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    """Decides which prefixes are run once for all pairs that begin with them.

    A step with a shared prefix cannot be replayed as a CUDA graph, so the host launches it kernel by kernel.
    `launch_tokens` is how many tokens the device computes in the time that this takes; None where steps are
    not replayed, and every prefix is shared."""

    launch_tokens: int | None = None

    def is_worth(self, prefix: int, consumers: int, own: int) -> bool:
        """Whether to share a prefix of `prefix` tokens among `consumers` sequences, which have `own` more
        tokens in all.

        Sharing saves the prefix for all consumers but one. But the step is then launched kernel by kernel,
        which takes as long as `launch_tokens` tokens do: a smaller step loses the difference. On a device
        that replays steps, a prefix with one consumer is not shared."""
        if self.launch_tokens is None:
            return True
        saved = prefix * (consumers - 1)
        lost = max(0, self.launch_tokens - (prefix + own))
        return saved > lost

    def find(self, pairs: Sequence[BuiltPair], ids: RequestIds) -> list[tuple[TokenSequence, list[int]]]:
        """Returns the prefixes to run by themselves, each with the positions of the windows that share it."""
        windows = [(window, pair.prefix) for pair in pairs for window in pair.windows]
        positions_of: dict[tuple[bytes, ...], list[int]] = {}
        for i, (tokens, prefix) in enumerate(windows):
            yield_to_smaller()
            token_ids = tokens.ids
            length = shared_tokens(token_ids, prefix)
            if length:
                pictures = [image.digest for image in tokens.images if image.positions[0] < length]
                positions_of.setdefault((token_ids[:length].tobytes(), *pictures), []).append(i)
        shared = []
        for positions in positions_of.values():
            tokens, prefix = windows[positions[0]]
            own = sum(len(windows[i][0]) for i in positions) - len(positions) * len(prefix)
            # Steps with pictures are never replayed, so sharing costs them nothing.
            has_pictures = any(windows[i][0].images for i in positions)
            if not has_pictures and not self.is_worth(len(prefix), len(positions), own):
                continue
            if isinstance(tokens, Tokens):
                shared_part = tokens.first(len(prefix)).behind(0, ids.sequence_ids)
            else:
                shared_part = Tokens(tokens.ids[: len(prefix)], tokens.type_ids[: len(prefix)])
            sequence = TokenSequence.prefix(
                ids.next_sequence_id(), ids.request_id, shared_part, num_consumers=len(positions)
            )
            shared.append((sequence, positions))
        return shared


def shared_tokens(ids: TokenIds, prefix: TokenIds) -> int:
    """Returns how many tokens a pair shares with all others that begin with `prefix`.

    That is 0 if the pair begins otherwise, has no tokens of its own, or its prefix is too short to share. It
    depends on nothing but the pair."""
    length = len(prefix)
    if length < SHORTEST_PREFIX or len(ids) <= length or not np.array_equal(ids[:length], prefix):
        return 0
    return length
