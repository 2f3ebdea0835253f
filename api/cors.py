"""Which pages may use the server from a browser (CORS): none, unless the configuration names their
origins."""

import re
from collections.abc import Collection, Mapping

from maxsimd.api.answer import Answer

_EXPOSED = "Retry-After, Server-Timing, X-Request-ID, X-Maxsimd-Warnings"
# What a browser may go by without asking again.
_PREFLIGHT_SECONDS = 600
_HEADER_NAMES = re.compile(r"[A-Za-z0-9,\t _-]{1,1000}")


class CrossOrigin:
    """The origins that are allowed, and the headers that tell browsers so."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origin.lower() for origin in origins)

    def headers(self, origin: str | None) -> dict[str, str]:
        """What to add to the answer to a request from a page of `origin`."""
        if not self._origins:
            return {}
        # Caches must not hand the answer for one origin to another.
        added = {} if "*" in self._origins else {"Vary": "Origin"}
        if origin is not None and self._allows(origin):
            added["Access-Control-Allow-Origin"] = "*" if "*" in self._origins else origin
            added["Access-Control-Expose-Headers"] = _EXPOSED
        return added

    def preflight(self, method: str, headers: Mapping[str, str], allowed: Collection[str]) -> Answer | None:
        """The answer to a browser that asks whether it may send a request with one of the `allowed` methods;
        None where `method` and `headers` are no such question of an allowed origin."""
        asked = headers.get("access-control-request-method")
        if method != "OPTIONS" or asked is None or not self._allows(headers.get("origin", "")):
            return None
        answer = {
            "Access-Control-Allow-Methods": ", ".join(sorted(allowed)),
            "Access-Control-Max-Age": str(_PREFLIGHT_SECONDS),
        }
        names = headers.get("access-control-request-headers", "")
        if _HEADER_NAMES.fullmatch(names):
            answer["Access-Control-Allow-Headers"] = names
        return Answer(204, answer)

    def _allows(self, origin: str) -> bool:
        return "*" in self._origins or origin.lower() in self._origins
