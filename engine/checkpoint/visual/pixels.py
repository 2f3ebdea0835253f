"""Resized pixels of pictures, which wait for their turn in a byte each, and the numbers that a tower makes of
them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.checkpoint.visual.vision import PictureReader, Tower
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.media import Picture
from maxsimd.engine.media.decoding import pillow_of
from maxsimd.pooling.ragged import to_device

# Pixels that a processor with nothing but `shortest_edge` may make of a picture.
_MOST_RESIZED = 20_000_000
# Of numbers around 1: float32 may be rounded otherwise.
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class PixelScale:
    """How a processor makes numbers of pixels: times `factor`, minus the `mean` of the channel, over its
    `std`."""

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
        mean, std = (to_device(torch.tensor(x), pixels.device).view(shape) for x in (self.mean, self.std))
        numbers = pixels.to(torch.float32, copy=True)
        return numbers.mul_(self.factor).sub_(mean).div_(std)


def resized(image_processor: Any, picture: Picture, **options: Any) -> Any:
    """What a processor makes of a picture but for the numbers: its `pixel_values` are pixels. A picture of
    Pillow's it would copy twice, while other threads wait. Raises ValueError for one that it would make too
    large."""
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
    """Arrays end to end, on the device."""
    return to_device(np.concatenate(arrays), device)
