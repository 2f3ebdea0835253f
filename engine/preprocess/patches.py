"""Which part of a picture each vector of its sequence stands for."""

from math import ceil, floor

import numpy as np

from maxsimd.engine.checkpoint.visual.vision import ImageInputs
from maxsimd.engine.explanations import Patch
from maxsimd.scheduler import PlacedImage


def patch_of(image: PlacedImage, row: int) -> Patch | None:
    """The patch that the token `row` of a sequence stands for; None for a token beside the picture."""
    feature = int(np.searchsorted(image.positions, row))
    if feature == len(image.positions) or image.positions[feature] != row:
        return None
    inputs: ImageInputs = image.inputs
    rows, columns = inputs.grid
    at, across = divmod(feature, columns)
    width, height = inputs.size
    left, right = _span(across, columns, width)
    top, bottom = _span(at, rows, height)
    return Patch(at, across, (left, top, right, bottom))


def _span(index: int, count: int, pixels: int) -> tuple[int, int]:
    """The pixels that one of `count` equal parts covers, at least one."""
    return floor(index * pixels / count), max(1, ceil((index + 1) * pixels / count))
