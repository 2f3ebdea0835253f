"""Pictures as the Qwen-VL models read them: in their own proportions, as many tokens as they have patches."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from maxsimd.engine.checkpoint.visual.pixels import PixelScale, resized, together
from maxsimd.engine.checkpoint.visual.processor import settings_of
from maxsimd.engine.checkpoint.visual.vision import ImageInputs, Page
from maxsimd.engine.media import Picture


class GridReader:
    """Each picture as a grid of patches, of which several are one token, beside the other tokens of the
    `page` that a checkpoint makes of a picture alone. A token of a picture is written as `text`."""

    def __init__(self, image_processor: Any, page: Page, text: str = "") -> None:
        self._image_processor = image_processor
        self._merge = image_processor.merge_size
        self._frames = image_processor.temporal_patch_size
        first, last = int(page.positions[0]), int(page.positions[-1])
        self._before, self._after = page.ids[:first], page.ids[last + 1 :]
        self._token = int(page.ids[first])
        self._text = text
        self.signature = settings_of(image_processor, Page(page.ids, page.positions[:1]))

    def read(self, picture: Picture) -> ImageInputs:
        made = resized(self._image_processor, picture)
        # A picture has the same pixels in each of a patch's frames, of which one is enough.
        patches = made["pixel_values"].reshape(len(made["pixel_values"]), 3, self._frames, -1)
        grid = made["image_grid_thw"].astype(np.int64)  # [1, 3]
        # [patches, 3, pixels of a patch]
        arrays = {"pixels": patches[:, :, 0].astype(np.uint8), "grid": grid}
        merged = int(grid[0, 1]) // self._merge, int(grid[0, 2]) // self._merge
        return ImageInputs(arrays, len(patches), merged, (picture.width, picture.height), picture.digest)

    def page(self, inputs: ImageInputs) -> Page:
        count = inputs.patches // self._merge**2
        ids = np.concatenate([self._before, np.full(count, self._token, dtype=np.int32), self._after])
        return Page(ids, np.arange(count) + len(self._before))

    def written(self, inputs: ImageInputs) -> str:
        return self._text * inputs.features


class GridTower:
    """Pictures of all sizes in one pass: their patches end to end. A tower with DeepStack (Meng et al. 2024,
    arXiv 2406.04334) has features for several layers of the language model, side by side."""

    def __init__(self, tower: Any, scale: PixelScale, frames: int) -> None:
        self._tower = tower
        self._scale = scale
        self._frames = frames

    def inputs(self, images: Sequence[ImageInputs], device: torch.device) -> dict[str, torch.Tensor]:
        """`pixel_values` [patches of all, numbers of a patch] and `image_grid_thw` [pictures, 3]."""
        numbers = self._scale(together([image.arrays["pixels"] for image in images], device))
        patches = numbers[:, :, None].expand(-1, -1, self._frames, -1).flatten(1)
        grids = together([image.arrays["grid"] for image in images], device)
        return {"pixel_values": patches, "image_grid_thw": grids}

    def __call__(self, images: Sequence[ImageInputs], device: torch.device) -> list[torch.Tensor]:
        dtype = next(self._tower.parameters()).dtype
        inputs = self.inputs(images, device)
        patches, grids = inputs["pixel_values"].to(dtype), inputs["image_grid_thw"]
        made = self._tower(patches, grid_thw=grids, return_dict=True)
        # What is added to the first layers' states stands beside what takes the place of embeddings.
        deep = getattr(made, "deepstack_features", None) or []
        features = torch.cat([made.pooler_output, *deep], dim=-1)  # [features of all, hidden x (1 + layers)]
        merged = self._tower.spatial_merge_size**2
        return [*torch.split(features, [image.patches // merged for image in images])]
