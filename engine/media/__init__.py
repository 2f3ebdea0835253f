"""Pictures: what a picture is to models, and how one is read from a file's bytes, within limits.

Nothing here knows a model, or where bytes come from. Pillow is imported when the first picture is read."""

from maxsimd.engine.media.content import (
    AnyPicture,
    Content,
    EncodedPicture,
    MissingPicture,
    OpenImage,
    Part,
    PdfPage,
    PictureAt,
    PictureFile,
    PictureUrl,
    PillowPicture,
    bytes_of_base64,
    bytes_of_data_url,
    is_pillow,
    pages_of,
)
from maxsimd.engine.media.decoding import Picture, PictureError, PictureLimits, decoded

__all__ = [
    "AnyPicture",
    "Content",
    "EncodedPicture",
    "MissingPicture",
    "OpenImage",
    "Part",
    "PdfPage",
    "Picture",
    "PictureAt",
    "PictureError",
    "PictureFile",
    "PictureLimits",
    "PictureUrl",
    "PillowPicture",
    "bytes_of_base64",
    "bytes_of_data_url",
    "decoded",
    "is_pillow",
    "pages_of",
]
