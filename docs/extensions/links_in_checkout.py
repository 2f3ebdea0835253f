"""Has pages that lie beside docs/ (SECURITY.md and the like) be part of the documentation.

They are written for a checkout, so that their links lead into docs/ or out of it; here docs/ is the root."""

import re
from pathlib import Path

from sphinx.application import Sphinx

_ROOT = Path(__file__).parents[2]
# Pages of the documentation that are files of the checkout, by name.
_TAKEN = {
    "project/security": "SECURITY.md",
    "project/contributing": "CONTRIBUTING.md",
    "project/changes": "CHANGELOG.md",
    "project/peers": "bench/results/peers-cpu.md",
    "project/peer-shapes": "bench/results/peer-shapes-cpu.md",
}


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx asks for what this changes."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    depth = "../" * name.count("/")
    if name in _TAKEN:
        text = (_ROOT / _TAKEN[name]).read_text(encoding="utf-8")
        source[0] = _to_taken(re.sub(r"\]\((?:\.\./)*docs/", f"]({depth}", text), depth)
        return
    source[0] = _to_taken(source[0], depth)


def _to_taken(text: str, depth: str) -> str:
    """Leads links to files of the checkout to the pages that have them."""
    for page, path in _TAKEN.items():
        text = re.sub(rf"\]\((?:\.\./)*{re.escape(path)}", f"]({depth}{page}.md", text)
    return text
