"""Loads bi-encoders that read a text by one tower and a picture by another, and compare one vector of each:
CLIP and SigLIP.

Sources: Radford et al. 2021 (arXiv 2103.00020), Zhai et al. 2023 (arXiv 2303.15343)."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from transformers.modeling_outputs import BaseModelOutput

from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.checkpoint.heads import ModuleHead
from maxsimd.engine.checkpoint.model import Expansion, RoleRules, Task
from maxsimd.engine.checkpoint.reading import LibraryReader
from maxsimd.engine.checkpoint.reference import ModulesReference
from maxsimd.engine.checkpoint.visual.pixels import PixelScale, check_as_called, check_numbers
from maxsimd.engine.checkpoint.visual.processor import (
    apply_settings,
    refuse_other_readers,
    settings_for_pictures,
)
from maxsimd.engine.checkpoint.visual.squares import SquareReader, SquareTower
from maxsimd.engine.checkpoint.visual.vision import (
    Page,
    Tower,
    Vision,
    attention_a_patch,
    tokens_a_patch,
)
from maxsimd.engine.errors import ModelLoadError
from maxsimd.scheduler import TokenSequence

CLIP, SIGLIP = "clip", "siglip"
_PROBES = ("a", "a photo of two cats", "two\nlines, and numbers: 1.5", " a space in front")


def has_two_towers(files: CheckpointFiles) -> bool:
    """Whether a checkpoint is one of the models with a tower for texts and one for pictures."""
    return files.config.get("model_type") in (CLIP, SIGLIP)


def load_two_towers(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the checkpoint with sentence-transformers. Returns the parts of a `LoadedModel` that depend on
    the kind of checkpoint. Raises ModelLoadError."""
    if find_spec("PIL") is None:
        raise ModelLoadError(f"{path!r} reads pictures, for which Pillow is missing: pip install pillow")
    encoder = SentenceTransformer(path, **options, processor_kwargs={"backend": "pil"})
    transformer, *after = list(encoder)
    other = [type(module).__name__ for module in after if not isinstance(module, Normalize)]
    if other or encoder.similarity_fn_name not in ("cosine", "dot"):
        what = ", ".join(other) or f"the similarity {encoder.similarity_fn_name}"
        raise ModelLoadError(f"{path!r} has {what}, which is not supported for pictures")
    model, kind = transformer.auto_model, transformer.config.model_type
    if kind == SIGLIP:
        _fill_up(transformer)
    vision = _vision(path, transformer)
    projection = model.text_projection if kind == CLIP else model.text_model.head
    backbone = TextTower(model.text_model, projection)
    reference = ModulesReference([transformer, *after], transformer.tokenizer, "sentence_embedding")
    reference.pictures = _PictureInputs(vision.tower, next(model.parameters()).device)
    dim = projection.out_features
    head = ModuleHead(after, "sentence_embedding")
    prompts = {name: prompt for name, prompt in encoder.prompts.items() if prompt}
    rules = _rules(path, transformer, prompts.get(encoder.default_prompt_name or "", ""))
    return {
        "backbone": backbone,
        "tokenizer": transformer.tokenizer,
        "tasks": {"embed": Task("last", head, dim, bool(after), reference)},
        "score_task": "embed",
        "query": _rules(path, transformer, prompts.get("query", "")),
        "document": _rules(path, transformer, prompts.get("document", "")),
        "text": rules,
        "activation": torch.nn.Identity(),
        "similarity": encoder.similarity_fn_name,
        "prompts": prompts,
        "vision": vision,
        "reader": LibraryReader(encoder),
    }


