"""Readers of pictures for checkpoints: grids of patches, squares or tiles. Pixels wait in a byte each until a
tower makes features of them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from math import isqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers.processing_utils import ProcessorMixin

from maxsimd.engine.checkpoint.visual import (
    ImageInputs,
    Page,
    PictureReader,
    Tower,
    Vision,
    attention_a_patch,
    tokens_a_patch,
)
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.media import Picture, pillow_of
from maxsimd.pooling.ragged import to_device
from maxsimd.scheduler import TokenSequence

# Text of a picture in the models' prompts.
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
# Pixels that a processor with nothing but `shortest_edge` may make of a picture.
_MOST_RESIZED = 20_000_000
# For numbers around 1: float32 may be rounded otherwise.
_TOLERANCE = 1e-5
# Settings of processors of pictures that may be given with a call.
_SETTINGS = frozenset(
    {
        *("size", "do_resize", "resample", "do_center_crop", "crop_size", "do_convert_rgb"),
        *("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"),
        *("do_image_splitting", "max_image_size"),
    }
)
# Pictures that the tower encodes together: some, or as many as have this many patches.
_TOGETHER, _PATCHES = 4, 4096
# Tiles that the tower encodes together.
_TILES_TOGETHER = 8


@dataclass(frozen=True, slots=True, eq=False)
class PixelScale:
    """Scale of a processor's pixels: times `factor`, minus the channel's `mean`, divided by its `std`."""

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, image_processor: Any) -> "PixelScale":
        factor = float(image_processor.rescale_factor) if image_processor.do_rescale else 1.0
        if not image_processor.do_normalize:
            return cls(factor, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        return cls(factor, tuple(image_processor.image_mean), tuple(image_processor.image_std))

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Float32 numbers of pixels [n, 3, ...] in a byte each."""
        shape = (1, len(self.mean), *[1] * (pixels.dim() - 2))
        scale = torch.tensor([self.mean, self.std], dtype=torch.float32)
        mean, std = (to_device(each, pixels.device).view(shape) for each in scale)
        numbers = pixels.to(torch.float32, copy=True)
        return numbers.mul_(self.factor).sub_(mean).div_(std)


def resized(image_processor: Any, picture: Picture, **options: Any) -> Any:
    """The processor's output for a picture, with pixels in a byte each in place of numbers. Raises ValueError
    for a picture that it would make too large."""
    size = dict(image_processor.size)
    if image_processor.do_resize and size.keys() == {"shortest_edge"}:
        longest = size["shortest_edge"] * max(picture.pixels.shape[:2]) // min(picture.pixels.shape[:2])
        if size["shortest_edge"] * longest > _MOST_RESIZED:
            raise ValueError(
                f"it would become {size['shortest_edge']:,} x {longest:,} pixels; send one that is less long"
            )
    return image_processor(
        images=[picture.pixels],
        input_data_format="channels_last",
        do_convert_rgb=False,
        do_rescale=False,
        do_normalize=False,
        return_tensors="np",
        **options,
    )


def check_numbers(path: str, image_processor: Any, reader: PictureReader, tower: Tower) -> None:
    """Raises ModelLoadError unless a tower reads the numbers that a checkpoint's own processor makes."""
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    made = image_processor(images=[pillow_of(pixels)], return_tensors="np")
    expected = torch.from_numpy(made["pixel_values"]).float()
    found = tower.inputs([reader.read(Picture(pixels))], torch.device("cpu"))["pixel_values"]
    if found.shape != expected.shape or float((found - expected).abs().max()) > _TOLERANCE:
        raise ModelLoadError(
            f"the processor of {path!r} makes numbers of pixels in a way that is not known here"
        )


def check_as_called(
    path: str, transformer: Any, reader: PictureReader, tower: Tower, in_pairs: bool = False
) -> None:
    """Raises ModelLoadError unless a tower reads what sentence-transformers' module makes of a picture, with
    the settings with which it calls the processor: of one that is large, and one that is small;
    as queries of pairs, for a module that reads pairs alone."""
    for width, height in ((700, 500), (40, 90)):
        pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = pillow_of(pixels)
        made = transformer.preprocess([(image, "a") if in_pairs else image])
        found = tower.inputs([reader.read(Picture(pixels))], torch.device("cpu"))
        for name, numbers in found.items():
            expected = made[name].to(numbers.dtype)
            if numbers.shape != expected.shape or float((numbers - expected).abs().max()) > _TOLERANCE:
                raise ModelLoadError(f"pictures of {path!r} are not read as sentence-transformers reads them")


