"""Puts what comes from code into the reference: the routes, Swagger UI as openapi.html, and the options."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from option_tables import markdown_tables
from sphinx.application import Sphinx

from maxsimd.api import pages
from maxsimd.api.handlers.handle import description

_LINKS = '<a href="./">Playground</a> <a href="openapi.json">openapi.json</a>'
_PLACE = '<div id="routes">'


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx asks for what this changes."""
    app.connect("source-read", _read)
    app.connect("build-finished", _write_page)
    return {"parallel_read_safe": True}


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    """Puts what is generated behind what is written."""
    if name == "reference/http":
        source[0] += "\n" + "\n".join(_routes(json.loads(description())))
    elif name == "reference/options":
        source[0] += "\n" + markdown_tables()


def _routes(described: dict[str, Any]) -> Iterator[str]:
    """A table for each group of routes, with links to openapi.html."""
    for group in described["tags"]:
        yield f"\n## {group['name']}\n\n{group['description']}\n\n| route | what it does |\n| --- | --- |"
        for path, methods in described["paths"].items():
            for method, operation in methods.items():
                if group["name"] in operation["tags"]:
                    link = f'<a href="openapi.html#{quote(path)}"><code>{method.upper()} {path}</code></a>'
                    yield f"| {link} | {operation['summary']} |"


def _write_page(app: Sphinx, error: Exception | None) -> None:
    """Writes the page that a server has on /docs, with the description inside."""
    if error is not None or app.builder.format != "html":
        return
    page = gzip.decompress(pages.docs().compressed_html).decode()
    assert _LINKS in page
    assert _PLACE in page
    inside = description().decode().replace("</", "<\\/")
    page = page.replace(_LINKS, '<a href="http.html">HTTP reference</a>')
    page = page.replace(_PLACE, f'<script type="application/json" id="description">{inside}</script>{_PLACE}')
    (Path(app.outdir) / "reference" / "openapi.html").write_text(page, encoding="utf-8")
