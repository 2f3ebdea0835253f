"""Pictures: how one becomes numbers and tokens, and the tower that encodes it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.media import Picture
from maxsimd.scheduler import PlacedImage, Tokens
from maxsimd.scheduler.sequence import TokenIds


def rope_positions(length: int, images: Iterable[tuple[int, tuple[int, int]]]) -> NDArray[np.int64]:
    """The positions [3, length] of a sequence whose `images`, in their order, have a first token and a grid
    of rows and columns, a token a patch. Tokens of text have one number in all three. A picture counts rows
    in height and columns in width; what follows counts on from behind the longer side."""
    positions = np.empty((3, length), dtype=np.int64)
    done = following = 0
    for first, (rows, columns) in images:
        behind = first + rows * columns
        positions[:, done:first] = np.arange(first - done) + following
        following += first - done
        row, column = np.divmod(np.arange(rows * columns), columns)
        positions[:, first:behind] = following + np.stack([np.zeros_like(row), row, column])
        following += max(rows, columns)
        done = behind
    positions[:, done:] = np.arange(length - done) + following
    return positions


@dataclass(frozen=True, slots=True, eq=False)
class ImageInputs:
    """A picture's inputs of a tower, as small as they are while they wait: a reader's `arrays` of some
    `patches`. The tower makes a `grid` of features, row by row; with a `tile_side`, tile by tile of as many
    rows and columns, and then a tile of the whole picture. `digest` and `size` (width and height in pixels)
    are the picture's."""

    arrays: Mapping[str, NDArray[Any]]
    patches: int
    grid: tuple[int, int]
    size: tuple[int, int]
    digest: bytes
    tile_side: int | None = None

    @property
    def features(self) -> int:
        """The number of features that the tower makes."""
        of_tiles, of_whole = self.grid[0] * self.grid[1], (self.tile_side or 0) ** 2
        return of_tiles if of_tiles == of_whole else of_tiles + of_whole


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """The tokens of a picture that stands alone: their ids, and the ascending `positions` of those that its
    features replace."""

    ids: TokenIds
    positions: NDArray[np.int64]


class PictureReader(Protocol):
    """Turns pictures into numbers and tokens, as a checkpoint's processor does. Thread-safe."""

    @property
    def signature(self) -> str:
        """All that decides what is made of a picture."""
        ...

    def read(self, picture: Picture) -> ImageInputs: ...

    def page(self, inputs: ImageInputs) -> Page: ...

    def written(self, inputs: ImageInputs) -> str:
        """The text for a picture's token: that token once for each feature, and perhaps markers."""
        ...


class Tower(Protocol):
    """Encodes pictures on the device: features [n, hidden] each, in the precision of its weights."""

    def inputs(self, images: Sequence[ImageInputs], device: torch.device) -> dict[str, torch.Tensor]:
        """The inputs that the checkpoint's processor makes of these pictures together, in float32."""
        ...

    def __call__(self, images: Sequence[ImageInputs], device: torch.device) -> list[torch.Tensor]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Vision:
    """The picture reader of a model. The `tower` runs the `modules`. A patch takes as long as
    `tokens_a_patch` tokens of the language model, and `attention` times that longer for each patch that it
    attends to: those of the picture, or the `attends_within` patches of its tile.

    With `mrope` positions are counted in time, height and width. If a chat template writes contents, features
    replace the token `image_token_id`, whose text is `image_token`. With `is_result` the feature of a picture
    is the result, and no language model reads it."""

    reader: PictureReader
    tower: Tower
    modules: tuple[torch.nn.Module, ...]
    tokens_a_patch: float
    attention: float
    mrope: bool = False
    image_token_id: int | None = None
    image_token: str = ""
    is_result: bool = False
    attends_within: int | None = None

    @property
    def signature(self) -> str:
        """All that decides what is made of a picture, but for weights and chat templates."""
        return f"{self.reader.signature} {'in space' if self.mrope else 'in a row'}"

    def tokens_of(self, page: Page, image_id: int, inputs: ImageInputs) -> Tokens:
        """The tokens of a picture that stands alone."""
        placed = PlacedImage(image_id, page.positions, inputs, inputs.digest)
        return self.placed(page.ids, (placed,))

    def with_features(
        self, text: str, images: Sequence[ImageInputs], encode: Callable[[str], TokenIds]
    ) -> Tokens | None:
        """The tokens of a text in which the picture's token stands once for each of the images, which have
        no ids yet; None if it stands there another number of times."""
        pieces = text.split(self.image_token)
        if len(pieces) != len(images) + 1:
            return None
        written = [self.reader.written(image) for image in images]
        ids = encode("".join(part for pair in zip(pieces, [*written, ""], strict=True) for part in pair))
        at = np.flatnonzero(ids == self.image_token_id)
        ends = np.cumsum([image.features for image in images], dtype=np.int64)
        if len(at) != sum(ends[-1:]):
            return None
        parts = zip(np.split(at, ends), images, strict=False)  # the last part is empty
        return self.placed(ids, tuple(PlacedImage(-1, part, image, image.digest) for part, image in parts))

    def placed(self, ids: TokenIds, images: tuple[PlacedImage, ...]) -> Tokens:
        """The tokens of a sequence with pictures, with their positions if these are not those of text."""
        positions = None
        if self.mrope:
            grids = ((int(image.positions[0]), image.inputs.grid) for image in images)
            positions = rope_positions(len(ids), grids)
        return Tokens(ids, np.zeros_like(ids), images=images, position_ids=positions)

    def price(self, inputs: ImageInputs) -> int:
        """The number of tokens that the language model could run while the tower encodes a picture."""
        attended = min(inputs.patches, self.attends_within or inputs.patches)
        return max(1, ceil(inputs.patches * self.tokens_a_patch * (1 + attended * self.attention)))