class TextTower(torch.nn.Module):
    """A text model whose states are projected to where pictures are encoded."""

    def __init__(self, inner: Any, projection: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.inner.embeddings = _AtAnyLength(inner.embeddings)
        self.projection = projection
        self.config = inner.config
        self._leave_with_layers(None)
        for number, layer in enumerate(inner.encoder.layers):
            layer.self_attn.layer_idx = number

    def forward(self, step_attention: Any = None, **inputs: Any) -> BaseModelOutput:
        """The layers of SigLIP do not hand on what a pass brings for attention, so it is left with them."""
        if step_attention is not None:
            inputs["step_attention"] = step_attention
        self._leave_with_layers(step_attention)
        try:
            states = self.inner(**inputs).last_hidden_state
        finally:
            self._leave_with_layers(None)
        return BaseModelOutput(last_hidden_state=self.projection(states))

    def _leave_with_layers(self, step_attention: Any) -> None:
        for layer in self.inner.encoder.layers:
            layer.self_attn.step_attention = step_attention

    def get_input_embeddings(self) -> Any:
        return self.inner.embeddings.inner.token_embedding

    def set_attn_implementation(self, name: str) -> None:
        self.inner.set_attn_implementation(name)


class _AtAnyLength(torch.nn.Module):
    """The embeddings of tokens and positions. Those of the model refuse more tokens than a text may have,
    which several texts in one pass have together."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        if position_ids is None:
            alone: torch.Tensor = self.inner(input_ids=input_ids)
            return alone
        words, positions = self.inner.token_embedding, self.inner.position_embedding
        rows: torch.Tensor = words(input_ids) + positions(position_ids)
        return rows


class _PictureInputs:
    """What sentence-transformers' module takes for a picture, in place of a text's inputs."""

    def __init__(self, tower: Tower, device: torch.device) -> None:
        self._tower = tower
        self._device = device

    def __call__(self, sequence: TokenSequence) -> dict[str, Any]:
        images = [image.inputs for image in sequence.tokens.images]
        return {"modality": "image", **self._tower.inputs(images, self._device)} if images else {}


def _vision(path: str, transformer: Any) -> Vision:
    model, image_processor = transformer.auto_model, transformer.processor.image_processor
    refuse_other_readers(path, image_processor)
    apply_settings(path, image_processor, settings_for_pictures(transformer))
    config = model.config.vision_config
    # A picture stands for one token, which is never looked up.
    page = Page(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int64))
    reader = SquareReader(image_processor, page, (config.image_size // config.patch_size) ** 2)
    tower = SquareTower(model, model.vision_model, PixelScale.of(image_processor))
    check_numbers(path, image_processor, reader, tower)
    check_as_called(path, transformer, reader, tower)
    modules = [model.vision_model]
    if hasattr(model, "visual_projection"):
        modules.append(model.visual_projection)
    return Vision(
        reader,
        tower,
        tuple(modules),
        tokens_a_patch(modules, model.text_model),
        attention_a_patch(model.vision_model, modules),
        is_result=True,
    )


def _fill_up(transformer: Any) -> None:
    """SigLIP was trained on texts that are all filled up to one length, which its processor does only if it
    is told to."""
    length = transformer.config.text_config.max_position_embeddings
    settings = dict(transformer.processing_kwargs or {})
    settings["text"] = {"padding": "max_length", "max_length": length, **(settings.get("text") or {})}
    transformer.processing_kwargs = settings


def _rules(path: str, transformer: Any, prompt: str) -> RoleRules:
    """How texts are rendered. Raises ModelLoadError where the checkpoint's own processor makes other tokens
    of a text than these rules."""
    tokenizer = transformer.tokenizer
    expansion = None
    made = transformer.preprocess(["a"], prompt=prompt or None)
    length, alone = made["input_ids"].shape[1], tokenizer(prompt + "a")["input_ids"]
    if length > len(alone):
        attended = "attention_mask" not in made or bool(made["attention_mask"].all())
        expansion = Expansion(length, int(made["input_ids"][0, -1]), attended, fixed=True)
    for text in _PROBES:
        expected = transformer.preprocess([text], prompt=prompt or None)["input_ids"][0].tolist()
        ids = tokenizer(prompt + text)["input_ids"]
        if expansion is not None:
            ids = [*ids, *[expansion.token_id] * (length - len(ids))]
        if ids != expected:
            raise ModelLoadError(f"the processor of {path!r} renders texts in a way that is not known here")
    end = tokenizer.eos_token_id if transformer.config.model_type == CLIP else None
    return RoleRules(prompt, expansion=expansion, last_id=end)
