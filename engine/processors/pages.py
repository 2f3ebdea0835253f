"""Sequences of queries and documents with pictures, and the part of a picture that a vector stands for."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.checkpoint import LoadedModel, RoleRules
from maxsimd.engine.checkpoint.visual import ImageInputs, Vision
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.explanations import Patch
from maxsimd.engine.media import AnyPicture, Content, Picture, PictureError, PictureLimits
from maxsimd.engine.processors.processor import RequestIds
from maxsimd.engine.processors.text.builder import BuiltText, InputName
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.workers import yield_to_smaller
from maxsimd.scheduler import PlacedImage, Tokens
from maxsimd.scheduler.sequence import TokenIds

# The id of a picture that is not yet part of a request's sequence.
_NO_ID = -1
_OpenPart: TypeAlias = str | Picture | ImageInputs


@dataclass(frozen=True, slots=True, eq=False)
class OpenContent:
    """A content with its pictures read. If there are several, only the model's inputs of each are kept."""

    parts: tuple[_OpenPart, ...]

    @property
    def digest(self) -> bytes:
        """Differs for contents with other texts or pixels."""
        if len(self.parts) == 1 and not isinstance(self.parts[0], str):
            return self.parts[0].digest
        digest = hashlib.blake2b(digest_size=32)
        for part in self.parts:
            if isinstance(part, str):
                kind, data = b"text", part.encode("utf-8", "surrogatepass")
            else:
                kind, data = b"image", part.digest
            digest.update(kind + len(data).to_bytes(8, "big") + data)
        return digest.digest()


