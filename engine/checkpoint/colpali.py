"""Loads ColPali as transformers has it (`ColPaliForRetrieval`): PaliGemma and a projection, by which texts
and pages become one vector a token.

Source: Faysse et al. 2024 (arXiv 2407.01449)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize

from maxsimd.engine.checkpoint.heads import ModuleHead
from maxsimd.engine.checkpoint.model import RoleRules, Task
from maxsimd.engine.checkpoint.reference import VisualReference
from maxsimd.engine.checkpoint.retrieval import processor_of, rules_as_rendered, settings_of
from maxsimd.engine.checkpoint.vision import ImageInputs, Page, Vision, tokens_a_patch
from maxsimd.engine.media import Picture
from maxsimd.engine.media.decoding import pillow_of

# PaliGemma counts positions from 1.
_FIRST_POSITION = 1
# Pictures that the tower encodes together.
_TOGETHER = 4


def load_colpali(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the checkpoint with sentence-transformers.

    Returns the parts of a `LoadedModel` that depend on the kind of checkpoint. Raises ModelLoadError."""
    model = MultiVectorEncoder(path, **options, processor_kwargs={"backend": "pil"})
    transformer: Any = model[0]
    processor, retrieval = processor_of(path, model), transformer.model
    vlm = retrieval.vlm
    backbone, modules = vlm.language_model, (vlm.vision_tower, vlm.multi_modal_projector)
    tokenizer, projection = processor.tokenizer, retrieval.embedding_proj_layer
    dense = Dense(
        projection.in_features,
        projection.out_features,
        bias=True,
        activation_function=torch.nn.Identity(),
        module_input_name="token_embeddings",
    )
    dense.linear = projection
    head = ModuleHead([dense, Normalize("token_embeddings")], "token_embeddings")
    task = Task("all", head, projection.out_features, True, VisualReference(retrieval))
    leading = np.array([tokenizer.bos_token_id], dtype=np.int32)
    trailing = f"{processor.query_augmentation_token * 10}\n"
    rules = rules_as_rendered(path, transformer, RoleRules(processor.query_prefix, leading), trailing)
    return {
        "backbone": backbone,
        "tokenizer": tokenizer,
        "position_offset": _FIRST_POSITION,
        "tasks": {"token_embed": task},
        "score_task": "token_embed",
        "query": rules,
        # The checkpoint has one way to read texts, whatever they are.
        "document": rules,
        "text": rules,
        "activation": torch.nn.Identity(),
        "similarity": model.similarity_fn_name,
        "vision": Vision(
            ColPaliReader(processor, backbone.config.vocab_size),
            SiglipTower(vlm),
            modules,
            tokens_a_patch(modules, backbone),
        ),
    }


class ColPaliReader:
    """Pictures as squares of one size, each as many tokens, with the checkpoint's prompt behind them."""

    def __init__(self, processor: Any, vocabulary: int) -> None:
        self._image_processor = processor.image_processor
        blank = Picture(np.zeros((8, 8, 3), dtype=np.uint8))
        made = processor(images=[as_pillow(blank)])
        ids = np.asarray(made["input_ids"][0])
        positions = np.flatnonzero(ids == processor.image_token_id)
        # In their place stand features, and the token itself may be none of the model's.
        ids = np.where(ids == processor.image_token_id, 0, ids).astype(np.int32)
        self._page = Page(ids, positions)
        self.signature = settings_of(processor, self._page)

    def read(self, picture: Picture) -> ImageInputs:
        made = self._image_processor(images=[as_pillow(picture)], return_tensors="np")
        pixels = made["pixel_values"][0].astype(np.float32)  # [3, height, width]
        size = picture.width, picture.height
        return ImageInputs({"pixel_values": pixels}, len(self._page.positions), size, picture.digest)

    def page(self, inputs: ImageInputs) -> Page:
        return self._page


class SiglipTower:
    """Squares of one size, some at a time."""

    def __init__(self, vlm: Any) -> None:
        self._vlm = vlm

    def __call__(self, images: Sequence[ImageInputs], device: torch.device) -> list[torch.Tensor]:
        features: list[torch.Tensor] = []
        dtype = next(self._vlm.vision_tower.parameters()).dtype
        for first in range(0, len(images), _TOGETHER):
            some = images[first : first + _TOGETHER]
            pixels = torch.from_numpy(np.stack([image.arrays["pixel_values"] for image in some]))
            # [pictures, features, hidden]
            features += self._vlm.get_image_features(pixels.to(device, dtype)).pooler_output
        return features


def as_pillow(picture: Picture) -> Any:
    """The picture as processors take it: arrays they might read with channels in another place."""
    return pillow_of(picture.pixels)
