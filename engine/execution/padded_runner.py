"""Runs the backbone over padded batches: for models that cannot be packed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.checkpoint.reference import declares, takes
from maxsimd.pooling.methods import PoolingCursor
from maxsimd.pooling.ragged import to_device
from maxsimd.scheduler import Chunk, ImageJob, Step

# The share of a batch that may be padding, and the size in tokens up to which padding costs less than another
# pass.
PADDING = 0.1
SMALL_BATCH = 256


class PaddedRunner:
    """Passes over [sequences, longest] with an attention mask, each over sequences of similar length."""

    chunked = False

    def __init__(self, model: LoadedModel, device: torch.device) -> None:
        self._model = model
        self._backbone: Any = model.backbone
        self._device = device
        self._options = {"use_cache": False} if declares(self._backbone, "use_cache") else {}

    @torch.inference_mode()
    def forward(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        """The hidden states [rows, hidden] of a step, and where each chunk's rows are."""
        hidden: list[torch.Tensor] = []
        chunks: list[Chunk] = []
        starts: list[int] = []
        row = 0
        for indices in by_length([len(chunk) for chunk in step.chunks]):
            batch = [step.chunks[index] for index in indices]
            states = self._run(batch)  # [n, longest, hidden]
            hidden.append(states.flatten(0, 1))
            chunks += batch
            starts += range(row, row + len(hidden[-1]), states.shape[1])
            row += len(hidden[-1])
        return torch.cat(hidden), PoolingCursor(tuple(chunks), tuple(starts))

    def encode(self, images: Sequence[ImageJob]) -> None:
        """Pictures are not run in padded batches."""

    def free(self, sequence_id: int) -> None:
        """Nothing stays between steps."""

    @property
    def num_features(self) -> int:
        return 0

    @property
    def num_prefill_kv(self) -> int:
        return 0

    def _run(self, chunks: list[Chunk]) -> torch.Tensor:
        n, longest = len(chunks), max(len(chunk) for chunk in chunks)
        pad = getattr(self._backbone.config, "pad_token_id", None) or 0
        input_ids = np.full((n, longest), pad, dtype=np.int64)
        attention_mask = np.zeros((n, longest), dtype=np.int64)
        type_ids = np.zeros((n, longest), dtype=np.int64)
        for i, chunk in enumerate(chunks):
            sequence = chunk.sequence
            input_ids[i, : len(sequence)] = sequence.tokens.ids
            attention_mask[i, : sequence.tokens.num_attended] = 1
            if (types := sequence.tokens.type_ids) is not None:
                type_ids[i, : len(sequence)] = types
        inputs = {"input_ids": input_ids}
        if takes(self._backbone, "attention_mask"):
            inputs["attention_mask"] = attention_mask
        if self._model.takes_type_ids:
            inputs["token_type_ids"] = type_ids
        tensors = {name: to_device(ids, self._device) for name, ids in inputs.items()}
        output: torch.Tensor = self._backbone(**tensors, **self._options).last_hidden_state
        return output


def by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Splits sequences into batches of similar length, each a list of indices into `lengths`, shortest first.

    A batch takes in the next longer sequence as long as little of it is padding, or it is small."""
    batches: list[list[int]] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[index]
        if batches:
            rows = length * (len(batches[-1]) + 1)
            if rows <= SMALL_BATCH or rows - tokens - length <= PADDING * rows:
                batches[-1].append(index)
                tokens += length
                continue
        batches.append([index])
        tokens = length
    return batches
