"""Pictures as Idefics3's descendants read them: large ones as tiles and a small copy of the whole, with
markers that say where each tile is. As ColModernVBERT has it."""

from collections.abc import Sequence
from math import isqrt
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from maxsimd.engine.checkpoint.visual.pixels import PixelScale, check_numbers, resized, together
from maxsimd.engine.checkpoint.visual.processor import page_of, refuse_other_readers, settings_of
from maxsimd.engine.checkpoint.visual.vision import (
    ImageInputs,
    Page,
    Vision,
    attention_a_patch,
    tokens_a_patch,
)
from maxsimd.engine.media import Picture

# Tiles that the tower encodes together.
_TOGETHER = 8


class TileReader:
    """Each picture as tiles of one size, with as many features each, within the checkpoint's prompt."""

    def __init__(self, processor: Any, patches_a_tile: int) -> None:
        self._processor = processor
        self._image_processor = processor.image_processor
        self._tokenizer: Tokenizer = Tokenizer.from_str(processor.tokenizer.backend_tokenizer.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._patches = patches_a_tile
        self._side = isqrt(processor.image_seq_len)
        # Chat templates have a prompt of their own.
        self._prompt: str = getattr(processor, "visual_prompt_prefix", processor.image_token)
        prompt = np.array(self._tokenizer.encode(self._prompt).ids, dtype=np.int32)
        self.signature = settings_of(self._image_processor, Page(prompt, np.array([processor.image_seq_len])))

    def read(self, picture: Picture) -> ImageInputs:
        made = resized(self._image_processor, picture, return_row_col_info=True)
        tiles = made["pixel_values"].astype(np.uint8)  # [1, tiles, 3, height, width]
        rows, columns = int(made["rows"][0][0]), int(made["cols"][0][0])
        # A small picture is one tile.
        grid = max(1, rows) * self._side, max(1, columns) * self._side
        arrays = {"pixels": tiles, "tiles": np.array([rows, columns])}
        size = picture.width, picture.height
        return ImageInputs(arrays, tiles.shape[1] * self._patches, grid, size, picture.digest, self._side)

    def page(self, inputs: ImageInputs) -> Page:
        text = self._prompt.replace(self._processor.image_token, self.written(inputs))
        return page_of(self._tokenizer.encode(text).ids, self._processor.image_token_id)

    def written(self, inputs: ImageInputs) -> str:
        rows, columns = inputs.arrays["tiles"].tolist()
        return str(self._processor.replace_image_token({"rows": [[rows]], "cols": [[columns]]}, 0))


def vision_of_tiles(path: str, model: Any, processor: Any) -> Vision:
    """How a model reads pictures whose contents a chat template writes. Raises ModelLoadError for one that is
    not read as expected here."""
    image_processor = processor.image_processor
    refuse_other_readers(path, image_processor)
    config = model.config.vision_config
    patches = (config.image_size // config.patch_size) ** 2
    reader, tower = TileReader(processor, patches), TileTower(model, PixelScale.of(image_processor))
    check_numbers(path, image_processor, reader, tower)
    modules = (model.vision_model, model.connector)
    return Vision(
        reader,
        tower,
        modules,
        tokens_a_patch(modules, model.text_model),
        attention_a_patch(model.vision_model, modules),
        image_token_id=processor.image_token_id,
        image_token=processor.image_token,
        attends_within=patches,
    )


class TileTower:
    """Tiles of one size, some at a time, whichever pictures they are of."""

    def __init__(self, vlm: Any, scale: PixelScale) -> None:
        self._vlm = vlm
        self._scale = scale

    def inputs(self, images: Sequence[ImageInputs], device: torch.device) -> dict[str, torch.Tensor]:
        """`pixel_values` [1, tiles of all, 3, height, width]."""
        pixels = together([image.arrays["pixels"][0] for image in images], device)
        return {"pixel_values": self._scale(pixels)[None]}

    def __call__(self, images: Sequence[ImageInputs], device: torch.device) -> list[torch.Tensor]:
        dtype = next(self._vlm.vision_model.parameters()).dtype
        tiles = self.inputs(images, device)["pixel_values"].to(dtype)
        features = [
            torch.cat(self._vlm.get_image_features(some).pooler_output)
            for some in tiles.split(_TOGETHER, dim=1)
        ]
        counts = [image.arrays["pixels"].shape[1] for image in images]
        a_tile = sum(map(len, features)) // sum(counts)
        return [*torch.cat(features).split([count * a_tile for count in counts])]
