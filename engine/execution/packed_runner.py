"""Runs the backbone over a step in one packed pass.

Used by the device thread alone. What comes of the hidden states is not decided here.
"""

from typing import Any, Protocol

import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.checkpoint.reference import declares
from maxsimd.engine.execution.attention.base import PackedAttention
from maxsimd.engine.execution.first_token_gate import FirstRowsOnly
from maxsimd.engine.execution.layout import Layout, PackedBatch, lay_out
from maxsimd.engine.execution.prefill_kv import Carry
from maxsimd.pooling.cursor import PoolingCursor
from maxsimd.pooling.transfer import to_device
from maxsimd.scheduler import Step


class ModelRunner(Protocol):
    """What the engine needs of a way to run the model."""

    chunked: bool

    def forward(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        """The hidden states [rows, hidden] of a step, and where each chunk's rows are.

        Running the same step again gives the same result, so that it may be retried."""
        ...

    def free(self, sequence_id: int) -> None:
        """Forgets the keys and values of a cut sequence, if there are any."""
        ...

    @property
    def num_prefill_kv(self) -> int:
        """How many sequences have keys and values on the device."""
        ...


class PackedRunner:
    """One pass over [1, rows]; owns the keys and values of sequences that are cut between steps.

    With a `gate`, only the first row of each sequence comes out of the last layer."""

    def __init__(
        self,
        model: LoadedModel,
        device: torch.device,
        attention: PackedAttention,
        gate: FirstRowsOnly | None = None,
        chunked: bool | None = None,
    ) -> None:
        self.chunked = model.causal if chunked is None else chunked
        self._model = model
        self._backbone: Any = model.backbone
        self._device = device
        self._attention = attention
        self._gate = gate
        # Without this a causal model would build a second cache of keys and values in every pass.
        self._options = {"use_cache": False} if declares(self._backbone, "use_cache") else {}
        self._carries: dict[int, Carry] = {}

    @torch.inference_mode()
    def forward(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        for chunk in sorted(step.chunks, key=lambda chunk: not chunk.is_prefix):
            if chunk.is_prefix or not (chunk.is_whole or chunk.is_all_after_prefix):
                prefix = chunk.sequence.prefix_id
                of_prefix = None if prefix is None else self._carries[prefix]
                self._carries.setdefault(chunk.sequence.sequence_id, Carry(of_prefix))
        batch = self.lay_out(step)
        cursor = batch.cursor
        if self._gate is not None:
            self._gate.rows = to_device(torch.tensor(cursor.starts), self._device)
            cursor = PoolingCursor(cursor.chunks, tuple(range(len(cursor.chunks))))
        inputs = {name: to_device(ids, self._device) for name, ids in self.inputs_of(batch).items()}
        return self.run(inputs, batch.layout), cursor

    def lay_out(self, step: Step) -> PackedBatch:
        """The step's tensors, on the host."""
        return lay_out(
            step,
            self._carries,
            causal=self._model.causal,
            arrangement=self._attention.arrangement,
            position_offset=self._model.position_offset,
            gate=self._gate,
        )

    def inputs_of(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        """What the backbone takes, by its names: int64 [rows] each."""
        inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
        if self._model.takes_type_ids:
            inputs["token_type_ids"] = batch.type_ids
        return inputs

    def run(self, inputs: dict[str, torch.Tensor], layout: Layout) -> torch.Tensor:
        """The hidden states [rows, hidden] of inputs [rows] on the device."""
        output = self._backbone(
            **{name: ids[None] for name, ids in inputs.items()},
            **self._options,
            attention_mask=None,
            layout=layout,
            attention=self._attention,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def free(self, sequence_id: int) -> None:
        self._carries.pop(sequence_id, None)

    @property
    def num_prefill_kv(self) -> int:
        return len(self._carries)
