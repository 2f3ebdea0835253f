"""Queries and documents that are pictures, to sequences."""

from collections.abc import Iterable, Iterator

import numpy as np

from maxsimd.engine.checkpoint.vision import Vision
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.media import Content, Picture, PictureError, PictureLimits
from maxsimd.engine.preprocess.long_inputs import InputName
from maxsimd.engine.preprocess.request_ids import RequestIds
from maxsimd.engine.preprocess.texts import BuiltText
from maxsimd.engine.preprocess.workers import yield_to_smaller
from maxsimd.scheduler import ImageJob, PlacedImage, Sequence, Tokens


class PageBuilder:
    """Builds the sequences of pictures for one model: a picture by itself, with what the checkpoint puts
    beside it. Thread-safe.

    `longest` is the most tokens that can be run in one sequence. All methods raise InvalidRequestError, by
    the name of what is wrong."""

    def __init__(self, vision: Vision, longest: int, limits: PictureLimits | None = None) -> None:
        self._vision = vision
        self._longest = longest
        self._limits = PictureLimits() if limits is None else limits

    def opened(self, content: Content, name: InputName) -> Picture:
        """The picture of some content, read from its file."""
        pictures, texts = content.pictures, content.texts
        if len(pictures) != 1 or texts:
            numbers = f"{_number(len(pictures), 'picture')} and {_number(len(texts), 'text')}"
            raise InvalidRequestError(
                f"{name} has {numbers}; this model reads one picture, or text, at a time", name.param
            )
        yield_to_smaller()
        try:
            return pictures[0].read(self._limits)
        except PictureError as error:
            raise InvalidRequestError(f"{name} {error}", name.param) from None

    def built(self, picture: Picture, name: InputName, ids: RequestIds) -> BuiltText:
        """The sequence of a picture."""
        try:
            inputs = self._vision.reader.read(picture)
        except ValueError as error:  # as processors refuse what is much longer than wide
            size = f"{picture.width} x {picture.height} pixels"
            raise InvalidRequestError(
                f"{name}, of {size}, cannot be read by this model: {error}", name.param
            ) from None
        page = self._vision.reader.page(inputs)
        if len(page.ids) > self._longest:
            raise InvalidRequestError(
                f"{name} has {len(page.ids)} tokens as a picture, and at most {self._longest} can be run in "
                "one sequence here; send a smaller picture, or raise max_batch_tokens or max_model_len",
                name.param,
            )
        placed = PlacedImage(ids.next_sequence_id(), page.positions, inputs, inputs.digest)
        return BuiltText(Tokens(page.ids, np.zeros_like(page.ids), images=(placed,)), truncated=False)


def image_jobs(vision: Vision | None, sequences: Iterable[Sequence]) -> list[ImageJob]:
    """The pictures of sequences, in their order."""
    return [] if vision is None else [job for sequence in sequences for job in _jobs(vision, sequence)]


def _jobs(vision: Vision, sequence: Sequence) -> Iterator[ImageJob]:
    images = sequence.tokens.images
    features = sum(len(image.positions) for image in images)
    for i, image in enumerate(images):
        yield ImageJob(
            image.image_id,
            sequence.request_id,
            vision.price(image.inputs),
            0 if i else features,
            image.inputs,
            sequence.payload.slot,
        )


def _number(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"
