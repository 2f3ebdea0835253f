"""The API keys: where they are read from, and whether a request has sent one.

A file of keys is read again when it changes. Kept in memory are digests, which have one length, so that
comparing them takes the same time for every guess.
"""

import hashlib
import hmac
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from maxsimd.api.config import ServerConfig, SetupError

log = logging.getLogger("maxsimd.keys")

# A request looks at the file of keys only if none has done so for this long.
_LOOK_EVERY_SECONDS = 1.0
_LARGEST_FILE = 1024 * 1024


class ApiKeys:
    """The keys that are accepted. Raises SetupError where the file of keys has none or cannot be read."""

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._given = frozenset(_digest(key.strip()) for key in config.api_key)
        self._file = None if config.api_key_file is None else KeyFile(Path(config.api_key_file), clock)

    @property
    def are_asked_for(self) -> bool:
        return bool(self._given) or self._file is not None

    def accept(self, authorization: str) -> bool:
        """Whether an Authorization header is `Bearer KEY` with one of the keys."""
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip())
        # Every key is compared, in constant time, so that timing reveals nothing.
        accepted = self._given if self._file is None else self._given | self._file.digests()
        matches = [hmac.compare_digest(digest, one) for one in accepted]
        return scheme.lower() == "bearer" and any(matches)


class KeyFile:
    """The keys of a file with one a line. When the file changes they are read again; when it then has none,
    or cannot be read, those that were read before stay."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._looked = clock()
        self._version = _version(path)
        try:
            self._digests = _read(path)
        except (OSError, ValueError) as error:
            raise SetupError(
                f"{_cannot_read(path, error)}; give a readable file with one key a line"
            ) from error

    def digests(self) -> frozenset[bytes]:
        if self._clock() - self._looked >= _LOOK_EVERY_SECONDS:
            self._looked = self._clock()
            self._look()
        return self._digests

    def _look(self) -> None:
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._digests = _read(self._path)
        except (OSError, ValueError) as error:
            log.error("%s; the keys read before stay in use", _cannot_read(self._path, error))
        else:
            log.info("the file of keys has changed: %d keys are in it now", len(self._digests))


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


def _read(path: Path) -> frozenset[bytes]:
    with path.open("rb") as file:
        content = file.read(_LARGEST_FILE + 1)
    if len(content) > _LARGEST_FILE:
        raise ValueError("it is larger than 1 MiB")
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    keys = {line.strip() for line in lines if line.strip()}
    if not keys:
        raise ValueError("it holds no key")
    return frozenset(map(_digest, keys))


def _digest(key: str) -> bytes:
    # A header may hold bytes that are no UTF-8; servers hand these over as surrogates.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