class PageBuilder:
    """Builds the sequences of contents with pictures: a picture by itself, with what the checkpoint puts
    beside it, or what its chat template makes of texts and pictures. Thread-safe.

    `longest` is the most tokens of a sequence. All methods raise InvalidRequestError."""

    def __init__(self, vision: Vision, tokenizer: TextTokenizer, longest: int) -> None:
        self._vision = vision
        self._tokenizer = tokenizer
        self._longest = longest

    @property
    def image_token(self) -> str:
        """The token that stands for a picture in a written text."""
        return self._vision.image_token

    def opened(self, content: Content, name: InputName) -> OpenContent:
        pictures, texts = content.pictures, content.texts
        if not self._vision.image_token and (len(pictures) != 1 or texts):
            numbers = f"{_number(len(pictures), 'picture')} and {_number(len(texts), 'text')}"
            raise name.error(f"has {numbers}; this model reads one picture, or text, at a time")
        parts: list[_OpenPart] = []
        for part in content.parts:
            yield_to_smaller()
            if isinstance(part, str):
                parts.append(part)
            else:
                picture = self._read(part, name)
                parts.append(picture if len(pictures) == 1 else self._inputs(picture, name))
        return OpenContent(tuple(parts))

    def built(self, content: OpenContent, rules: RoleRules, name: InputName, ids: RequestIds) -> BuiltText:
        texts, images = self.split(content, name)
        if rules.chat is None:
            page = self._vision.reader.page(images[0])
            tokens = self._vision.tokens_of(page, _NO_ID, images[0])
        else:
            tokens = self.written(rules.chat.content(texts, rules.prompt), images, name)
        limit = self._longest if rules.max_tokens is None else min(self._longest, rules.max_tokens)
        self.check_length(tokens, limit, name)
        if rules.skipped_ids is not None:
            pooled = np.flatnonzero(~np.isin(tokens.ids, rules.skipped_ids))
            tokens = replace(tokens, pooled_positions=pooled)
        return BuiltText(tokens.behind(0, ids.sequence_ids), truncated=False)

    def split(self, content: OpenContent, name: InputName) -> tuple[list[str | None], list[ImageInputs]]:
        """Returns the texts of a content, None in place of each picture, and the pictures."""
        parts = [self._inputs(part, name) if isinstance(part, Picture) else part for part in content.parts]
        texts = [part if isinstance(part, str) else None for part in parts]
        return texts, [part for part in parts if isinstance(part, ImageInputs)]

    def written(
        self, text: str, images: Sequence[ImageInputs], name: InputName, trailing_ids: tuple[int, ...] = ()
    ) -> Tokens:
        """Returns the tokens of a text in which the picture's token stands once for each image, repeated
        for each of its features, and then `trailing_ids`. The images have no ids yet."""
        most = self._longest + 1 + sum(image.features for image in images)

        def encoded(text: str) -> TokenIds:
            (ids,) = self._tokenizer.encode([text], name.param, most, names=[name])
            if len(ids) == most:
                raise name.error(
                    f"has more than {self._longest} tokens beside its pictures, and no more can be "
                    "run in one sequence here; send shorter texts"
                )
            return np.concatenate([ids, np.array(trailing_ids, dtype=np.int32)])

        tokens = self._vision.with_features(text, images, encoded)
        if tokens is None:
            raise self._token_error(name)
        return tokens

    def check_texts(self, texts: Sequence[str | None], name: InputName) -> None:
        """Refuses a text that holds the picture's token."""
        if any(text is not None and self.image_token in text for text in texts):
            raise self._token_error(name)

    def _token_error(self, name: InputName) -> InvalidRequestError:
        said = f"{self.image_token!r}, in whose place this model reads pictures; leave it out"
        return InvalidRequestError(f"a text of {name} holds {said}", name.param)

    def check_length(self, tokens: Tokens, limit: int, name: InputName) -> None:
        if len(tokens) > limit:
            as_a_picture = " as a picture" if len(tokens.images) == 1 else ""
            raise name.error(
                f"has {len(tokens)} tokens{as_a_picture}, and at most {limit} can be run in "
                "one sequence here; send a smaller picture, or raise max_batch_tokens or max_model_len"
            )

    def _read(self, picture: AnyPicture, name: InputName) -> Picture:
        try:
            return picture.read(PictureLimits())
        except PictureError as error:
            raise name.error(error) from None

    def _inputs(self, picture: Picture, name: InputName) -> ImageInputs:
        try:
            return self._vision.reader.read(picture)
        except ValueError as error:  # as processors refuse what is much longer than wide
            size = f"{picture.width} x {picture.height} pixels"
            raise InvalidRequestError(
                f"{name}, of {size}, cannot be read by this model: {error}", name.param
            ) from None


def page_builder(model: LoadedModel, tokenizer: TextTokenizer, longest: int) -> PageBuilder | None:
    """Returns None for a model that reads only text."""
    return None if model.vision is None else PageBuilder(model.vision, tokenizer, longest)


def _number(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def patch_of(tokens: Tokens, row: int) -> Patch | None:
    """Returns the patch of a pooled vector; None beside the pictures, and in a small copy of a whole one."""
    token = row if tokens.pooled_positions is None else int(tokens.pooled_positions[row])
    for number, image in enumerate(tokens.images):
        feature = int(np.searchsorted(image.positions, token))
        if feature < len(image.positions) and image.positions[feature] == token:
            row, column = cells_of(image)[feature].tolist()
            (rows, columns), (width, height) = image.inputs.grid, image.inputs.size
            left, right = _span(column, columns, width)
            top, bottom = _span(row, rows, height)
            return None if row < 0 else Patch(row, column, (left, top, right, bottom), number)
    return None


def maps_of(tokens: Tokens, similarities: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
    """Converts similarities [Lq, vectors] to a map [Lq, rows, columns] for each picture; NaN: not pooled."""
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
    """Returns row and column [features, 2] of each feature in the grid; -1 in a small copy of the whole."""
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


def _span(index: int, count: int, pixels: int) -> tuple[int, int]:
    """Returns the pixels that one of `count` equal parts covers, at least one."""
    return floor(index * pixels / count), max(1, ceil((index + 1) * pixels / count))
