"""The keys and values that the earlier chunks of a cut sequence leave for its later ones, and a shared prefix
for the sequences that begin with it.
"""

import torch

from maxsimd.engine.ops.qkv import KV


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
