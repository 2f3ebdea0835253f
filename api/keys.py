"""API keys: the file that has them, and the tenants that they belong to. Only digests stay in memory: they
have one length, so that comparing them takes the same time for every guess. No message repeats a line of the
file."""

import asyncio
import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

from maxsimd.api.config import ServerConfig, SetupError
from maxsimd.engine import Tenant

# Names are labels of metrics. Some are taken by tenants without a name.
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_RESERVED = re.compile(r"other|unnamed|key-[0-9]+")
_WHOLE = re.compile(r"[0-9][0-9_]{0,17}")
_LIMITS = tuple(field.name for field in fields(Tenant))
ATTRIBUTES = ("name", *_LIMITS, "admin")


@dataclass(frozen=True, slots=True)
class Line:
    """A key's digest and attributes."""

    number: int
    digest: bytes
    name: str | None
    limits: Mapping[str, Any]
    is_admin: bool


@dataclass(frozen=True, slots=True)
class KeyTable:
    """Names of tenants by key, named tenants, limits of keys without a name, and keys of admins."""

    names: Mapping[bytes, str | None]
    tenants: Mapping[str, Tenant]
    nameless: Mapping[bytes, Tenant]
    admins: frozenset[bytes] = frozenset()


def digest_of(key: str) -> bytes:
    # Servers pass bytes that are no UTF-8 as surrogates.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(content: bytes) -> KeyTable:
    """Raises ValueError with the line at fault."""
    try:
        texts = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    lines = [_read_line(number, text) for number, text in enumerate(texts, 1) if text.strip()]
    if not lines:
        raise ValueError("it holds no key")
    return _table_of(lines)


def _read_line(number: int, text: str) -> Line:
    """The key ends before the first attribute and may hold spaces."""
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
        try:
            attributes[attribute] = _read_value(attribute, value)
            Tenant(**{name: attributes[name] for name in attributes.keys() & _LIMITS})
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    key = text[words[0].start() : words[first - 1].end()]
    name, is_admin = attributes.pop("name", None), attributes.pop("admin", False)
    return Line(number, digest_of(key), name, attributes, is_admin)


def _is_attribute(word: str) -> bool:
    attribute, equals, _ = word.partition("=")
    return bool(equals) and attribute in ATTRIBUTES


def _read_value(attribute: str, value: str) -> Any:
    match attribute:
        case "name":
            if not _NAME.fullmatch(value):
                raise ValueError(
                    "name must be 1 to 64 letters, digits, dots, hyphens and underscores (ASCII)"
                )
            if _RESERVED.fullmatch(value):
                raise ValueError("name must not be other, unnamed, nor key- and a number: those are taken")
            return value
        case "admin":
            if value not in ("yes", "no"):
                raise ValueError("admin must be yes or no")
            return value == "yes"
        case "priority":
            return value
        case "weight":
            try:
                return float(value)
            except ValueError:
                raise ValueError("weight must be a number") from None
    if not _WHOLE.fullmatch(value):
        raise ValueError(f"{attribute} must be a whole number")
    return int(value)


def _table_of(lines: list[Line]) -> KeyTable:
    """Keys of one name are one tenant, with limits behind any. Raises ValueError for contradictions."""
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


log = logging.getLogger("maxsimd.keys")

# Seconds between looks at the file.
_LOOK_EVERY_SECONDS = 1.0
_LARGEST_FILE = 1024 * 1024
_NO_LIMITS = Tenant()


