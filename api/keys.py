"""The API keys: where they are read from, whether a request has sent one, and whose it is.

A file of keys is read again when it changes. Kept in memory are digests, which have one length, so that
comparing them takes the same time for every guess.
"""

import hmac
import logging
import os
import stat
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path

from maxsimd.api.config import ServerConfig, SetupError
from maxsimd.api.key_file import KeyTable, digest_of, read_keys
from maxsimd.engine import Tenant

log = logging.getLogger("maxsimd.keys")

# A request looks at the file of keys only if none has done so for this long.
_LOOK_EVERY_SECONDS = 1.0
_LARGEST_FILE = 1024 * 1024
_NO_TABLE = KeyTable({}, {}, {})
_NO_LIMITS = Tenant()


class ApiKeys:
    """The keys that are accepted, and whose they are. Raises SetupError where the file of keys has none or
    cannot be read, or if keys `must_be_named` and one is not. `set_tenants` is called with the tenants that
    the file names, at once and whenever the file has changed."""

    def __init__(
        self,
        config: ServerConfig,
        clock: Callable[[], float] = time.monotonic,
        set_tenants: Callable[[Mapping[str, Tenant]], None] = lambda tenants: None,
        must_be_named: bool = False,
    ) -> None:
        self._given = [digest_of(key.strip()) for key in config.api_key]
        path = config.api_key_file
        self._file = None if path is None else KeyFile(Path(path), clock, must_be_named)
        if must_be_named and (self._given or self._file is None):
            raise SetupError(
                "cache_by_tenant needs tenants with names: give all keys in --api-key-file, each with name=, "
                "and none by --api-key or MAXSIMD_API_KEY"
            )
        self._set_tenants = set_tenants
        self._table = _NO_TABLE if self._file is None else self._file.table()
        self._numbered = count(1)
        self._anonymous: dict[bytes, str] = {}
        self._take_over()

    @property
    def are_asked_for(self) -> bool:
        return bool(self._given) or self._file is not None

    def accept(self, authorization: str) -> str | None:
        """The tenant whose key an Authorization header sends as `Bearer KEY`; None where it sends none."""
        if self._file is not None and (table := self._file.table()) is not self._table:
            self._table = table
            self._take_over()
        digest = _digest_sent(authorization)
        # Every key is compared, in constant time, so that timing reveals nothing.
        matches = [(hmac.compare_digest(digest, one), owner) for one, owner in self._owners.items()]
        owner = next((owner for matches_it, owner in matches if matches_it), None)
        return owner if _is_bearer(authorization) else None

    def is_admin(self, authorization: str) -> bool:
        """Whether an Authorization header, whose key was accepted, sends that of one who may change what the
        server serves."""
        digest = _digest_sent(authorization)
        matches = [hmac.compare_digest(digest, one) for one in self._table.admins]
        return any(matches) and _is_bearer(authorization)

    @property
    def has_admins(self) -> bool:
        return bool(self._table.admins)

    def _take_over(self) -> None:
        """Gives each key its owner. One without a name is a tenant of its own, under a number that says
        nothing of the key and stays while the key does."""
        names = dict.fromkeys(self._given) | dict(self._table.names)
        before, self._anonymous = self._anonymous, {}
        for digest, name in names.items():
            if name is None:
                self._anonymous[digest] = before.get(digest) or f"key-{next(self._numbered)}"
        self._owners = {digest: name or self._anonymous[digest] for digest, name in names.items()}
        limited = {
            self._owners[digest]: tenant
            for digest, tenant in self._table.nameless.items()
            if tenant != _NO_LIMITS
        }
        self._set_tenants({**self._table.tenants, **limited})


def _is_bearer(authorization: str) -> bool:
    return authorization.partition(" ")[0].lower() == "bearer"


def _digest_sent(authorization: str) -> bytes:
    return digest_of(authorization.partition(" ")[2].strip())


class KeyFile:
    """The keys of a file with one a line. When the file changes they are read again; when it then has none,
    or cannot be read, those that were read before stay, with all that was said of them."""

    def __init__(self, path: Path, clock: Callable[[], float], must_be_named: bool) -> None:
        self._path = path
        self._must_be_named = must_be_named
        self._clock = clock
        self._looked = clock()
        self._version = _version(path)
        try:
            self._table = self._read()
        except (OSError, ValueError) as error:
            raise SetupError(
                f"{_cannot_read(path, error)}; give a readable file with one key a line"
            ) from error

    def table(self) -> KeyTable:
        if self._clock() - self._looked >= _LOOK_EVERY_SECONDS:
            self._looked = self._clock()
            self._look()
        return self._table

    def _look(self) -> None:
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._table = self._read()
        except (OSError, ValueError) as error:
            log.error("%s; the keys read before stay in use", _cannot_read(self._path, error))
        else:
            log.info("the file of keys has changed: %d keys are in it now", len(self._table.names))

    def _read(self) -> KeyTable:
        table = _read(self._path)
        if self._must_be_named and table.nameless:
            raise ValueError("a key has no name, which cache_by_tenant needs; add name=... to each key")
        return table


def _cannot_read(path: Path, error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else error
    return f"cannot read keys from {str(path)!r}: {reason}"


def _version(path: Path) -> tuple[int, ...]:
    """Numbers that change when the file does, or what may be done with it."""
    try:
        status = os.stat(path)
    except OSError:
        return (0,)
    # A pipe can be read but once.
    if not stat.S_ISREG(status.st_mode):
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read(path: Path) -> KeyTable:
    with path.open("rb") as file:
        content = file.read(_LARGEST_FILE + 1)
    if len(content) > _LARGEST_FILE:
        raise ValueError("it is larger than 1 MiB")
    return read_keys(content)
