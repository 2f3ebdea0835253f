"""Runs the backbone over a step in one packed pass: its inputs, its attention, pictures, and keys and values
between steps. Used by the device thread alone."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.checkpoint.reference import declares
from maxsimd.engine.checkpoint.visual import Vision
from maxsimd.engine.execution.attention.backend import AttentionBackend, AttentionMetadata
from maxsimd.engine.execution.layout import ImageRows, PackedBatch, PrefillKV, lay_out
from maxsimd.engine.models import bert
from maxsimd.engine.models.lfm2 import short_convolutions_of
from maxsimd.engine.ops.qkv import KV, QKV, PositionBias
from maxsimd.pooling.methods import PoolingCursor
from maxsimd.pooling.ragged import to_device
from maxsimd.scheduler import Chunk, ImageJob, Step

# The name of the first row of each sequence among the inputs of a step.
FIRSTS = "first rows"


class ModelRunner(ABC):
    """A way to run the model. By default it holds nothing between steps and encodes no pictures."""

    # Whether sequences may be cut between steps and share prefixes.
    chunked: bool

    @abstractmethod
    def forward(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        """The hidden states [rows, hidden] of a step, and where each chunk's rows are. A step may be run
        again, with the same result."""

    def encode(self, images: Sequence[ImageJob]) -> None:  # noqa: B027
        """Encodes pictures for sequences of later steps. May be called again."""

    def free(self, sequence_id: int) -> None:  # noqa: B027
        """Frees what is held for a sequence, a prefix or a picture."""

    @property
    def num_features(self) -> int:
        """The number of pictures that have features on the device."""
        return 0

    @property
    def num_prefill_kv(self) -> int:
        """The number of sequences that have keys and values on the device."""
        return 0


class ClsOnlyLastLayer(nn.Module):
    """Replaces the output module of the last layer's attention, so that the rest of the layer runs on `rows`
    alone if they are set: a model that is pooled by its first token needs no others. For BERT, RoBERTa,
    XLM-RoBERTa and ELECTRA.

    The output module maps (attended, residual), both [1, rows, hidden]."""

    def __init__(self, inner: nn.Module, attention: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._attention = (attention,)  # out of the module tree
        self.rows: torch.Tensor | None = None

    def belongs_to(self, attention: nn.Module) -> bool:
        """Whether `attention` is the one whose output this module receives."""
        return self._attention[0] is attention

    def forward(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self.rows is not None:
            attended, residual = attended[:, self.rows], residual[:, self.rows]
        out: torch.Tensor = self.inner(attended, residual)
        return out


def install_cls_only(backbone: Any) -> ClsOnlyLastLayer | None:
    """Installs it in a backbone's last layer; None if the layer is not built as BERT's."""
    layers = getattr(getattr(backbone, "encoder", None), "layer", None)
    attention: Any = getattr(layers[-1], "attention", None) if layers else None
    own, output = getattr(attention, "self", None), getattr(attention, "output", None)
    if not isinstance(own, nn.Module) or not isinstance(output, nn.Module):
        return None
    if not type(output).__name__.endswith("SelfOutput"):
        return None
    attention.output = cls_only = ClsOnlyLastLayer(output, own)
    return cls_only


def remove_cls_only(backbone: Any, cls_only: ClsOnlyLastLayer) -> None:
    """Restores the backbone's last layer."""
    backbone.encoder.layer[-1].attention.output = cls_only.inner


ATTENTION_NAME = "maxsimd_packed"
_UNSUPPORTED = ("softcap", "s_aux")


