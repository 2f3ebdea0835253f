"""From the fields of requests to the engine's arguments: texts, token ids, pictures and embeddings, and what
becomes of long ones. Lists are counted before their entries are looked at.

Pictures come as vLLM's and OpenAI's parts, Jina's objects, Voyage's and Cohere's content. A plain string is
always a text, whatever it looks like.
"""

import base64
import binascii
import difflib
import functools
import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, TypeAlias, TypeGuard, cast

import msgspec
import torch
from msgspec import UNSET, UnsetType

from maxsimd.api.answer import ApiError
from maxsimd.api.logs import printable
from maxsimd.api.wire import (
    IGNORED_FIELDS,
    Common,
    Content,
    Contents,
    Direction,
    LongDocuments,
    RequestBody,
    Warnings,
)
from maxsimd.engine import InvalidRequestError, Truncation, Vectors
from maxsimd.engine.media import AnyPicture, EncodedPicture, Part, PictureUrl
from maxsimd.engine.media import Content as PictureContent
from maxsimd.engine.requests import DocumentDigest, Item, OptionNames, are_texts
from maxsimd.engine.workers import yield_to_smaller

# Texts and pictures, or each text's token ids.
Inputs = list[str] | list[list[int]] | list[str | PictureContent]

_ENDLESS = 2**31 - 1
# A field's name and the object around it.
_AROUND_A_FIELD = 2
# Limits of a request's names and values in YAML, which take 8 microseconds each, and of nested lists and
# objects.
_MOST_WRITTEN, _DEEPEST_WRITTEN = 10_000, 32

# Names of pictures, in objects and as types of parts.
_PICTURES = ("image", "image_url", "image_base64", "input_image")
_TEXT_TYPES = ("text", "input_text")
# Media that no model here reads.
_OTHER_NAMES = ("video", "video_url", "audio", "audio_url", "input_audio", "image_embeds")
_MEDIA_NAMES = frozenset({*_PICTURES, *_OTHER_NAMES})
_MEDIA_TYPES = frozenset({*_MEDIA_NAMES, "file", "document"})
# Fields of an object that names a picture. `detail` has no effect.
PICTURE_URL = ("url", "detail")
# Fields of each kind of object. Clients may set any id.
_OF_TEXT, _OF_CONTENT = ("text", "type", "id"), ("content", "type", "id", "role")
_OF_PICTURE = ("text", *_OF_CONTENT, *_PICTURES, *_OTHER_NAMES)
_OF_VECTORS = ("embedding", "dtype", "shape", "scales", "id")
_OF_DIGEST = ("digest", "id")
_OF_SENTENCES = ("source_sentence", "sentences")

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}
# Numbers are read in parts of this many numbers or characters, because each part holds Python's lock. A
# multiple of base64's four characters.
_PART = 1 << 18
_LONGEST_SHOWN = 60
# Fields that come before a digest, and its characters.
_BEFORE_DIGESTS = frozenset({"text", "content", "embedding", *_MEDIA_NAMES})
_HEXADECIMAL, _BASE64 = 64, 43


@dataclass
class RankFields:
    """Each field's place in a document's text, and how many names and values may still become YAML."""

    places: Mapping[str, int]
    room: int = _MOST_WRITTEN


@contextmanager
def with_request_field_names(**names: str) -> Iterator[None]:
    """Errors of the engine name the request's fields: `names` maps the engine's arguments to them."""
    try:
        yield
    except InvalidRequestError as error:
        # The engine names an argument at the beginning of a message, or one of its texts anywhere.
        arguments = "|".join(names)
        message = re.sub(
            rf"^(?:{arguments})\b|\b(?:{arguments})(?=\[\d)", lambda found: names[found[0]], str(error)
        )
        # A request to rank has one query.
        message = message.replace("query[0]", "query")
        raise InvalidRequestError(message, names.get(error.param or "", error.param)) from error


def check_count(contents: Any, param: str, most: int) -> None:
    """Raises ApiError for a list of more than `most` entries."""
    if isinstance(contents, list):
        check_number(len(contents), param, most)


def check_number(entries: int, param: str, most: int) -> None:
    """Raises ApiError for more than `most` entries."""
    if entries > most:
        message = f"{param} has {entries} entries, but at most {most} are taken at a time; send them in parts"
        raise ApiError(413, message, param)


