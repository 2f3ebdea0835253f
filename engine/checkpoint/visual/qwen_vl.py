"""What Qwen2-VL, Qwen2.5-VL and Qwen3-VL have in common: a tower over grids of patches, and positions in
time, height and width."""

from typing import Any

import numpy as np
import torch

from maxsimd.engine.checkpoint.visual.grids import GridReader, GridTower
from maxsimd.engine.checkpoint.visual.pixels import PixelScale, check_numbers
from maxsimd.engine.checkpoint.visual.processor import refuse_other_readers
from maxsimd.engine.checkpoint.visual.vision import (
    Page,
    Vision,
    attention_a_patch,
    tokens_a_patch,
)
from maxsimd.scheduler import TokenSequence

# How the models write a picture.
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


def vision_of(path: str, model: Any, processor: Any) -> Vision:
    """How a model reads pictures, as its processor makes numbers of them. Raises ModelLoadError for one that
    is not read as expected here."""
    image_processor = processor.image_processor
    refuse_other_readers(path, image_processor)
    scale = PixelScale.of(image_processor)
    token = processor.image_token_id
    alone = Page(np.array([token], dtype=np.int32), np.zeros(1, dtype=np.int64))
    reader = GridReader(image_processor, alone, processor.image_token)
    tower = GridTower(model.visual, scale, image_processor.temporal_patch_size)
    check_numbers(path, image_processor, reader, tower)
    modules = (model.visual,)
    return Vision(
        reader,
        tower,
        modules,
        tokens_a_patch(modules, model.language_model),
        attention_a_patch(model.visual, modules),
        mrope=True,
        image_token_id=token,
        image_token=processor.image_token,
    )


class PictureInputs:
    """What the model's own code takes for the pictures of a sequence, beside its token ids."""

    def __init__(self, vision: Vision, device: torch.device) -> None:
        self._vision = vision
        self._device = device

    def __call__(self, sequence: TokenSequence) -> dict[str, torch.Tensor]:
        inputs: dict[str, torch.Tensor] = {}
        if self._vision.mrope:
            types = np.zeros((1, len(sequence)), dtype=np.int64)
            for image in sequence.tokens.images:
                types[0, image.positions] = 1
            inputs["mm_token_type_ids"] = torch.from_numpy(types).to(self._device)
        if sequence.tokens.images:
            images = [image.inputs for image in sequence.tokens.images]
            inputs |= self._vision.tower.inputs(images, self._device)
        return inputs
