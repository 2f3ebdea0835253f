"""Pages for browsers. Each is one file, with its style and script inside; no others may run."""

import base64
import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable


@dataclass(frozen=True, slots=True)
class Page:
    """A page compressed with gzip, and the policy that lets a browser load only from the page's server."""

    compressed_html: bytes
    policy: str


@cache
def playground() -> Page:
    """Ranks documents and shows why."""
    return _page("playground")


@cache
def docs() -> Page:
    """Shows /openapi.json in Swagger UI. The first call takes about 0.1 s."""
    folder = files("maxsimd.api.pages") / "swagger-ui"
    return _page(
        "docs",
        style=_decompressed(folder / "swagger-ui.css.gz"),
        script=_decompressed(folder / "swagger-ui-bundle.js.gz"),
    )


def _decompressed(file: Traversable) -> str:
    return gzip.decompress(file.read_bytes()).decode("utf-8")


def _page(name: str, style: str = "", script: str = "") -> Page:
    """The page of this name. A library's `style` and `script` come before its own."""
    folder = files("maxsimd.api.pages")
    html, own_style, own_script = (
        (folder / f"{name}.{ending}").read_text(encoding="utf-8") for ending in ("html", "css", "js")
    )
    style, script = style + own_style, f"{script}\n{own_script}" if script else own_script
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
    return Page(gzip.compress(whole.encode("utf-8"), mtime=0), policy)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


__all__ = ["Page", "docs", "playground"]
