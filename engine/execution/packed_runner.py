"""Runs the backbone over a step in one packed pass.

Used by the device thread alone. What becomes of the hidden states is not decided here.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.checkpoint.reference import declares
from maxsimd.engine.checkpoint.short_convolution import short_convolutions_of
from maxsimd.engine.execution.attention.base import AttentionBackend, AttentionMetadata
from maxsimd.engine.execution.attention.interface import StepAttention
from maxsimd.engine.execution.cls_only_last_layer import ClsOnlyLastLayer
from maxsimd.engine.execution.features import FeatureStore
from maxsimd.engine.execution.lay_out import lay_out
from maxsimd.engine.execution.layout import PackedBatch
from maxsimd.engine.execution.prefill_kv import PrefillKV
from maxsimd.pooling.methods import PoolingCursor
from maxsimd.pooling.ragged import to_device
from maxsimd.scheduler import Chunk, ImageJob, Step


class ModelRunner(Protocol):
    """What the engine needs of a way to run the model."""

    chunked: bool

    def forward(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        """The hidden states [rows, hidden] of a step, and where each chunk's rows are.

        Running the same step again gives the same result, so that it may be retried."""
        ...

    def encode(self, images: Sequence[ImageJob]) -> None:
        """Encodes pictures for sequences of later steps; again, if it is to be retried."""
        ...

    def free(self, sequence_id: int) -> None:
        """Frees the keys and values of a cut sequence or a prefix, or the features of a picture, if there are
        any."""
        ...

    @property
    def num_features(self) -> int:
        """How many pictures have features on the device."""
        ...

    @property
    def num_prefill_kv(self) -> int:
        """How many sequences have keys and values on the device."""
        ...


class PackedRunner:
    """One pass over [1, rows]; owns the `PrefillKV` of sequences that are cut between steps and of prefixes.

    With `cls_only`, only the first row of each sequence comes out of the last layer."""

    def __init__(
        self,
        model: LoadedModel,
        device: torch.device,
        backend: AttentionBackend[Any],
        cls_only: ClsOnlyLastLayer | None = None,
        chunked: bool | None = None,
    ) -> None:
        self.chunked = model.causal if chunked is None else chunked
        self._model = model
        self._backbone: Any = model.backbone
        self._device = device
        self.backend = backend
        self.cls_only = cls_only
        # Without this a causal model would build a second cache of keys and values in every pass.
        self._options = {"use_cache": False} if declares(self._backbone, "use_cache") else {}
        # Attention knows from the layout which tokens it leaves out.
        names_attended = any(each.leaves_out_padding for each in short_convolutions_of(self._backbone))
        # What the backbone is called with.
        self.input_names: tuple[str, ...] = ("input_ids", "position_ids")
        if model.takes_type_ids:
            self.input_names += ("token_type_ids",)
        if names_attended:
            self.input_names += ("attended_rows",)
        self._prefill_kv: dict[int, PrefillKV] = {}
        self._features = None if model.vision is None else FeatureStore(model.vision, device)

    @torch.inference_mode()
    def forward(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        if self._features is not None and self._features.are_results:
            pictures = tuple(chunk for chunk in step.chunks if chunk.sequence.tokens.images)
            if pictures:
                return self._beside_texts(step, pictures)
        return self._forward(step)

    def _beside_texts(self, step: Step, pictures: tuple[Chunk, ...]) -> tuple[torch.Tensor, PoolingCursor]:
        """The states of texts, and behind them a row for each picture, which no language model reads."""
        assert self._features is not None
        rows = self._features.rows_of([chunk.sequence.tokens.images[0].image_id for chunk in pictures])
        texts = tuple(chunk for chunk in step.chunks if not chunk.sequence.tokens.images)
        if not texts:
            return rows, PoolingCursor(pictures, tuple(range(len(rows))))
        hidden, cursor = self._forward(Step(step.step_id, texts))
        starts = range(len(hidden), len(hidden) + len(rows))
        together = PoolingCursor((*cursor.chunks, *pictures), (*cursor.starts, *starts))
        return torch.cat([hidden, rows.to(hidden.dtype)]), together

    def _forward(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        for chunk in sorted(step.chunks, key=lambda chunk: not chunk.is_prefix):
            if chunk.is_prefix or not (chunk.is_whole or chunk.is_all_after_prefix):
                prefix = chunk.sequence.prefix_id
                of_prefix = None if prefix is None else self._prefill_kv[prefix]
                self._prefill_kv.setdefault(chunk.sequence.sequence_id, PrefillKV(of_prefix))
        batch = self.lay_out(step)
        cursor = batch.cursor
        if self.cls_only is not None:
            self.cls_only.rows = to_device(torch.tensor(cursor.starts), self._device)
            cursor = PoolingCursor(cursor.chunks, tuple(range(len(cursor.chunks))))
        inputs = {name: to_device(ids, self._device) for name, ids in self.inputs_of(batch).items()}
        pictures: dict[str, Any] = {}
        if batch.images:
            assert self._features is not None
            embeddings = self._backbone.get_input_embeddings()(inputs.pop("input_ids"))  # [rows, hidden]
            pictures = self._features.put_into(embeddings, batch.images)
        return self.run(inputs, self.prepare(batch), pictures), cursor

    def encode(self, images: Sequence[ImageJob]) -> None:
        assert self._features is not None
        self._features.encode(images)

    def lay_out(self, step: Step) -> PackedBatch:
        """The step's tensors, on the CPU."""
        return lay_out(
            step,
            self._prefill_kv,
            causal=self._model.causal,
            arrangement=self.backend.arrangement,
            position_offset=self._model.position_offset,
            uncounted_id=self._model.uncounted_id,
        )

    def prepare(self, batch: PackedBatch) -> AttentionMetadata:
        """What the backend needs of a step, on the device."""
        metadata: AttentionMetadata = self.backend.prepare(batch.layout, self._device)
        return metadata

    def inputs_of(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        """The backbone's inputs by name: int64 [rows] each, and positions perhaps [3, rows]."""
        made = {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            "token_type_ids": batch.type_ids,
            "attended_rows": batch.attended_rows,
        }
        return {name: made[name] for name in self.input_names}

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        metadata: AttentionMetadata,
        pictures: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """The hidden states [rows, hidden] of `inputs_of` a step, on the device, with the backend's metadata
        and, for a step with pictures, what the store of features makes of its tokens."""
        output = self._backbone(
            **{name: ids.unsqueeze(-2) for name, ids in inputs.items()},
            **(pictures or {}),
            **self._options,
            attention_mask=None,
            step_attention=StepAttention(self.backend, metadata, self.cls_only),
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def free(self, sequence_id: int) -> None:
        self._prefill_kv.pop(sequence_id, None)
        if self._features is not None:
            self._features.free(sequence_id)

    @property
    def num_features(self) -> int:
        return 0 if self._features is None else len(self._features)

    @property
    def num_prefill_kv(self) -> int:
        return len(self._prefill_kv)