def together(arrays: Sequence[NDArray[Any]], device: torch.device) -> torch.Tensor:
    return to_device(np.concatenate(arrays), device)


def page_of(ids: Any, image_token_id: int) -> Page:
    """The tokens that a processor makes of a picture. In place of the image's token, which may be none of
    the model's, stands the first of the vocabulary."""
    made = np.asarray(ids)
    positions = np.flatnonzero(made == image_token_id)
    return Page(np.where(made == image_token_id, 0, made).astype(np.int32), positions)


def settings_of(image_processor: Any, page: Page) -> str:
    """All that decides what is made of a picture, another version of Pillow included."""
    kind, settings = type(image_processor).__qualname__, image_processor.to_dict()
    said = json.dumps([kind, version("pillow"), settings], sort_keys=True, default=str)
    return f"{said} {page.ids.tolist()} {page.positions.tolist()}"


@contextmanager
def without_videos() -> Iterator[None]:
    """Inside this context processors of pictures and videos are made for pictures alone: for videos they want
    torchvision."""
    original = vars(ProcessorMixin)["get_attributes"]

    def attributes(cls: type[ProcessorMixin]) -> list[str]:
        return [name for name in original.__func__(cls) if name != "video_processor"]

    ProcessorMixin.get_attributes = classmethod(attributes)
    try:
        yield
    finally:
        ProcessorMixin.get_attributes = original


def for_pictures_alone(processor: Any) -> Any:
    """A processor that was made `without_videos`, as it can be called and saved."""
    processor.get_attributes = lambda: ["image_processor", "tokenizer"]
    return processor


def apply_settings(path: str, image_processor: Any, settings: Mapping[str, Any]) -> None:
    """Makes settings with which sentence-transformers calls a processor of pictures the processor's own.
    Raises ModelLoadError for one that is not known here."""
    for name, value in settings.items():
        if name in ("min_pixels", "max_pixels"):
            edge = "shortest_edge" if name == "min_pixels" else "longest_edge"
            image_processor.size = {**dict(image_processor.size), edge: value}
        elif name in _SETTINGS and hasattr(image_processor, name):
            setattr(image_processor, name, value)
        else:
            raise ModelLoadError(f"{path!r} has the setting {name} for pictures, which is not known here")


def settings_for_pictures(transformer: Any) -> dict[str, Any]:
    settings = dict(transformer.processing_kwargs or {})
    common = {
        name: value for name, value in (settings.get("common") or {}).items() if name != "return_tensors"
    }
    return {**(settings.get("image") or {}), **common}


def refuse_other_readers(path: str, image_processor: Any) -> None:
    """Raises ModelLoadError for pictures that are not read by Pillow: another library makes other pixels."""
    kind = type(image_processor).__name__
    if not kind.endswith("Pil"):
        raise ModelLoadError(f"{path!r} reads pictures by a {kind}, not by Pillow; install pillow")


def blank(width: int, height: int) -> Any:
    return pillow_of(np.zeros((height, width, 3), dtype=np.uint8))


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
        # Features for the first layers stand beside those that take the place of embeddings.
        deep = getattr(made, "deepstack_features", None) or []
        features = torch.cat([made.pooler_output, *deep], dim=-1)  # [features of all, hidden x (1 + layers)]
        merged = self._tower.spatial_merge_size**2
        return [*torch.split(features, [image.patches // merged for image in images])]


def vision_of(path: str, model: Any, processor: Any) -> Vision:
    """The picture reader of a model, equal to its processor. Raises ModelLoadError for a processor that reads
    them in another way."""
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
    """The inputs of the model's own code for the pictures of a sequence, beside its token ids."""

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
    """The picture reader of a model whose chat template writes contents. Raises ModelLoadError for
    a processor that reads them in another way."""
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
            for some in tiles.split(_TILES_TOGETHER, dim=1)
        ]
        counts = [image.arrays["pixels"].shape[1] for image in images]
        a_tile = sum(map(len, features)) // sum(counts)
        return [*torch.cat(features).split([count * a_tile for count in counts])]