@dataclass(frozen=True, slots=True, eq=False)
class StepAttention:
    """The attention of one step, which every layer gets: a backend with its metadata, and the last layer if
    it computes first rows alone. `windows` collects the windows that layers ask for."""

    backend: AttentionBackend
    metadata: AttentionMetadata
    cls_only: ClsOnlyLastLayer | None = None
    windows: set[int | None] = field(default_factory=set)

    @property
    def longest(self) -> int:
        """The tokens of the longest whole sequence of the step."""
        return self.metadata.layout.longest

    def attend(self, module: Any, qkv: QKV) -> torch.Tensor:
        """Attention for the attention `module` of a layer: [rows, heads, head_dim]. Raises
        NotImplementedError for relative positions that the backend lacks."""
        if qkv.relative is not None and not self.backend.supports_relative:
            raise NotImplementedError(f"attention by {self.backend.name} lacks relative positions")
        layout = self.metadata.layout
        self.windows.add(qkv.window)
        if self.cls_only is not None and self.cls_only.belongs_to(module):
            return self.backend.first_rows(qkv, self.metadata)
        if layout.has_only_whole_sequences:
            return self.backend.full(qkv, self.metadata)
        out = qkv.new_output()
        if layout.groups:
            whole = slice(0, layout.groups[-1].rows.stop)
            out[whole] = self.backend.full(qkv.of_rows(whole), self.metadata)
        if layout.prefill_chunks:
            contexts = self._contexts(module.layer_idx, qkv)
            self.backend.with_prefill_kv(qkv, contexts, self.metadata, out)
        # After the chunks above: prefixes of the same step are among them.
        if layout.shared_groups:
            shared = dict.fromkeys(group.prefix for group in layout.shared_groups)
            stored = {prefix: prefix.all_of(module.layer_idx) for prefix in shared}
            prefixes = [stored[group.prefix] for group in layout.shared_groups]
            self.backend.shared_prefix(qkv, prefixes, self.metadata, out)
        return out

    def _contexts(self, layer: int, qkv: QKV) -> list[KV]:
        """The keys and values that each prefill chunk attends to; stores its own where needed later."""
        contexts = []
        for chunk in self.metadata.layout.prefill_chunks:
            own = KV(qkv.key[:, chunk.rows], qkv.value[:, chunk.rows])
            contexts.append(chunk.prefill_kv.extend(layer, chunk.start, own, store=chunk.is_stored))
        return contexts


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_bias: Any = None,
    step_attention: StepAttention | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: [1, heads, rows, head_dim] each to [1, rows, heads, head_dim].

    Raises for features that packed attention lacks: the self-check fails and the model runs padded."""
    if step_attention is None:  # where layers do not hand it on
        step_attention = getattr(module, "step_attention", None)
    if step_attention is None:
        raise RuntimeError("packed attention was called outside of a packed step")
    if any(kwargs.get(name) is not None for name in _UNSUPPORTED):
        raise NotImplementedError("packed attention supports neither softcap nor sinks")
    if position_bias is not None and not isinstance(position_bias, PositionBias):
        raise NotImplementedError("packed attention supports position bias by distance alone")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    qkv = QKV(query[0], key[0], value[0], scaling, sliding_window, position_bias)
    return step_attention.attend(module, qkv)[None], None


def register_attention() -> None:
    """Registers `attend` for our own models and with transformers if it is loaded. transformers makes no mask
    for a name without a mask function; the layout says which rows attend together."""
    bert.ATTENTION_FUNCTIONS[ATTENTION_NAME] = attend
    if "transformers" in sys.modules:  # else no model of its own is loaded
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION_NAME, attend)


class FeatureStore:
    """Owns the features [n, hidden x layers] of pictures by id, until the sequences with them have run."""

    def __init__(self, vision: Vision, device: torch.device) -> None:
        self._vision = vision
        self._device = device
        self._features: dict[int, torch.Tensor] = {}

    @torch.inference_mode()
    def encode(self, jobs: Sequence[ImageJob]) -> None:
        """Encodes pictures together; may be repeated."""
        features = self._vision.tower([job.inputs for job in jobs], self._device)
        for job, rows in zip(jobs, features, strict=True):
            # A clone, so that one picture does not hold the memory of all that were encoded with it.
            self._features[job.image_id] = rows.clone() if len(jobs) > 1 else rows

    def put_into(self, embeddings: torch.Tensor, images: Sequence[ImageRows]) -> dict[str, Any]:
        """The backbone's inputs for a step with pictures: the token embeddings [rows, hidden] with features
        in the rows of pictures; with features for further layers, also the mask of these rows and the
        features. Raises KeyError for a picture that was not encoded."""
        rows = to_device(np.concatenate([image.rows for image in images]), self._device)
        parts = [self._features[each.image_id][each.first : each.first + len(each.rows)] for each in images]
        first, *deeper = torch.cat(parts).to(embeddings.dtype).split(embeddings.shape[-1], dim=-1)
        inputs: dict[str, Any] = {"inputs_embeds": embeddings.index_copy(0, rows, first.contiguous())[None]}
        if deeper:
            mask = torch.zeros(len(embeddings), dtype=torch.bool, device=self._device)
            inputs["visual_pos_masks"] = mask.index_fill(0, rows, True)[None]
            inputs["deepstack_visual_embeds"] = deeper
        return inputs

    @property
    def are_results(self) -> bool:
        """Whether a picture's feature is its hidden state, which no language model reads."""
        return self._vision.is_result

    def rows_of(self, image_ids: Sequence[int]) -> torch.Tensor:
        """The features [pictures, hidden] of pictures with one each. Raises KeyError for one not encoded."""
        return torch.cat([self._features[image_id] for image_id in image_ids])

    def free(self, image_id: int) -> None:
        self._features.pop(image_id, None)

    def __len__(self) -> int:
        return len(self._features)


