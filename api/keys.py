"""The API keys: where they are read from, and whether a request has sent one."""

import hmac
from pathlib import Path

from maxsimd.api.config import ServerConfig


def read_keys(config: ServerConfig) -> frozenset[str]:
    """All keys that the configuration names. Raises ValueError for a file without any."""
    keys = set(config.api_key)
    if config.api_key_file is not None:
        lines = Path(config.api_key_file).read_text(encoding="utf-8").splitlines()
        keys |= {line.strip() for line in lines if line.strip()}
        if not keys:
            raise ValueError(f"{config.api_key_file} holds no key")
    return frozenset(keys)


def has_valid_key(authorization: str, keys: frozenset[str]) -> bool:
    """Whether an Authorization header is `Bearer KEY` with one of the keys."""
    scheme, _, key = authorization.partition(" ")
    # A header may hold bytes that are no UTF-8; servers hand these over as surrogates.
    given = key.strip().encode("utf-8", "surrogateescape")
    # Every key is compared, in constant time, so that timing reveals nothing.
    matches = [hmac.compare_digest(given, accepted.encode()) for accepted in keys]
    return scheme.lower() == "bearer" and any(matches)
