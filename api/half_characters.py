"""Bodies with half of a character: JSON may escape a surrogate without its other half, but no text has one.

msgspec refuses such a body as a whole. This module finds the field and the entry that has it. With
`on_error` "report", such a document becomes an entry in `errors`.
"""

import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from maxsimd.api.reading_pictures import has_pictures
from maxsimd.engine import InvalidRequestError

T = TypeVar("T")
Fields = dict[str, msgspec.Raw]

# A document that the engine refuses: a text of nothing but half of a character.
HALF = "\ud83d"
# An escaped surrogate, and its other half if that is there. Behind an escaped backslash, `ud83d` is text. The
# repeat gives nothing back, or a body of backslashes would take gigabytes.
_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*+\\u[dD](?:[89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})"
)
_LENGTH = len(rb"\ud83d")
# Characters that no text should have (Unicode's noncharacters), which mark where halves stood.
_MARKS = range(0xFDD0, 0xFDF0)
_ESCAPED_MARK = re.compile(rb"\\u([fF][dD][dDeE][0-9a-fA-F])")
_DOCUMENTS = frozenset({"documents", "items", "text_2", "data_2"})
# How many levels deep errors name the place: each level is parsed again.
_DEEPEST = 4


def mended(body: bytearray, kind: type[T]) -> T:
    """Decodes a body that has halves of characters, which it changes: documents with one are `HALF`, if the
    request wants their errors reported. Raises InvalidRequestError that says where another is."""
    mark = _mark_in(body)
    escaped = re.compile(re.escape(_escaped(mark)))
    fields = msgspec.json.decode(body, type=Fields)
    known = _DOCUMENTS & {*getattr(kind, "__struct_fields__", _DOCUMENTS)}
    if _text(fields.get("on_error")) != "report" or _text(fields.get("rank_fields")) is not None:
        known = frozenset()
    broken: list[tuple[str, int]] = []
    for name, value in fields.items():
        if chr(mark) in name:
            raise _refusal("the name of a field", None)
        for place in _places(value, escaped):
            if place is None or name not in known or not _is_text(place[1], mark):
                raise _refusal(_where(value, name, escaped), name)
            broken.append((name, place[0]))
    request = msgspec.json.decode(body, type=kind, strict=False)
    for name, i in broken:
        (request[name] if isinstance(request, dict) else getattr(request, name))[i] = HALF
    return request


def _mark_in(body: bytearray) -> int:
    """Puts a mark in the place of each half, one that the body does not have; returns its code point."""
    # One search for all of them: each goes through the whole body.
    escaped = {int(found[1], 16) for found in _ESCAPED_MARK.finditer(body)}
    mark = next((each for each in _MARKS if each not in escaped and chr(each).encode() not in body), None)
    if mark is None:
        raise _refusal("the body", None)
    for found in _SURROGATE.finditer(body):
        if found[1] is None:
            body[found.end() - _LENGTH : found.end()] = _escaped(mark)
    return mark


def _escaped(mark: int) -> bytes:
    return rb"\u%04x" % mark


def _has(value: msgspec.Raw, mark: re.Pattern[bytes]) -> bool:
    # A copy of the value may be large.
    return mark.search(value) is not None


def _begins(value: msgspec.Raw, character: bytes) -> bool:
    return bytes(memoryview(value)[:1]) == character


def _places(value: msgspec.Raw, mark: re.Pattern[bytes]) -> Iterator[tuple[int, msgspec.Raw] | None]:
    """The entries of a list that have the mark, by their index; None where a value has it that is no list."""
    if not _has(value, mark):
        return
    if not _begins(value, b"["):
        yield None
        return
    for i, each in enumerate(msgspec.json.decode(value, type=list[msgspec.Raw])):
        if _has(each, mark):
            yield i, each


def _is_text(value: msgspec.Raw, mark: int) -> bool:
    """Whether a document is a text, or an object that has the mark in its text alone."""
    document = msgspec.json.decode(value)
    if not isinstance(document, dict):
        return isinstance(document, str)
    text = document.pop("text", None)
    has_more = chr(mark).encode() in msgspec.json.encode(document)
    return isinstance(text, str) and not has_pictures(document) and not has_more


def _where(value: msgspec.Raw, path: str, mark: re.Pattern[bytes]) -> str:
    """Returns the name that errors give to the first text with the mark."""
    for _ in range(_DEEPEST):
        if _begins(value, b"["):
            place = next(_places(value, mark), None)
            assert place is not None
            path, value = f"{path}[{place[0]}]", place[1]
        elif _begins(value, b"{"):
            fields = msgspec.json.decode(value, type=Fields)
            name = next((name for name, each in fields.items() if _has(each, mark)), None)
            if name is None:  # a name has it
                break
            path, value = f"{path}.{name}", fields[name]
        else:
            break
    return path


def _text(value: msgspec.Raw | None) -> Any:
    return None if value is None else msgspec.json.decode(value)


def _refusal(where: str, param: str | None) -> InvalidRequestError:
    return InvalidRequestError(
        f"{where} has half of a character, like \\ud83d alone; send whole characters, or leave it out", param
    )
