"""Pictures as squares of one size, each as many features: SigLIP's and CLIP's towers."""

from collections.abc import Sequence
from math import isqrt
from typing import Any

import numpy as np
import torch

from maxsimd.engine.checkpoint.visual.pixels import PixelScale, resized, together
from maxsimd.engine.checkpoint.visual.processor import settings_of
from maxsimd.engine.checkpoint.visual.vision import ImageInputs, Page
from maxsimd.engine.media import Picture

# Pictures that the tower encodes together: some, or as many as have this many patches.
_TOGETHER, _PATCHES = 4, 4096


class SquareReader:
    """Each picture as a square of as many `patches`, which becomes the `page`."""

    def __init__(self, image_processor: Any, page: Page, patches: int) -> None:
        self._image_processor = image_processor
        self._page = page
        self._patches = patches
        side = isqrt(len(page.positions))
        self._grid = side, side
        self.signature = settings_of(image_processor, page)

    def read(self, picture: Picture) -> ImageInputs:
        made = resized(self._image_processor, picture)
        arrays = {"pixels": made["pixel_values"].astype(np.uint8)}  # [1, 3, height, width]
        size = picture.width, picture.height
        return ImageInputs(arrays, self._patches, self._grid, size, picture.digest)

    def page(self, inputs: ImageInputs) -> Page:
        return self._page

    def written(self, inputs: ImageInputs) -> str:
        raise NotImplementedError("no chat template writes squares")


class SquareTower:
    """Squares of one size, some at a time. The `model` has the features of pictures that the `tower`
    encodes: several each, or one."""

    def __init__(self, model: Any, tower: torch.nn.Module, scale: PixelScale) -> None:
        self._model = model
        self._tower = tower
        self._scale = scale

    def inputs(self, images: Sequence[ImageInputs], device: torch.device) -> dict[str, torch.Tensor]:
        pixels = together([image.arrays["pixels"] for image in images], device)
        return {"pixel_values": self._scale(pixels)}

    def __call__(self, images: Sequence[ImageInputs], device: torch.device) -> list[torch.Tensor]:
        features: list[torch.Tensor] = []
        dtype = next(self._tower.parameters()).dtype
        together = max(_TOGETHER, _PATCHES // max(1, images[0].patches))
        for first in range(0, len(images), together):
            pixels = self.inputs(images[first : first + together], device)["pixel_values"]
            # [pictures, features, hidden], or [pictures, hidden]
            made = self._model.get_image_features(pixels.to(dtype)).pooler_output
            features += made if made.dim() == 3 else made[:, None]
        return features
