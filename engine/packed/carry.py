"""The keys and values that a cut sequence's earlier chunks leave for its later ones."""

import torch


class Carry:
    """Keys and values of one sequence, [kv_heads, tokens, head_dim] a layer, by the chunk they came from.

    Owned by the model runner. Writing a chunk twice has the effect of writing it once, so that a step may
    be retried.
    """

    def __init__(self) -> None:
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
        earlier = [chunks[begin] for begin in sorted(chunks) if begin < start]
        if not earlier:
            return keys, values
        return (
            torch.cat([part[0] for part in earlier] + [keys], dim=1),
            torch.cat([part[1] for part in earlier] + [values], dim=1),
        )
