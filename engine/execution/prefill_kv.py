"""The keys and values that a cut sequence's earlier chunks leave for its later ones."""

import torch


class Carry:
    """Keys and values of one sequence, [kv_heads, tokens, head_dim] a layer, by the chunk they came from.

    Those of a sequence that shares its beginning with others come after those of the `prefix`. Owned by the
    model runner. Writing a chunk twice has the effect of writing it once, so that a step may be retried.
    """

    def __init__(self, prefix: "Carry | None" = None) -> None:
        self._prefix = prefix
        self._layers: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}

    def extend(
        self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values up to and with the chunk that begins at token `start`.

        `keep` stores the chunk's own for the chunks after it."""
        chunks = self._layers.setdefault(layer, {})
        if keep:
            # Clones: the originals are views of the whole step's tensors.
            chunks[start] = (keys.clone(), values.clone())
        earlier = self._before(layer, start)
        if not earlier:
            return keys, values
        return (
            torch.cat([part[0] for part in earlier] + [keys], dim=1),
            torch.cat([part[1] for part in earlier] + [values], dim=1),
        )

    def whole(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer that are here."""
        chunks = self._layers[layer]
        if len(chunks) == 1:
            return next(iter(chunks.values()))
        parts = [chunks[begin] for begin in sorted(chunks)]
        return torch.cat([keys for keys, _ in parts], dim=1), torch.cat(
            [values for _, values in parts], dim=1
        )

    def _before(self, layer: int, start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What the chunks before token `start` left, in order."""
        chunks = self._layers.get(layer, {})
        earlier = [chunks[begin] for begin in sorted(chunks) if begin < start]
        return earlier if self._prefix is None else [self._prefix.whole(layer), *earlier]
