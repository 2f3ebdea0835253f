"""A picture as models read it."""

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Picture:
    """Pixels in RGB, uint8 [height, width, 3], upright and without transparency. They are not changed."""

    pixels: NDArray[np.uint8]

    @property
    def width(self) -> int:
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        return int(self.pixels.shape[0])

    def read(self, limits: object) -> "Picture":
        return self

    @cached_property
    def digest(self) -> bytes:
        """Of the pixels and their shape: the same for the same picture, in whatever file it came. 32 bytes of
        SHA-256, for which most processors have instructions of their own."""
        digest = sha256(np.array(self.pixels.shape, dtype="<i8").tobytes())
        digest.update(np.ascontiguousarray(self.pixels).data)
        return digest.digest()
