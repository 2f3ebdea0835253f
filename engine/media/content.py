"""What a query or a document is that has pictures: texts and pictures in their order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from maxsimd.engine.media.decoding import PictureLimits, decoded, picture_of_pillow
from maxsimd.engine.media.encoded import bytes_of_base64, bytes_of_data_url
from maxsimd.engine.media.errors import PictureError
from maxsimd.engine.media.files import PdfPage, PictureAt
from maxsimd.engine.media.picture import Picture

_DATA_URL = "data:"
# A picture is some thousand tokens, whatever the bytes of its file.
_CHARACTERS_A_PICTURE = 4_096


@dataclass(frozen=True, slots=True)
class PictureFile:
    """A picture as the bytes of its file."""

    data: bytes

    def read(self, limits: PictureLimits) -> Picture:
        """Raises PictureError."""
        return decoded(self.data, limits)


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """A picture's file in base64, or as a data URL."""

    text: str

    def read(self, limits: PictureLimits) -> Picture:
        """Raises PictureError."""
        is_url = self.text[: len(_DATA_URL)].lower() == _DATA_URL
        data = (bytes_of_data_url if is_url else bytes_of_base64)(self.text, limits.file_bytes)
        return decoded(data, limits)


@dataclass(frozen=True, slots=True)
class MissingPicture:
    """A picture that cannot be had, and why: what errors say behind its name."""

    reason: str

    def read(self, limits: PictureLimits) -> Picture:
        """Raises PictureError."""
        raise PictureError(self.reason)


@dataclass(frozen=True, slots=True)
class PictureUrl:
    """A picture at a URL, which whoever takes requests replaces by its file."""

    url: str

    def read(self, limits: PictureLimits) -> Picture:
        """Raises PictureError."""
        raise PictureError("is at a URL; give the bytes of its file, as the engine fetches nothing")


class OpenImage(Protocol):
    """What Pillow's `Image` has, which is not imported to say so."""

    @property
    def size(self) -> tuple[int, int]: ...

    @property
    def mode(self) -> str: ...

    def copy(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class PillowPicture:
    """A picture that a Python caller has opened with Pillow."""

    image: OpenImage

    def read(self, limits: PictureLimits) -> Picture:
        """Raises PictureError."""
        return picture_of_pillow(self.image, limits)

    def __hash__(self) -> int:
        return id(self.image)


# A picture, in whichever form it came.
AnyPicture: TypeAlias = (
    Picture | PictureFile | PictureAt | PdfPage | EncodedPicture | PictureUrl | MissingPicture | PillowPicture
)
Part: TypeAlias = str | AnyPicture


@dataclass(frozen=True, slots=True)
class Content:
    """A query or a document: texts and pictures in their order, at least one."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("content has no parts; give at least one text or picture")

    @classmethod
    def of(cls, parts: Sequence[Part]) -> "Content":
        return cls(tuple(parts))

    @property
    def pictures(self) -> tuple[AnyPicture, ...]:
        return tuple(part for part in self.parts if not isinstance(part, str))

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(part for part in self.parts if isinstance(part, str))

    @property
    def has_pictures(self) -> bool:
        return any(not isinstance(part, str) for part in self.parts)

    def __len__(self) -> int:
        """How many characters a text would have that is about as much work."""
        return sum(len(part) if isinstance(part, str) else _CHARACTERS_A_PICTURE for part in self.parts)


def is_pillow(item: object) -> bool:
    """Whether something is a picture of Pillow, which is not imported to find out."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == "PIL.Image.Image" for kind in type(item).__mro__)
