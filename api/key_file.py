"""What the lines of a file of keys say: a key each, and what its tenant may use. No message repeats a key, or
anything else that a line holds."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from maxsimd.engine import Tenant

# Names are labels of metrics. Reserved are the label of tenants without a name, and what those are called.
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_RESERVED = re.compile(r"other|key-[0-9]+")
_WHOLE = re.compile(r"[0-9][0-9_]{0,17}")
_LIMITS = tuple(field.name for field in fields(Tenant))
ATTRIBUTES = ("name", *_LIMITS, "admin")


@dataclass(frozen=True, slots=True)
class Line:
    """A key, as its digest, and the attributes that stand behind it."""

    number: int
    digest: bytes
    name: str | None
    limits: Mapping[str, Any]
    is_admin: bool


@dataclass(frozen=True, slots=True)
class KeyTable:
    """The keys, by digest, each with the name of its tenant or None where it has none; the tenants that are
    named; what keys without a name may use; and the keys of those who may change what the server serves."""

    names: Mapping[bytes, str | None]
    tenants: Mapping[str, Tenant]
    nameless: Mapping[bytes, Tenant]
    admins: frozenset[bytes] = frozenset()


def digest_of(key: str) -> bytes:
    # A header may hold bytes that are no UTF-8; servers hand these over as surrogates.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(content: bytes) -> KeyTable:
    """Raises ValueError, which says where, for what is no file of keys."""
    try:
        texts = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    lines = [_read_line(number, text) for number, text in enumerate(texts, 1) if text.strip()]
    if not lines:
        raise ValueError("it holds no key")
    return _table_of(lines)


def _read_line(number: int, text: str) -> Line:
    """The key is what stands before the first attribute; it may hold spaces."""
    words = list(re.finditer(r"\S+", text))
    if _is_attribute(words[0][0]):
        raise ValueError(f"line {number} begins with an attribute; put the key before it")
    first = next((i for i, word in enumerate(words) if i and "=" in word[0]), len(words))
    attributes: dict[str, Any] = {}
    for word in words[first:]:
        attribute, _, value = word[0].partition("=")
        if not _is_attribute(word[0]):
            raise ValueError(
                f"line {number} has something behind its key that is no attribute; these are "
                f"{', '.join(f'{attribute}=' for attribute in ATTRIBUTES)}"
            )
        if attribute in attributes:
            raise ValueError(f"line {number} has {attribute} twice")
        attributes[attribute] = _value_of(number, attribute, value)
    key = text[words[0].start() : words[first - 1].end()]
    name, is_admin = attributes.pop("name", None), attributes.pop("admin", False)
    return Line(number, digest_of(key), name, attributes, is_admin)


def _is_attribute(word: str) -> bool:
    attribute, equals, _ = word.partition("=")
    return bool(equals) and attribute in ATTRIBUTES


def _value_of(number: int, attribute: str, value: str) -> Any:
    """Raises ValueError for what an attribute cannot be."""
    try:
        if attribute == "name":
            return _name_of(value)
        if attribute == "admin":
            return _is_admin(value)
        read = _number_of(attribute, value)
        Tenant(**{attribute: read})
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None
    return read


def _name_of(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("name must be 1 to 64 letters, digits, dots, hyphens and underscores (ASCII)")
    if _RESERVED.fullmatch(value):
        raise ValueError("name must not be other, nor key- and a number: those are taken")
    return value


def _is_admin(value: str) -> bool:
    if value not in ("yes", "no"):
        raise ValueError("admin must be yes or no")
    return value == "yes"


def _number_of(attribute: str, value: str) -> Any:
    if attribute == "priority":
        return value
    if attribute == "weight":
        try:
            return float(value)
        except ValueError:
            raise ValueError("weight must be a number") from None
    if not _WHOLE.fullmatch(value):
        raise ValueError(f"{attribute} must be a whole number")
    return int(value)


def _table_of(lines: list[Line]) -> KeyTable:
    """Keys of one name are one tenant: what it may use stands behind any of them. Raises ValueError where two
    lines contradict each other."""
    by_key: dict[bytes, Line] = {}
    by_name: dict[str, dict[str, Any]] = {}
    first: dict[tuple[str, str], int] = {}
    nameless: dict[bytes, Tenant] = {}
    for line in lines:
        same = by_key.setdefault(line.digest, line)
        if (same.name, same.limits, same.is_admin) != (line.name, line.limits, line.is_admin):
            raise ValueError(f"lines {same.number} and {line.number} have the same key with other attributes")
        if line.name is None:
            nameless[line.digest] = Tenant(**line.limits)
            continue
        limits = by_name.setdefault(line.name, {})
        for attribute, value in line.limits.items():
            if limits.setdefault(attribute, value) != value:
                raise ValueError(
                    f"lines {first[line.name, attribute]} and {line.number} have the same name with another "
                    f"{attribute}; give it once"
                )
            first.setdefault((line.name, attribute), line.number)
    tenants = {name: Tenant(**limits) for name, limits in by_name.items()}
    admins = frozenset(line.digest for line in lines if line.is_admin)
    return KeyTable({line.digest: line.name for line in lines}, tenants, nameless, admins)
