"""The output layer of a language model: the logits of tokens, from hidden states."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.checkpoint.files import one_line
from maxsimd.engine.checkpoint.heads import GivenRows, linear_of
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.workers import yield_to_smaller

# Rows and tokens of the output layer that are multiplied at a time. The number of rows is fixed, because
# other numbers may be rounded otherwise.
_ROWS, _TOKENS = 16, 8192
# The last segment of the template of a prompt.
QUERY_FIRST, DOCUMENT_FIRST = "{{ query }}{{ document }}", "{{ document }}{{ query }}"


class OutputLayer:
    """A language model's output layer as a head. The item of a sequence is its last hidden state, and the
    logarithm of the sum of the exponentials of all logits: [n, hidden] to [n, hidden + 1], float32.

    The model's own code makes logits of hidden states, whatever it does beside the product (softcaps,
    factors). Only the part of the layer's rows that is needed is expanded to float32."""

    def __init__(self, model: Any) -> None:
        self._model = copy.copy(model)
        self._output = model.get_output_embeddings()
        if not isinstance(self._output, torch.nn.Linear):
            kind = type(self._output).__name__
            raise ModelLoadError(f"the output layer of this language model, a {kind}, is not supported")
        self.num_tokens, hidden = self._output.weight.shape
        self.columns = hidden + 1
        try:
            self._part([0], torch.device("cpu"))(torch.zeros(1, hidden, dtype=torch.float32))
        except Exception as error:
            raise ModelLoadError(
                f"the output layer of this language model cannot be run apart: {one_line(error)}"
            ) from error

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        tiles = _tiles(rows)
        totals = [tile.new_full((_ROWS,), -math.inf) for tile in tiles]
        for start in range(0, self.num_tokens, _TOKENS):
            logits_of = self._part(slice(start, min(start + _TOKENS, self.num_tokens)), rows.device)
            totals = [
                torch.logaddexp(total, logits_of(tile).logsumexp(dim=-1))
                for total, tile in zip(totals, tiles, strict=True)
            ]
        return torch.cat([rows, torch.cat([*totals, rows.new_empty(0)])[: len(rows), None]], dim=1)

    @torch.inference_mode()
    def log_probabilities(
        self, items: NDArray[np.float32], tokens: Sequence[int], among_them: bool
    ) -> NDArray[np.float32]:
        """The logarithms of the probabilities of some tokens, float32 [n, tokens], from items: among all
        tokens, or `among_them` alone."""
        rows = torch.from_numpy(np.ascontiguousarray(items[:, :-1]))
        logits_of, parts = self._part([*tokens], rows.device), []
        for tile in _tiles(rows):
            yield_to_smaller()
            parts.append(logits_of(tile))
        logits = torch.cat(parts)[: len(rows)]
        if among_them:
            return logits.log_softmax(dim=-1).numpy()
        found: NDArray[np.float32] = logits.numpy() - items[:, -1:]
        return np.minimum(found, 0, out=found)  # both numbers are rounded

    def _part(
        self, tokens: slice | list[int], device: torch.device
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function on a device that makes the logits [n, tokens] of rows [n, hidden]."""
        bias = self._output.bias
        chosen = linear_of(self._output.weight[tokens], None if bias is None else bias[tokens])
        # A copy for each use: requests and the device use the layer at the same time.
        given, model = GivenRows(None), copy.copy(self._model)
        model._modules = self._model._modules | {self._model.base_model_prefix: given}
        model.set_output_embeddings(chosen.to(device))

        def logits_of(rows: torch.Tensor) -> torch.Tensor:
            ids = torch.zeros(len(rows), 1, dtype=torch.int64, device=rows.device)
            return given.logits(model, ids, rows[:, None])[:, 0]

        return logits_of

    def __str__(self) -> str:
        return f"the output layer of {self.num_tokens} tokens"


def _tiles(rows: torch.Tensor) -> list[torch.Tensor]:
    """Tiles of `_ROWS` rows; zeros fill up the last."""
    missing = -len(rows) % _ROWS
    filled = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows
    return [*filled.split(_ROWS)] if len(filled) else []
