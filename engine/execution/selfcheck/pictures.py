"""Random pictures for the proof of models that read them."""

from collections.abc import Iterator

import numpy as np

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.media import Picture
from maxsimd.scheduler import ResultSlot, TokenSequence

# Widths and heights: lying, standing, and hardly more than a line.
_SIZES = ((90, 60), (70, 130), (200, 9))


def random_pages(model: LoadedModel, task: str) -> Iterator[TokenSequence]:
    """Sequences of a picture each, of different sizes; none for a model that reads only text. The ids of
    their pictures are negative, which those of sequences are not."""
    if model.vision is None:
        return
    random = np.random.default_rng(0)
    for i, (width, height) in enumerate(_SIZES):
        picture = Picture(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        inputs = model.vision.reader.read(picture)
        page = model.vision.reader.page(inputs)
        yield TokenSequence.text(0, ResultSlot(0, 0), task, model.vision.tokens_of(page, -1 - i, inputs))
