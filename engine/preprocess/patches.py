"""Which part of a picture each vector of its sequence stands for."""

from math import ceil, floor

import numpy as np

from maxsimd.engine.checkpoint.visual.vision import ImageInputs
from maxsimd.engine.explanations import Patch
from maxsimd.scheduler import PlacedImage


def patch_of(image: PlacedImage, row: int) -> Patch | None:
    """The patch that the token `row` of a sequence stands for; None for a token beside the picture, and for
    one of a small copy of all of it."""
    feature = int(np.searchsorted(image.positions, row))
    if feature == len(image.positions) or image.positions[feature] != row:
        return None
    inputs: ImageInputs = image.inputs
    rows, columns = inputs.grid
    found = _in_tiles(feature, columns, inputs.tile_side) if inputs.tile_side else divmod(feature, columns)
    if found is None or found[0] >= rows:
        return None
    at, across = found
    width, height = inputs.size
    left, right = _span(across, columns, width)
    top, bottom = _span(at, rows, height)
    return Patch(at, across, (left, top, right, bottom))


def _in_tiles(feature: int, columns: int, side: int) -> tuple[int, int]:
    """Row and column of a feature where those of each tile come one after the other, in a grid of so wide."""
    tile, inside = divmod(feature, side * side)
    tile_row, tile_column = divmod(tile, columns // side)
    row, column = divmod(inside, side)
    return tile_row * side + row, tile_column * side + column


def _span(index: int, count: int, pixels: int) -> tuple[int, int]:
    """The pixels that one of `count` equal parts covers, at least one."""
    return floor(index * pixels / count), max(1, ceil((index + 1) * pixels / count))