class PackedRunner(ModelRunner):
    """One pass over [1, rows]. Owns the `PrefillKV` of cut sequences and of prefixes. With `cls_only`, the
    last layer gives the first row of each sequence alone."""

    def __init__(
        self,
        model: LoadedModel,
        device: torch.device,
        backend: AttentionBackend,
        cls_only: ClsOnlyLastLayer | None = None,
        chunked: bool | None = None,
    ) -> None:
        self.chunked = model.causal if chunked is None else chunked
        self._model = model
        self._backbone: Any = model.backbone
        self._device = device
        self.backend = backend
        self.cls_only = cls_only
        # The windows that layers asked for, None among them for attention without one.
        self.windows: set[int | None] = set()
        # Or a causal model builds a second cache of keys and values in every pass.
        self._options = {"use_cache": False} if declares(self._backbone, "use_cache") else {}
        # Attention knows from the layout which tokens it leaves out.
        names_attended = any(each.leaves_out_padding for each in short_convolutions_of(self._backbone))
        names = {"input_ids": True, "position_ids": True}
        names |= {"token_type_ids": model.takes_type_ids, "attended_rows": names_attended}
        self.input_names = tuple(name for name, is_taken in names.items() if is_taken)
        self._prefill_kv: dict[int, PrefillKV] = {}
        self._features = None if model.vision is None else FeatureStore(model.vision, device)

    @torch.inference_mode()
    def forward(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        if self._features is not None and self._features.are_results:
            pictures = tuple(chunk for chunk in step.chunks if chunk.sequence.tokens.images)
            if pictures:
                return self._forward_with_pictures(step, self._features, pictures)
        return self._forward(step)

    def _forward_with_pictures(
        self, step: Step, features: FeatureStore, pictures: tuple[Chunk, ...]
    ) -> tuple[torch.Tensor, PoolingCursor]:
        """The states of texts, then a row for each picture."""
        rows = features.rows_of([chunk.sequence.tokens.images[0].image_id for chunk in pictures])
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
        inputs = {name: to_device(ids, self._device) for name, ids in self.inputs_of(batch).items()}
        pictures: dict[str, Any] = {}
        if batch.images:
            assert self._features is not None
            embeddings = self._backbone.get_input_embeddings()(inputs.pop("input_ids"))  # [rows, hidden]
            pictures = self._features.put_into(embeddings, batch.images)
        return self.run(inputs, self.prepare(batch), pictures), self.cursor_of(batch)

    def encode(self, images: Sequence[ImageJob]) -> None:
        assert self._features is not None
        self._features.encode(images)

    def lay_out(self, step: Step) -> PackedBatch:
        return lay_out(
            step,
            self._prefill_kv,
            causal=self._model.causal,
            arrangement=self.backend.arrangement,
            position_offset=self._model.position_offset,
            uncounted_id=self._model.uncounted_id,
        )

    def prepare(self, batch: PackedBatch) -> AttentionMetadata:
        metadata: AttentionMetadata = self.backend.prepare(batch.layout, self._device)
        return metadata

    def inputs_of(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        """The inputs of `run` by name, int64: [rows] each, but positions may be [3, rows], and the first rows
        that the last layer computes alone are [sequences]."""
        inputs = {name: getattr(batch, name) for name in self.input_names}
        return inputs if self.cls_only is None else inputs | {FIRSTS: torch.tensor(batch.cursor.starts)}

    def cursor_of(self, batch: PackedBatch) -> PoolingCursor:
        """Where each chunk's rows are among the hidden states."""
        chunks = batch.cursor.chunks
        return batch.cursor if self.cls_only is None else PoolingCursor(chunks, tuple(range(len(chunks))))

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        metadata: AttentionMetadata,
        pictures: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """The hidden states [rows, hidden] for `inputs_of` a step on the device, or [sequences, hidden] if
        the last layer gives first rows alone. `pictures` are the inputs that a `FeatureStore` makes."""
        inputs = dict(inputs)
        if self.cls_only is not None:
            self.cls_only.rows = inputs.pop(FIRSTS)
        output = self._backbone(
            **{name: ids.unsqueeze(-2) for name, ids in inputs.items()},
            **(pictures or {}),
            **self._options,
            attention_mask=None,
            step_attention=StepAttention(self.backend, metadata, self.cls_only, self.windows),
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


class FasterRunner(ModelRunner):
    """Runs some steps in a faster way than the packed runner `inner`, which has the pictures, keys and
    values."""

    def __init__(self, inner: PackedRunner) -> None:
        self.chunked = inner.chunked
        self.inner = inner

    def encode(self, images: Sequence[ImageJob]) -> None:
        self.inner.encode(images)

    def free(self, sequence_id: int) -> None:
        self.inner.free(sequence_id)

    @property
    def num_features(self) -> int:
        return self.inner.num_features

    @property
    def num_prefill_kv(self) -> int:
        return self.inner.num_prefill_kv


def is_whole_text(chunk: Chunk) -> bool:
    """Whether a chunk is a whole sequence without pictures, at the positions of text."""
    tokens = chunk.sequence.tokens
    return chunk.is_whole and not chunk.is_prefix and not tokens.images and tokens.position_ids is None
