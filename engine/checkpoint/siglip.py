"""Pictures as SigLIP reads them: squares of one size, each as many tokens. As ColPali has it."""

from collections.abc import Sequence
from math import isqrt
from typing import Any

import numpy as np
import torch

from maxsimd.engine.checkpoint.processor import as_pillow, blank, page_of, settings_of
from maxsimd.engine.checkpoint.vision import ImageInputs, Page
from maxsimd.engine.media import Picture

# Pictures that the tower encodes together.
_TOGETHER = 4


class SquareReader:
    """Each picture as a square, with the checkpoint's prompt beside it."""

    def __init__(self, processor: Any) -> None:
        self._image_processor = processor.image_processor
        self._page = page_of(processor(images=[blank(8, 8)])["input_ids"][0], processor.image_token_id)
        side = isqrt(len(self._page.positions))
        self._grid = side, side
        self.signature = settings_of(processor, self._page)

    def read(self, picture: Picture) -> ImageInputs:
        made = self._image_processor(images=[as_pillow(picture)], return_tensors="np")
        pixels = made["pixel_values"].astype(np.float32)  # [1, 3, height, width]
        size = picture.width, picture.height
        arrays = {"pixel_values": pixels}
        return ImageInputs(arrays, len(self._page.positions), self._grid, size, picture.digest)

    def page(self, inputs: ImageInputs) -> Page:
        return self._page


class SquareTower:
    """Squares of one size, some at a time."""

    def __init__(self, vlm: Any) -> None:
        self._vlm = vlm

    def __call__(self, images: Sequence[ImageInputs], device: torch.device) -> list[torch.Tensor]:
        features: list[torch.Tensor] = []
        dtype = next(self._vlm.vision_tower.parameters()).dtype
        for first in range(0, len(images), _TOGETHER):
            some = images[first : first + _TOGETHER]
            pixels = torch.from_numpy(np.concatenate([image.arrays["pixel_values"] for image in some]))
            # [pictures, features, hidden]
            features += self._vlm.get_image_features(pixels.to(device, dtype)).pooler_output
        return features
