"""Which part of a picture each vector of its sequence stands for."""

from math import ceil, floor

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.checkpoint.visual.vision import ImageInputs
from maxsimd.engine.explanations import Patch
from maxsimd.scheduler import PlacedImage, Tokens


def patch_of(tokens: Tokens, row: int) -> Patch | None:
    """The patch that a vector of a sequence stands for, counted among those that are pooled; None for a token
    beside its pictures, and for one of a small copy of a whole picture."""
    token = row if tokens.pooled_positions is None else int(tokens.pooled_positions[row])
    for number, image in enumerate(tokens.images):
        feature = int(np.searchsorted(image.positions, token))
        if feature < len(image.positions) and image.positions[feature] == token:
            cell = cells_of(image)[feature]
            return None if cell[0] < 0 else _patch(image.inputs, number, *cell.tolist())
    return None


def maps_of(tokens: Tokens, similarities: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
    """The similarities [Lq, vectors] of a sequence's vectors where they are in its pictures: [Lq, rows,
    columns] for each, NaN where a token takes no part."""
    row_of = np.full(len(tokens), -1)
    pooled = np.arange(len(tokens)) if tokens.pooled_positions is None else tokens.pooled_positions
    row_of[pooled] = np.arange(len(pooled))
    maps = []
    for image in tokens.images:
        cells, rows = cells_of(image), row_of[image.positions]
        shown = (cells[:, 0] >= 0) & (rows >= 0)
        grid = np.full((len(similarities), *image.inputs.grid), np.nan, dtype=np.float32)
        grid[:, cells[shown, 0], cells[shown, 1]] = similarities[:, rows[shown]]
        maps.append(grid)
    return tuple(maps)


def cells_of(image: PlacedImage) -> NDArray[np.int64]:
    """The row and column [features, 2] of each feature of a picture in the grid of what the model reads; -1
    for those of a small copy of the whole."""
    inputs: ImageInputs = image.inputs
    rows, columns = inputs.grid
    features = np.arange(len(image.positions))
    side = inputs.tile_side
    if side is None:
        return np.stack(np.divmod(features, columns), axis=1)
    tile, inside = np.divmod(features, side * side)
    tile_row, tile_column = np.divmod(tile, columns // side)
    row, column = np.divmod(inside, side)
    cells = np.stack([tile_row * side + row, tile_column * side + column], axis=1)
    cells[cells[:, 0] >= rows] = -1
    return cells


def _patch(inputs: ImageInputs, picture: int, row: int, column: int) -> Patch:
    rows, columns = inputs.grid
    width, height = inputs.size
    left, right = _span(column, columns, width)
    top, bottom = _span(row, rows, height)
    return Patch(row, column, (left, top, right, bottom), picture)


def _span(index: int, count: int, pixels: int) -> tuple[int, int]:
    """The pixels that one of `count` equal parts covers, at least one."""
    return floor(index * pixels / count), max(1, ceil((index + 1) * pixels / count))
