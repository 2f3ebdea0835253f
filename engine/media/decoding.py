"""Reads pictures from the bytes of files, with Pillow.

What comes is upright (EXIF's orientation is applied), in RGB with 8 bits a channel, and stands on white where
it is transparent. Of a file with several frames or pages it is the first. No file takes more memory than
`PictureLimits` allow: a picture's size is looked at before its pixels are unpacked."""

from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.media.errors import PictureError
from maxsimd.engine.media.picture import Picture

# Formats that Pillow reads by itself, without other programs and libraries that are not maintained.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_TRANSPARENT = ("RGBA", "LA", "PA", "RGBa", "La")
_WHITE = (255, 255, 255, 255)


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """What one picture may have: bytes of its file, and pixels."""

    file_bytes: int = 20 * 1024 * 1024
    pixels: int = 50_000_000


def decoded(data: bytes, limits: PictureLimits) -> Picture:
    """The picture that a file holds. Raises PictureError for a file that is too large or cannot be read, and
    ModuleNotFoundError where Pillow is not installed."""
    if len(data) > limits.file_bytes:
        raise PictureError(
            f"has {len(data):,} bytes, but may have {limits.file_bytes:,}; send a smaller file"
        )
    image_module = import_module("PIL.Image")
    try:
        with image_module.open(BytesIO(data), formats=FORMATS) as image:
            _check_size(image.size, limits)
            # In JPEG's and others' files several frames may be told of; this is the first.
            image.load()
            return Picture(_pixels(_upright(image)))
    except PictureError:
        raise
    except image_module.UnidentifiedImageError:
        raise PictureError(
            f"is no picture that can be read; send {', '.join(FORMATS[:-1])} or TIFF"
        ) from None
    except image_module.DecompressionBombError:
        raise PictureError(f"has more than {limits.pixels:,} pixels; send a smaller picture") from None
    except MemoryError:
        raise
    except Exception as error:
        # Pillow says in many ways (OSError, SyntaxError, ValueError, struct.error) that a file is damaged.
        raise PictureError(f"cannot be read: its file is damaged ({_in_short(error)})") from None


def _check_size(size: tuple[int, int], limits: PictureLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise PictureError(f"has {width} x {height} pixels; send one that has some")
    if width * height > limits.pixels:
        raise PictureError(
            f"has {width:,} x {height:,} pixels, but may have {limits.pixels:,}; send a smaller picture"
        )


def _upright(image: Any) -> Any:
    return import_module("PIL.ImageOps").exif_transpose(image)


def _pixels(image: Any) -> NDArray[np.uint8]:
    """uint8 [height, width, 3]."""
    if image.mode in _SIXTEEN_BITS or image.mode == "I":
        # Pillow itself would cut these numbers at 255.
        grey = np.asarray(image).astype(np.int64)
        if grey.min() < 0 or grey.max() > 65_535:
            raise PictureError("has 32 bits a channel; send one with 8 or 16")
        return np.repeat(((grey + 128) // 257).astype(np.uint8)[:, :, None], 3, axis=2)
    if image.mode == "F":
        raise PictureError("has floating-point pixels; send one with 8 or 16 bits a channel")
    if image.mode in _TRANSPARENT or "transparency" in image.info:
        image = _on_white(image.convert("RGBA"))
    return np.array(image.convert("RGB"))


def _on_white(image: Any) -> Any:
    image_module = import_module("PIL.Image")
    return image_module.alpha_composite(image_module.new("RGBA", image.size, _WHITE), image)


def _in_short(error: Exception) -> str:
    """An error's kind and the first words of what it says, which may hold what the file says."""
    said = "".join(character if character.isprintable() else " " for character in str(error))[:80]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