def as_items(contents: Contents, param: str, rank_fields: list[str] | None = None) -> list[Item]:
    """Reads one or many contents. With `rank_fields` each object is a record, whose text has a line for each
    named field, as Cohere's."""
    if isinstance(contents, list) and are_texts(contents):
        return [*cast("list[str]", contents)]
    ranked = RankFields({name: i for i, name in enumerate(dict.fromkeys(rank_fields or ()))})
    return [
        _record_text(content, ranked, where)
        if rank_fields and isinstance(content, dict) and not _is_digest(content)
        else as_item(content, where, param)
        for where, content in _named(contents, param)
    ]


def as_item(content: Content, where: str, param: str) -> Item:
    """Reads a content as a text, an embedding, a digest or pictures."""
    if is_vectors(content):
        return vectors_of(content, where, param)
    if _is_digest(content):
        return _digest_of(content, where, param)
    return _text_or_pictures(content, where, param)


def id_of(content: Any) -> str | int | UnsetType:
    """The id that a client has given an object."""
    id = content.get("id") if isinstance(content, dict) else None
    return id if isinstance(id, str | int) and not isinstance(id, bool) else UNSET


def _is_digest(content: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a content is an object with a digest and nothing that would come first."""
    return isinstance(content, dict) and "digest" in content and content.keys().isdisjoint(_BEFORE_DIGESTS)


def _digest_of(content: dict[str, Any], where: str, param: str) -> DocumentDigest:
    """The digest of {"digest": ...}, in hexadecimal or in base64 for URLs."""
    given = content["digest"]
    with suppress(ValueError):  # also of base64
        if isinstance(given, str) and len(given) == _HEXADECIMAL:
            return DocumentDigest(bytes.fromhex(given))
        if isinstance(given, str) and len(given.rstrip("=")) == _BASE64:
            return DocumentDigest(base64.b64decode(given.rstrip("=") + "=", b"-_", validate=True))
    raise InvalidRequestError(
        f"{where} has no digest: it must be a SHA-256, of {_HEXADECIMAL} hexadecimal digits or {_BASE64} "
        "characters of base64 for URLs",
        param,
    )


def _named(contents: Contents, param: str) -> Iterator[tuple[str, Content]]:
    """Contents with their names in errors."""
    several: Sequence[Content] = (
        contents if isinstance(contents, list) else each_picture(contents) or (contents,)
    )
    for i, content in enumerate(several):
        yield f"{param}[{i}]", content


def _text_or_pictures(content: Content, where: str, param: str) -> str | PictureContent:
    """The text of a string, of {"text": ...}, of {"content": "..."} or content parts; or its pictures."""
    if isinstance(content, str):
        return content
    if has_pictures(content):
        return content_of(content, where, param)
    text = content.get("text", content.get("content"))
    if isinstance(text, list):
        return "\n".join(_part_text(part, where, param) for part in text)
    if isinstance(text, str):
        return text
    raise InvalidRequestError(f'{where} is an object without a "text" or "content" string', param)


def texts_and_pictures(contents: Contents, param: str) -> list[str | PictureContent]:
    return [_text_or_pictures(content, where, param) for where, content in _named(contents, param)]


def _record_text(record: dict[str, Any], rank_fields: RankFields, where: str) -> str:
    # Looking up every name in every record would take too long.
    places = rank_fields.places
    named = sorted(record.keys() & places.keys(), key=places.__getitem__)
    lines = [
        _field_text(name, record[name], rank_fields, where) for name in named if record[name] is not None
    ]
    if not lines:
        raise InvalidRequestError(
            f"{where} has none of the fields that rank_fields names; name at least one that it has",
            "rank_fields",
        )
    return "\n".join(lines)


def _field_text(name: str, value: Any, rank_fields: RankFields, where: str) -> str:
    """A field of a record as YAML, as Cohere's clients write records. Texts are not quoted."""
    if isinstance(value, str | int):
        return f"{name}: {str(value).lower() if isinstance(value, bool) else value}"
    if isinstance(value, float) and math.isfinite(value):
        # YAML's writer would give this, but takes long to begin.
        number = repr(value)
        return f"{name}: {number if '.' in number else number.replace('e', '.0e')}"
    rank_fields.room -= _size_as_yaml(name, value, rank_fields.room, where)
    import yaml  # late: few requests need it

    written: str = yaml.dump(
        {name: value}, Dumper=_dumper(), sort_keys=False, allow_unicode=True, width=_ENDLESS
    )
    return written.rstrip("\n")


def _size_as_yaml(name: str, value: Any, room: int, where: str) -> int:
    """The number of names and values in a field. Raises InvalidRequestError above `room`, and if too deep."""
    size, depth, level = _AROUND_A_FIELD + 1, 0, [value]
    while level:
        inner = [each for each in level if isinstance(each, dict | list)]
        depth += bool(inner)
        size += sum(len(each) * (2 if isinstance(each, dict) else 1) for each in inner)
        if depth > _DEEPEST_WRITTEN:
            raise InvalidRequestError(
                f"the field `{printable(name, 60)}` of {where} has more than {_DEEPEST_WRITTEN} lists and "
                "objects within each other; name another in rank_fields, or send it as a text",
                "rank_fields",
            )
        if size > room:
            raise InvalidRequestError(
                f"with the field `{printable(name, 60)}` of {where}, the lists and objects that rank_fields "
                f"names have more than {_MOST_WRITTEN} names and values in this request; name other fields, "
                "send fewer documents, or send such fields as texts",
                "rank_fields",
            )
        level = [child for each in inner for child in (each.values() if isinstance(each, dict) else each)]
    return size


@functools.cache
def _dumper() -> Any:
    """A YAML writer, in C if there is one, that writes equal values anew each time."""
    import yaml

    base = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return type("RecordDumper", (base,), {"ignore_aliases": lambda dumper, value: True})


def _part_text(part: Any, where: str, param: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequestError(f"{where} has a content part that is not text; only text can be scored", param)


def truncation_of(request: Common, default: LongDocuments) -> Truncation:
    """The truncation that a request asks for, or `default`. Only documents to be scored have windows."""
    tokens = request.truncate_prompt_tokens
    long_documents = request.long_documents or default
    # Voyage's field.
    cut = getattr(request, "truncation", None)
    if cut is not None and tokens is None and request.long_documents is None:
        long_documents = "truncate" if cut else "error"
    # A length that the request sets itself is no error by the server's default.
    refuse = long_documents == "error" and (request.long_documents is not None or cut is False)
    if tokens is None and long_documents != "error":
        tokens = -1
    is_scoring = hasattr(request, "window_overlap")
    if request.long_documents == "window" and not is_scoring:
        raise InvalidRequestError(
            "long_documents window is only for documents that are scored; use truncate or error",
            "long_documents",
        )
    limits = [tokens, *(getattr(request, name, None) or None for name in LIMITS[1:])]
    return Truncation(
        max_tokens=tokens,
        side=request.truncation_side,
        max_query_tokens=limits[1],
        max_document_tokens=limits[2],
        windows=is_scoring and long_documents == "window",
        window_overlap=getattr(request, "window_overlap", None),
        refuse=refuse and any(limit is not None for limit in limits),
        option_names=option_names_of(request),
    )


def option_names_of(request: msgspec.Struct | None = None) -> OptionNames:
    """The names that errors have for the fields of a request."""
    return OptionNames(
        _truncation_field(request)[0], "truncate_prompt_tokens", "max_tokens_per_query", "max_tokens_per_doc"
    )


def _truncation_field(request: msgspec.Struct | None) -> tuple[str, str]:
    """The field of a request with the value that lets long texts be truncated, and that refuses them.
    None has text-embeddings-inference's."""
    used = {"truncate"} if request is None else {*request.__struct_fields__}
    if isinstance(request, RequestBody):
        used -= request.unused_fields()
    if "long_documents" in used:
        return 'long_documents "truncate"', 'long_documents "error"'
    if hasattr(request, "TRUNCATES"):
        return 'truncate "END"', 'truncate "NONE"'
    name = "truncation" if "truncation" in used else "truncate"
    return f"{name} true", f"{name} false"


def truncation_by_switch(
    truncates: bool | None,
    side: Direction | None,
    default: LongDocuments,
    request: msgspec.Struct | None = None,
    may_window: bool = False,
) -> Truncation:
    """The truncation that a request asks for by a single field; `default` where that is null."""
    return Truncation(
        max_tokens=-1 if (default != "error" if truncates is None else truncates) else None,
        side=cast("Literal['left', 'right'] | None", side and side.lower()),
        windows=truncates is None and default == "window" and may_window,
        option_names=option_names_of(request),
    )


def as_inputs(value: Any, most: int, param: str = "input") -> Inputs:
    """OpenAI's `input`: a text, texts, token ids, or lists of token ids."""
    if value is UNSET:
        raise InvalidRequestError(f"{param} is missing", param)
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_token(value[0]) and all(_is_token(item) for item in value):
            return [value]
        check_count(value, param, most)
        if are_texts(value):
            return value
        if all(isinstance(item, str | dict) for item in value):  # Jina's {"text": ...}, {"image": ...}
            return texts_and_pictures(value, param)
        if all(isinstance(item, list) and item and all(map(_is_token, item)) for item in value):
            return value
    raise InvalidRequestError(
        f"{_describe_odd_entry(value, param)}{param} must be a text, a list of texts, a list of token ids or "
        "a list of those, and not empty",
        param,
    )


def _describe_odd_entry(values: Any, param: str) -> str:
    """Names the entry of a list that has no known kind, or another than the first; "" if there is none."""
    first = None
    for i, value in enumerate(values if isinstance(values, list) else ()):
        kind = _kind_of_input(value)
        if kind is None:
            shown = "null" if value is None else "neither a text nor token ids"
            return f"{param}[{i}] is {shown}: "
        if first not in (None, kind):
            return f"{param}[{i}] is {kind}, but {param}[0] is {first}: "
        first = kind
    return ""


def _kind_of_input(value: Any) -> str | None:
    if isinstance(value, str | dict):
        return "a text"
    if _is_token(value):
        return "a token id"
    is_ids = isinstance(value, list) and value and all(map(_is_token, value))
    return "a list of token ids" if is_ids else None


def pictures_of(value: Any, most: int, param: str) -> list[str | PictureContent]:
    """Reads strings as pictures."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values or not all(isinstance(each, str) for each in values):
        raise InvalidRequestError(f"{param} must be a list of pictures, and not empty", param)
    check_count(values, param, most)
    return [content_of({"image": each}, f"{param}[{i}]", param) for i, each in enumerate(values)]


def plain_texts(inputs: Inputs, param: str) -> list[str]:
    """The inputs of a model that labels tokens. Raises InvalidRequestError for anything but texts."""
    if not are_texts(inputs):
        raise InvalidRequestError(
            f"{param} must be texts, because labels come with the characters of their tokens; send no token "
            "ids, pictures or messages",
            param,
        )
    return cast("list[str]", inputs)


def check_token_ids(inputs: Inputs, accepted: bool, param: str = "input") -> None:
    """Refuses token ids unless they are accepted."""
    if not accepted and isinstance(inputs[0], list):
        raise InvalidRequestError(
            f"{param} has token ids, and another tokenizer's would get vectors that mean nothing; send texts "
            "(LangChain's OpenAIEmbeddings does with check_embedding_ctx_length=False), or have the server "
            "started with --accept-token-ids if they are its own (POST /tokenize)",
            param,
        )


def _is_token(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def known_names(content: dict[str, Any]) -> tuple[str, ...]:
    """The fields that are read of an object with a text, pictures, an embedding, a digest, or sentences to
    compare."""
    if is_vectors(content):
        return _OF_VECTORS
    if _is_digest(content):
        return _OF_DIGEST
    if has_pictures(content):
        return _OF_PICTURE
    if "text" in content:
        return _OF_TEXT
    return _OF_SENTENCES if "sentences" in content else _OF_CONTENT


def has_pictures(content: dict[str, Any]) -> bool:
    """Whether an object is, or has among its parts, something else than text. An object with a text and
    without a picture is a text, whatever its type."""
    parts = content.get("content")
    if isinstance(parts, list):
        return _named_media(content) or any(map(_is_medium, parts or [content]))
    return _named_media(content) or (_is_medium(content) and not isinstance(content.get("text", parts), str))


def content_of(content: dict[str, Any], where: str, param: str) -> PictureContent:
    """The texts and pictures of an object in order. Errors call it `where`. Raises InvalidRequestError."""
    parts = content.get("content")
    if not isinstance(parts, list):
        return PictureContent.of([*_object_parts(content, where, param)])
    if not parts and not _named_media(content):
        raise _not_text_or_picture(where, param)
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
            raise _not_text_or_picture(named, param)
    return PictureContent.of(read)


def each_picture(content: Any) -> list[dict[str, Any]] | None:
    """The pictures of an object that stands for a list, as vLLM's clients send documents: several parts, all
    pictures. None for anything else."""
    parts = content.get("content") if isinstance(content, dict) else None
    if not isinstance(parts, list) or len(parts) < 2 or not all(map(_is_medium, parts)):
        return None
    return parts


def _is_medium(part: Any) -> bool:
    """Whether a part is something else than text."""
    if not isinstance(part, dict):
        return False
    kind = part.get("type")
    return (isinstance(kind, str) and kind in _MEDIA_TYPES) or _named_media(part)


def _named_media(part: dict[str, Any]) -> bool:
    if _MEDIA_NAMES.isdisjoint(part):  # as in nearly all of thousands
        return False
    return any(part.get(name) is not None for name in _MEDIA_NAMES)


def _object_parts(part: dict[str, Any], where: str, param: str) -> Iterator[Part]:
    """A text, a picture, or Jina's both; then the picture comes first, as models that read both expect."""
    text, kind = part.get("text"), part.get("type")
    given = [part[name] for name in _PICTURES if part.get(name) is not None]
    is_known = kind is None or kind in _TEXT_TYPES or (kind in _PICTURES and given)
    if not is_known or any(part.get(name) is not None for name in _OTHER_NAMES):
        raise _not_text_or_picture(where, param)
    if len(given) > 1:
        raise InvalidRequestError(f"{where} has several pictures; give each in a part of its own", param)
    if not isinstance(text, str) and (text is not None or not given):
        raise _not_text_or_picture(where, param)
    if given:
        yield _picture(given[0], where, param, may_be_bare="image_url" not in part)
    if isinstance(text, str):
        yield text


def _picture(value: Any, where: str, param: str, may_be_bare: bool) -> AnyPicture:
    """A picture from a URL, a data URL, bare base64 if `may_be_bare`, or an object with its `url`."""
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


def _not_text_or_picture(where: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f'{where} is neither a text nor a picture; give {{"type": "text", "text": ...}} or '
        '{"type": "image_url", "image_url": {"url": ...}}',
        param,
    )


def is_vectors(content: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a content is an object with an embedding and without a text, which would come first."""
    return isinstance(content, dict) and "embedding" in content and not content.keys() & {"text", "content"}


def vectors_of(content: dict[str, Any], where: str, param: str) -> Vectors:
    """The embedding of {"embedding", "dtype", "shape", "scales"}: lists of numbers, or base64 of
    little-endian numbers in row order. Errors call it `where`. Raises InvalidRequestError."""
    try:
        given, shape = content["embedding"], content.get("shape")
        name = content.get("dtype") or "float32"
        if not isinstance(name, str) or name not in _DTYPES:
            shown = repr(name[:_LONGEST_SHOWN]) if isinstance(name, str) else f"of type {type(name).__name__}"
            raise ValueError(f"dtype {shown} is not known; use {', '.join(_DTYPES)}")
        dtype = _DTYPES[name]
        rows = _numbers(given, dtype, "embedding")
        if shape is not None:
            rows = rows.reshape(_sizes_of(shape, rows.numel()))
        scales = content.get("scales")
        if scales is not None:
            scales = _numbers(scales, torch.float32, "scales")
    except ValueError as error:
        raise InvalidRequestError(f"{where}: {error}", param) from None
    return Vectors(rows, scales)


def _numbers(given: Any, dtype: torch.dtype, name: str) -> torch.Tensor:
    return _from_base64(given, dtype, name) if isinstance(given, str) else _from_lists(given, dtype, name)


def _from_base64(text: str, dtype: torch.dtype, name: str) -> torch.Tensor:
    raw = bytearray()
    try:
        for start in range(0, len(text), _PART):
            part = text[start : start + _PART]
            if part.endswith("=") and start + _PART < len(text):
                raise ValueError("padding before the end")
            raw += binascii.a2b_base64(part, strict_mode=True)
            yield_to_smaller()
    except ValueError:
        raise ValueError(f"{name} is not base64; leave out line breaks and data: prefixes") from None
    if not raw or len(raw) % dtype.itemsize:
        raise ValueError(f"{name} has {len(raw)} bytes, and its numbers have {dtype.itemsize} each")
    return torch.frombuffer(raw, dtype=dtype)


def _from_lists(values: Any, dtype: torch.dtype, name: str) -> torch.Tensor:
    try:
        if not isinstance(values, list):
            return torch.tensor(values, dtype=dtype)
        row = values[0] if values and isinstance(values[0], list) else []
        if row and isinstance(row[0], list):
            raise ValueError("more than rows")
        if len(row) > _PART:
            return torch.stack([_joined(each, _PART, dtype) for each in values])
        return _joined(values, max(1, _PART // max(1, len(row))), dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(
            f"{name} is neither base64 nor lists of numbers, as many in each, in the range of {dtype}"
        ) from None


def _joined(values: list[Any], count: int, dtype: torch.dtype) -> torch.Tensor:
    """Makes a tensor of numbers or rows. Reads `count` at a time, so that smaller work is not held up."""
    parts = []
    for start in range(0, max(1, len(values)), count):
        parts.append(torch.tensor(values[start : start + count], dtype=dtype))
        yield_to_smaller()
    return torch.cat(parts)


def _sizes_of(shape: Any, count: int) -> list[int]:
    """The sizes of a shape. Checks their bounds before it multiplies them, which could take long."""
    sizes = shape if isinstance(shape, list) else [shape]
    if len(sizes) not in (1, 2):
        raise ValueError(f"shape has {len(sizes)} sizes; give [tokens, dimensions] or [dimensions]")
    if not all(type(size) is int for size in sizes):
        raise ValueError(
            "shape does not fit: it has something else than whole numbers; give [tokens, dimensions]"
        )
    if not all(0 <= size <= count for size in sizes) or math.prod(sizes) != count:
        raise ValueError(f"shape {shape} does not fit the embedding, which has {count} numbers")
    return sizes


log = logging.getLogger("maxsimd.http")

Names: TypeAlias = tuple[str, ...]

# Warnings name this many unread fields, each shortened so that a header has room.
_MOST_NAMED = 8
_LONGEST_NAME = 60
# At most so many routes and fields are logged, each once.
_MOST_LOGGED = 200
_SYNONYMS = {
    "activation": "use_activation",
    "docs": "documents",
    "instruct": "instruction",
    "max_chunks_per_doc": "max_tokens_per_doc",
    "max_length": "truncate_prompt_tokens",
    "normalize_embeddings": "normalized",
    "passages": "documents",
    "prompt": "instruction",
    "softmax": "use_activation",
    "threshold": "score_threshold",
    "top": "top_n",
    "k": "top_n",
}
# Similarity of a misspelled name that is suggested, from 0 to 1.
_ALIKE = 0.7

# Fields whose texts may be objects.
_CONTENT_FIELDS = frozenset(
    {"query", "queries", "documents", "items", "data_1", "data_2", "text_1", "text_2"}
    | {"passages", "input", "inputs", "content"}
)
LIMITS = ("truncate_prompt_tokens", "max_tokens_per_query", "max_tokens_per_doc")


@dataclass(frozen=True, slots=True)
class UnreadField:
    """The path of a field, such as `top_N` or `documents[].title`, and the known name most like it."""

    path: str
    nearest: str | None

    def __str__(self) -> str:
        """Uses only characters that a header may have."""
        shown = self.path.encode("ascii", "backslashreplace").decode()
        meant = f"; did you mean `{self.nearest}`?" if self.nearest else ""
        return f"the field `{printable(shown, _LONGEST_NAME)}` is not read here{meant}"


class LoggedFields:
    """The unread fields that were logged, each once for a route."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def note(self, route: str, unread: Iterable[UnreadField]) -> None:
        for field in unread:
            key = (route, field.path[:_LONGEST_NAME])
            if key not in self._seen and len(self._seen) <= _MOST_LOGGED:
                self._seen.add(key)
                if len(self._seen) > _MOST_LOGGED:
                    log.warning("more unread fields of requests are not logged")
                else:
                    log.warning("%s: %s", route, field)


def unread_fields(request: msgspec.Struct, given: Mapping[str, Any]) -> list[UnreadField]:
    """The fields of the request in JSON that nothing reads, at most one more than warnings name. Values may
    be undecoded. Null counts as left out."""
    found: dict[str, UnreadField] = {}
    for path, known in _unread(request, given, ""):
        if path not in found:
            found[path] = UnreadField(path, _nearest(path.rpartition(".")[2][:_LONGEST_NAME], known))
            if len(found) > _MOST_NAMED:
                break
    return list(found.values())


def field_warnings_of(unread: Collection[UnreadField]) -> tuple[str, ...]:
    named = map(str, islice(unread, _MOST_NAMED))
    return (*named, "more fields are not read here") if len(unread) > _MOST_NAMED else tuple(named)


def warnings_of(
    truncated: int, about_fields: tuple[str, ...], request: msgspec.Struct | None = None
) -> Warnings:
    """All warnings of an answer; `truncated` counts the inputs that were truncated. The
    warning names the limits that the `request` sets, and the field that refuses long texts."""
    warnings = [*about_fields, *([_truncation_warning(truncated, request)] if truncated else [])]
    return warnings or UNSET


def _truncation_warning(truncated: int, request: msgspec.Struct | None) -> str:
    were = "input was" if truncated == 1 else "inputs were"
    refusing = _truncation_field(request)[1]
    given = ((name, getattr(request, name, None)) for name in LIMITS)
    limits = [f"{name} ({value})" for name, value in given if value is not None and value > 0]
    if limits:
        return (
            f"{truncated} {were} longer than this request's {' or '.join(limits)}, or than the model reads, "
            f"and truncated; raise the limit, send shorter texts, or refuse them with {refusing}"
        )
    return (
        f"{truncated} {were} longer than the model reads and truncated; send shorter texts, or refuse "
        f"them with {refusing}"
    )


@lru_cache(maxsize=1024)
def _nearest(name: str, known: Names) -> str | None:
    """The known name that a misspelled one most likely means."""
    if _SYNONYMS.get(name) in known:
        return _SYNONYMS[name]
    plain = {_plain(each): each for each in known}
    close = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=_ALIKE)
    return plain[close[0]] if close else None


def _plain(name: str) -> str:
    """A name without differences in case, underscores and hyphens."""
    return name.replace("_", "").replace("-", "").lower()


def _unread(request: msgspec.Struct, given: Mapping[str, Any], at: str) -> Iterator[tuple[str, Names]]:
    """The path of each unread field, with the known names at that place."""
    unused = request.unused_fields() if isinstance(request, RequestBody) else frozenset()
    used = {*request.__struct_fields__} - unused
    meant = tuple(name for name in request.__struct_fields__ if name in used and name not in IGNORED_FIELDS)
    has_records = bool(getattr(request, "rank_fields", None))
    for name, value in given.items():
        if name not in used:
            # An empty value of another shape's field needs no warning.
            if (held := _opened(value)) is not None and not (name in unused and held in ({}, [])):
                yield f"{at}{name}", meant
            continue
        read = getattr(request, name)
        if isinstance(read, msgspec.Struct):
            yield from _unread(read, _members(value), f"{at}{name}.")
        elif isinstance(read, list) and read and isinstance(read[0], msgspec.Struct):
            for each, raw in zip(read, _entries(value), strict=True):
                yield from _unread(each, _members(raw), f"{at}{name}[].")
        elif name in _CONTENT_FIELDS and (name == "query" or not has_records):
            yield from _unread_of_contents(read, f"{at}{name}")


def _unread_of_contents(value: Any, at: str, *, are_parts: bool = False) -> Iterator[tuple[str, Names]]:
    """Unread fields of objects with texts, vectors or pictures, or of an object's parts."""
    is_list = isinstance(value, list)
    for each in value if is_list else (value,):
        # Nearly all objects have one field, and there may be very many.
        if not isinstance(each, dict) or (len(each) == 1 and "text" in each):
            continue
        here, known = (f"{at}[]." if is_list else f"{at}."), known_names(each)
        for name, inside in each.items():
            if name not in known:
                if inside is not None:
                    yield f"{here}{name}", known
            elif name == "content" and isinstance(inside, list) and not are_parts:
                yield from _unread_of_contents(inside, f"{here}content", are_parts=True)
            elif isinstance(inside, dict):
                unread = sorted(inside.keys() - {*PICTURE_URL})
                yield from ((f"{here}{name}.{other}", PICTURE_URL) for other in unread)


def _opened(value: Any) -> Any:
    """A short value as it is. Longer ones stay undecoded: they hold something."""
    is_short = isinstance(value, msgspec.Raw) and len(memoryview(value)) <= len(b"null")
    return msgspec.json.decode(value) if is_short else value


def _members(value: Any) -> Mapping[str, Any]:
    if isinstance(value, msgspec.Raw):
        return msgspec.json.decode(value, type=dict[str, msgspec.Raw])
    return value if isinstance(value, dict) else {}


def _entries(value: Any) -> list[Any]:
    return msgspec.json.decode(value, type=list[msgspec.Raw]) if isinstance(value, msgspec.Raw) else value
