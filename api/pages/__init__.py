"""Pages for browsers. Each is one file, with its style and script inside; no others may run."""

import base64
import gzip
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_FOLDER = files("maxsimd.api.pages")
# The playground's scripts, in order.
_PLAYGROUND = ("elements", "documents", "server", "matches", "results", "heatmap", "live", "sharing", "page")


@dataclass(frozen=True, slots=True)
class Page:
    """A page compressed with gzip, and the policy that lets a browser load only from the page's server."""

    compressed_html: bytes
    policy: str


@cache
def playground() -> Page:
    """Ranks documents and shows why."""
    return _page("playground", scripts=[_text(f"playground/{name}.js") for name in _PLAYGROUND])


@cache
def docs() -> Page:
    """Shows /openapi.json in Swagger UI. The first call takes about 0.1 s."""
    style, script = (
        gzip.decompress((_FOLDER / "swagger-ui" / name).read_bytes()).decode("utf-8")
        for name in ("swagger-ui.css.gz", "swagger-ui-bundle.js.gz")
    )
    return _page("docs", style=style, scripts=[script, _text("docs.js")])


def _text(path: str) -> str:
    return (_FOLDER / path).read_text(encoding="utf-8")


def _page(name: str, scripts: Sequence[str], style: str = "") -> Page:
    """The page of this name, with its scripts as one. A library's `style` comes before its own."""
    style, script = style + _text(f"{name}.css"), "\n".join(scripts)
    whole = _text(f"{name}.html").replace("/*{{style}}*/", style).replace("/*{{script}}*/", script)
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
    return Page(gzip.compress(whole.encode("utf-8"), mtime=0), policy)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
