"""Content with pictures, as others' clients send it: vLLM's and OpenAI's parts, Jina's objects, Voyage's and
Cohere's content. A plain string is always a text, whatever it looks like."""

from collections.abc import Iterator
from typing import Any

from maxsimd.api.reading_vectors import is_vectors
from maxsimd.engine import InvalidRequestError
from maxsimd.engine.media import AnyPicture, Content, EncodedPicture, Part, PictureUrl

# The names of pictures, in objects and as types of parts.
_NAMES = ("image", "image_url", "image_base64", "input_image")
_TEXT_TYPES = ("text", "input_text")
# Of media that no model here reads.
_OTHER_NAMES = ("video", "video_url", "audio", "audio_url", "input_audio", "image_embeds")
_OTHERS = (*_OTHER_NAMES, "file", "document")
# An object that names a picture; how finely it is read is not the request's to say.
PICTURE_URL = ("url", "detail")
# Fields of each kind of object. Clients may set any id.
_OF_TEXT, _OF_CONTENT = ("text", "type", "id"), ("content", "type", "id", "role")
_OF_PICTURE = ("text", *_OF_CONTENT, *_NAMES, *_OTHER_NAMES)
_OF_VECTORS = ("embedding", "dtype", "shape", "scales", "id")
_OF_SENTENCES = ("source_sentence", "sentences")


def known_names(content: dict[str, Any]) -> tuple[str, ...]:
    """The fields of an object that are read where it holds a text, pictures, an embedding, or sentences to
    be compared."""
    if is_vectors(content):
        return _OF_VECTORS
    if has_pictures(content):
        return _OF_PICTURE
    if "text" in content:
        return _OF_TEXT
    return _OF_SENTENCES if "sentences" in content else _OF_CONTENT


def has_pictures(content: dict[str, Any]) -> bool:
    """Whether an object is, or has among its parts, something else than text. An object with a text, and
    without a picture, is a text whatever its type."""
    parts = content.get("content")
    if isinstance(parts, list):
        return _named_media(content) or any(map(_is_medium, parts or [content]))
    return _named_media(content) or (_is_medium(content) and not isinstance(content.get("text", parts), str))


def content_of(content: dict[str, Any], where: str, param: str) -> Content:
    """The texts and pictures of an object in their order; `where` is what errors call it. Raises
    InvalidRequestError."""
    parts = content.get("content")
    if not isinstance(parts, list):
        return Content.of([*_object_parts(content, where, param)])
    if not parts and not _named_media(content):
        raise _unknown(where, param)
    if _named_media(content) or content.get("text") is not None:
        raise InvalidRequestError(
            f"{where} has content parts and something beside them; make parts of all of it", param
        )
    read: list[Part] = []
    for i, part in enumerate(parts):
        named = f"{where}.content[{i}]"
        if isinstance(part, str):
            read.append(part)
        elif isinstance(part, dict):
            read += _object_parts(part, named, param)
        else:
            raise _unknown(named, param)
    return Content.of(read)


def each_picture(content: Any) -> list[dict[str, Any]] | None:
    """The pictures of an object that stands for a whole list, as vLLM's clients send several documents: its
    parts are pictures alone, more than one. None for anything else."""
    parts = content.get("content") if isinstance(content, dict) else None
    if not isinstance(parts, list) or len(parts) < 2 or not all(map(_is_medium, parts)):
        return None
    return parts


def _is_medium(part: Any) -> bool:
    """Whether a part is something else than text."""
    return isinstance(part, dict) and (part.get("type") in (*_NAMES, *_OTHERS) or _named_media(part))


def _named_media(part: dict[str, Any]) -> bool:
    return any(part.get(name) is not None for name in (*_NAMES, *_OTHER_NAMES))


def _object_parts(part: dict[str, Any], where: str, param: str) -> Iterator[Part]:
    """A text, a picture, or, as Jina's clients send it, both: then the picture comes first, as the authors of
    models that read both have it."""
    text, kind = part.get("text"), part.get("type")
    given = [part[name] for name in _NAMES if part.get(name) is not None]
    is_known = kind is None or kind in _TEXT_TYPES or (kind in _NAMES and given)
    if not is_known or any(part.get(name) is not None for name in _OTHER_NAMES):
        raise _unknown(where, param)
    if len(given) > 1:
        raise InvalidRequestError(f"{where} has several pictures; give each in a part of its own", param)
    if not given and not isinstance(text, str):
        raise _unknown(where, param)
    if text is not None and not isinstance(text, str):
        raise _unknown(where, param)
    if given:
        yield _picture(given[0], where, param, may_be_bare="image_url" not in part)
    if isinstance(text, str):
        yield text


def _picture(value: Any, where: str, param: str, may_be_bare: bool) -> AnyPicture:
    """A picture from a URL, a data URL, or base64 where it may be bare; or an object with its `url`."""
    if isinstance(value, dict):
        value, may_be_bare = value.get("url"), False
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{where} has no picture; give a URL, a data URL or base64", param)
    head = value[:8].lower()
    if head.startswith(("http://", "https://", "file:")):
        return PictureUrl(value)
    if head.startswith("data:") or may_be_bare:
        return EncodedPicture(value)
    raise InvalidRequestError(
        f"{where} has a URL that cannot be read; give data:image/...;base64,... or https://...", param
    )


def _unknown(where: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f'{where} is neither a text nor a picture; give {{"type": "text", "text": ...}} or '
        '{"type": "image_url", "image_url": {"url": ...}}',
        param,
    )
