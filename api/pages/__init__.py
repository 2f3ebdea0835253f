"""Pages for browsers. Each is one file, with its style and script inside; no others may run."""

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Page:
    """A page, and the policy that lets a browser load only from the page's server."""

    html: bytes
    policy: str


@cache
def playground() -> Page:
    """Ranks documents and shows why."""
    return _page("playground")


@cache
def reference() -> Page:
    """The routes and their fields, drawn from /openapi.json."""
    return _page("reference")


def _page(name: str) -> Page:
    folder = files("maxsimd.api.pages")
    html, style, script = (
        (folder / f"{name}.{ending}").read_text(encoding="utf-8") for ending in ("html", "css", "js")
    )
    whole = html.replace("/*{{style}}*/", style).replace("/*{{script}}*/", script)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src 'sha256-{_digest(script)}'",
            f"style-src 'sha256-{_digest(style)}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return Page(whole.encode("utf-8"), policy)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


__all__ = ["Page", "playground", "reference"]
