"""Pictures as SigLIP reads them: squares of one size, each as many tokens. As ColPali has it."""

from collections.abc import Sequence
from math import isqrt
from typing import Any

import numpy as np
import torch

from maxsimd.engine.checkpoint.visual.pixels import PixelScale, resized, together
from maxsimd.engine.checkpoint.visual.processor import as_pillow, blank, page_of, settings_of
from maxsimd.engine.checkpoint.visual.vision import ImageInputs, Page
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
        self.signature = settings_of(processor.image_processor, self._page)

    def read(self, picture: Picture) -> ImageInputs:
        made = resized(self._image_processor, as_pillow(picture))
        arrays = {"pixels": made["pixel_values"].astype(np.uint8)}  # [1, 3, height, width]
        size = picture.width, picture.height
        return ImageInputs(arrays, len(self._page.positions), self._grid, size, picture.digest)

    def page(self, inputs: ImageInputs) -> Page:
        return self._page


class SquareTower:
    """Squares of one size, some at a time."""

    def __init__(self, vlm: Any, scale: PixelScale) -> None:
        self._vlm = vlm
        self._scale = scale

    def inputs(self, images: Sequence[ImageInputs], device: torch.device) -> dict[str, torch.Tensor]:
        pixels = together([image.arrays["pixels"] for image in images], device)
        return {"pixel_values": self._scale(pixels)}

    def __call__(self, images: Sequence[ImageInputs], device: torch.device) -> list[torch.Tensor]:
        features: list[torch.Tensor] = []
        dtype = next(self._vlm.vision_tower.parameters()).dtype
        for first in range(0, len(images), _TOGETHER):
            pixels = self.inputs(images[first : first + _TOGETHER], device)["pixel_values"]
            # [pictures, features, hidden]
            features += self._vlm.get_image_features(pixels.to(dtype)).pooler_output
        return features
