"""Warnings of an answer: fields of the request that its route does not read, and inputs that were truncated.

A field is unread if the route does not know its name, or knows it for another shape of request only.
"""

import difflib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, TypeAlias

import msgspec

from maxsimd.api.logs import printable
from maxsimd.api.reading import PICTURE_URL, known_names
from maxsimd.api.wire import IGNORED_FIELDS, RequestBody, Warnings
from maxsimd.engine import InvalidRequestError

log = logging.getLogger("maxsimd.http")

Names: TypeAlias = tuple[str, ...]

# A request is told of this many unread fields by name, each shortened to as many characters. A header has
# room for both.
_MOST_NAMED = 8
_LONGEST_NAME = 60
# A client that makes up names does not fill the log: this many routes and fields are logged, each once.
_MOST_LOGGED = 200
# Names that mean the same though they are spelled unlike.
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
# How alike two names must be, from 0 to 1, for one to be taken for a misspelling of the other.
_ALIKE = 0.7

# Fields whose texts may be objects.
_CONTENT_FIELDS = frozenset(
    {"query", "queries", "documents", "items", "data_1", "data_2", "text_1", "text_2"}
    | {"passages", "input", "inputs", "content"}
)
_LIMITS = ("truncate_prompt_tokens", "max_tokens_per_query", "max_tokens_per_doc")


@dataclass(frozen=True, slots=True)
class UnreadField:
    """A field by its path, such as `top_N` or `documents[].title`, and the known name most like it."""

    path: str
    nearest: str | None

    def __str__(self) -> str:
        """In characters that a header may have."""
        shown = self.path.encode("ascii", "backslashreplace").decode()
        meant = f"; did you mean `{self.nearest}`?" if self.nearest else ""
        return f"the field `{printable(shown, _LONGEST_NAME)}` is not read here{meant}"


class LoggedFields:
    """The unread fields that the log has had, each once for a route. Kept by the server for all requests."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def note(self, route: str, unread: Iterable[UnreadField]) -> None:
        for field in unread:
            key = (route, field.path[:_LONGEST_NAME])
            if key in self._seen or len(self._seen) > _MOST_LOGGED:
                continue
            self._seen.add(key)
            if len(self._seen) > _MOST_LOGGED:
                log.warning("more unread fields of requests are not logged")
            else:
                log.warning("%s: %s", route, field)


def unread_fields(request: msgspec.Struct, given: Mapping[str, Any]) -> list[UnreadField]:
    """The fields of `given`, the request as JSON has it, that nothing reads: at most one more than are named.
    Values of `given` may be undecoded. A field that is null says nothing and does not count."""
    found: dict[str, UnreadField] = {}
    for path, known in _unread(request, given, ""):
        if path not in found:
            found[path] = UnreadField(path, _nearest(path.rpartition(".")[2][:_LONGEST_NAME], known))
            if len(found) > _MOST_NAMED:
                break
    return list(found.values())


def refuse(unread: Iterable[UnreadField]) -> None:
    """Raises InvalidRequestError for the first unread field, if there is one."""
    for field in unread:
        raise InvalidRequestError(
            f"{field}, and this server refuses such fields (--strict-fields); correct it or leave it out",
            field.path,
        )


def messages_of(unread: Collection[UnreadField]) -> tuple[str, ...]:
    """Returns the warnings about unread fields, for the answer."""
    named = map(str, islice(unread, _MOST_NAMED))
    return (*named, "more fields are not read here") if len(unread) > _MOST_NAMED else tuple(named)


def warnings_of(truncated: int, about_fields: tuple[str, ...], request: object = None) -> Warnings:
    """All warnings of an answer; `truncated` counts the inputs that were truncated. With the `request`, the
    warning names the limits that it sets."""
    warnings = [*about_fields, *([_truncation_warning(truncated, request)] if truncated else [])]
    return warnings or msgspec.UNSET


def _truncation_warning(truncated: int, request: object) -> str:
    were = "input was" if truncated == 1 else "inputs were"
    given = ((name, getattr(request, name, None)) for name in _LIMITS)
    limits = [f"{name} ({value})" for name, value in given if value is not None and value > 0]
    if limits:
        return (
            f"{truncated} {were} longer than this request's {' or '.join(limits)}, or than the model reads, "
            'and truncated; raise the limit, send shorter texts, or refuse them with long_documents "error"'
        )
    return (
        f"{truncated} {were} longer than the model reads and truncated; send shorter texts, or refuse "
        'them with long_documents "error"'
    )


@lru_cache(maxsize=1024)
def _nearest(name: str, known: Names) -> str | None:
    """The known name that a misspelled one most likely stands for; None for none."""
    if _SYNONYMS.get(name) in known:
        return _SYNONYMS[name]
    plain = {_plain(each): each for each in known}
    close = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=_ALIKE)
    return plain[close[0]] if close else None


def _plain(name: str) -> str:
    """A name without what spellings differ in: case, underscores and hyphens."""
    return name.replace("_", "").replace("-", "").lower()


def _unread(request: msgspec.Struct, given: Mapping[str, Any], at: str) -> Iterator[tuple[str, Names]]:
    """The path of each unread field, with the names that are known where it stands."""
    unused = request.unused_fields() if isinstance(request, RequestBody) else frozenset()
    used = tuple(name for name in request.__struct_fields__ if name not in unused)
    meant = tuple(name for name in used if name not in IGNORED_FIELDS)
    has_records = bool(getattr(request, "rank_fields", None))
    for name, value in given.items():
        if name not in used:
            # An empty value of a field that another request shape has needs no warning.
            if not _is_null(value) and not (name in unused and _is_empty(value)):
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
    """The unread fields of objects that hold texts, vectors or pictures, or of the parts of one."""
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


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, msgspec.Raw) and _short(value) == b"null")


def _is_empty(value: Any) -> bool:
    return _short(value) in (b"{}", b"[]") if isinstance(value, msgspec.Raw) else value in ({}, [])


def _short(value: msgspec.Raw) -> bytes:
    """The beginning of a value that is not decoded, which may be large."""
    return bytes(memoryview(value)[:5])


def _members(value: Any) -> Mapping[str, Any]:
    if isinstance(value, msgspec.Raw):
        return msgspec.json.decode(value, type=dict[str, msgspec.Raw])
    return value if isinstance(value, dict) else {}


def _entries(value: Any) -> list[Any]:
    return msgspec.json.decode(value, type=list[msgspec.Raw]) if isinstance(value, msgspec.Raw) else value