class ApiKeys:
    """The accepted keys and their tenants. A file's keys, one a line, are read again when it changes; if it
    then has none or cannot be read, the earlier keys stay. Raises SetupError if it has none at the start, or
    if keys `must_be_named` and one is not. Calls `set_tenants` with the file's tenants, now and whenever the
    file has changed. Processes with the same `secret` give a key without a name the same number."""

    def __init__(
        self,
        config: ServerConfig,
        set_tenants: Callable[[Mapping[str, Tenant]], None] = lambda tenants: None,
        must_be_named: bool = False,
        secret: bytes | None = None,
    ) -> None:
        self._given = [digest_of(key.strip()) for key in config.api_key]
        self._path = None if config.api_key_file is None else Path(config.api_key_file)
        self._must_be_named = must_be_named
        self._table = KeyTable({}, {}, {})
        self._version: tuple[int, ...] = ()
        if self._path is not None:
            self._version = _version(self._path)
            try:
                self._table = self._read(self._path)
            except (OSError, ValueError) as error:
                reason = _cannot_read(self._path, error)
                raise SetupError(f"{reason}; give a readable file with one key per line") from error
        if must_be_named and (self._given or self._path is None):
            raise SetupError(
                "cache_by_tenant needs tenants with names: give all keys in --api-key-file, each with name=, "
                "and none by --api-key or MAXSIMD_API_KEY"
            )
        self.are_asked_for = bool(self._given) or self._path is not None
        self._set_tenants = set_tenants
        self._numbered = count(1)
        self._secret = secret
        self._anonymous: dict[bytes, str] = {}
        self._assign_owners()

    def accept(self, authorization: str) -> str | None:
        """The tenant whose key an Authorization header sends as `Bearer KEY`; None if there is none."""
        return next((self._owners[key] for key in _matching(authorization, self._owners)), None)

    def is_admin(self, authorization: str) -> bool:
        """Whether an Authorization header, whose key was accepted, has an admin's key."""
        return bool(_matching(authorization, self._table.admins))

    def may_change_number(self, tenant: str) -> bool:
        """Whether a tenant has a number that changes when the keys are numbered again. The only tenant of a
        single process has always the same."""
        is_only = len({*self._owners.values()}) == 1 and self._secret is None
        return tenant in self._anonymous.values() and not is_only

    @property
    def has_admins(self) -> bool:
        return bool(self._table.admins)

    async def watch(self) -> None:
        """Takes changes of the file until cancelled."""
        while self._path is not None:
            await asyncio.sleep(_LOOK_EVERY_SECONDS)
            self.reload()

    def reload(self) -> None:
        """Takes the keys of a file that has changed."""
        if self._path is None or (version := _version(self._path)) == self._version:
            return
        self._version = version
        try:
            self._table = self._read(self._path)
        except (OSError, ValueError) as error:
            log.error("%s; the keys read before stay in use", _cannot_read(self._path, error))
        else:
            log.info("the file of keys has changed: %d keys are in it now", len(self._table.names))
            self._assign_owners()

    def _read(self, path: Path) -> KeyTable:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            raise ValueError("it is larger than 1 MiB")
        table = read_keys(content)
        if self._must_be_named and table.nameless:
            raise ValueError("a key has no name, which cache_by_tenant needs; add name=... to each key")
        return table

    def _number(self, digest: bytes) -> int:
        if self._secret is None:
            return next(self._numbered)
        return int.from_bytes(hmac.digest(self._secret, digest, "sha256")[:5])

    def _assign_owners(self) -> None:
        """Gives each key its owner. A key without a name is its own tenant, under a number that says nothing
        of the key and stays while the key does."""
        names = dict.fromkeys(self._given) | dict(self._table.names)
        before, self._anonymous = self._anonymous, {}
        for digest, name in names.items():
            if name is None:
                self._anonymous[digest] = before.get(digest) or f"key-{self._number(digest)}"
        self._owners = {digest: name or self._anonymous[digest] for digest, name in names.items()}
        nameless = self._table.nameless.items()
        limited = {self._owners[digest]: tenant for digest, tenant in nameless if tenant != _NO_LIMITS}
        self._set_tenants({**self._table.tenants, **limited})


def _matching(authorization: str, digests: Iterable[bytes]) -> list[bytes]:
    """Those of the digests that the key in an Authorization header has. Comparing every key in constant time
    reveals nothing by timing."""
    scheme, _, key = authorization.partition(" ")
    sent = digest_of(key.strip())
    matching = [digest for digest in digests if hmac.compare_digest(sent, digest)]
    return matching if scheme.lower() == "bearer" else []


def _cannot_read(path: Path, error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else error
    return f"cannot read keys from {str(path)!r}: {reason}"


def _version(path: Path) -> tuple[int, ...]:
    """Numbers that change with the file and its permissions."""
    try:
        status = os.stat(path)
    except OSError:
        return (0,)
    # A pipe can be read only once.
    if not stat.S_ISREG(status.st_mode):
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
