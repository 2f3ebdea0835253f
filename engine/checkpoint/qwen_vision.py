"""Pictures as the Qwen-VL models read them: in their own proportions, as many tokens as they have patches."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from maxsimd.engine.checkpoint.processor import as_pillow, blank, page_of, settings_of
from maxsimd.engine.checkpoint.vision import ImageInputs, Page
from maxsimd.engine.media import Picture


class GridReader:
    """Each picture as a grid of patches, of which several are one token, with the checkpoint's prompt beside
    it."""

    def __init__(self, processor: Any) -> None:
        self._image_processor = processor.image_processor
        self._merge = self._image_processor.merge_size
        page = page_of(processor(images=[blank(56, 56)])["input_ids"][0], processor.image_token_id)
        first, last = int(page.positions[0]), int(page.positions[-1])
        self._before, self._after = page.ids[:first], page.ids[last + 1 :]
        self.signature = settings_of(processor, Page(page.ids, page.positions[:1]))

    def read(self, picture: Picture) -> ImageInputs:
        made = self._image_processor(images=[as_pillow(picture)], return_tensors="np")
        patches = made["pixel_values"].astype(np.float32)  # [patches, numbers of a patch]
        grid = made["image_grid_thw"].astype(np.int64)  # [1, 3]
        arrays = {"pixel_values": patches, "image_grid_thw": grid}
        merged = int(grid[0, 1]) // self._merge, int(grid[0, 2]) // self._merge
        return ImageInputs(arrays, len(patches), merged, (picture.width, picture.height), picture.digest)

    def page(self, inputs: ImageInputs) -> Page:
        count = inputs.patches // self._merge**2
        ids = np.concatenate([self._before, np.zeros(count, dtype=np.int32), self._after])
        return Page(ids, np.arange(count) + len(self._before))


class GridTower:
    """Pictures of all sizes in one pass: their patches end to end."""

    def __init__(self, tower: Any) -> None:
        self._tower = tower

    def __call__(self, images: Sequence[ImageInputs], device: torch.device) -> list[torch.Tensor]:
        dtype = next(self._tower.parameters()).dtype
        patches = torch.from_numpy(np.concatenate([image.arrays["pixel_values"] for image in images]))
        grids = torch.from_numpy(np.concatenate([image.arrays["image_grid_thw"] for image in images]))
        made = self._tower(patches.to(device, dtype), grid_thw=grids.to(device), return_dict=True)
        features: torch.Tensor = made.pooler_output  # [features of all, hidden]
        merged = self._tower.spatial_merge_size**2
        return [*torch.split(features, [image.patches // merged for image in images])]
