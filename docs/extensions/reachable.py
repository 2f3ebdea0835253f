"""Has all that scrolls be reached by keyboard, and headings say how deep they are, which Sphinx and its theme
leave out."""

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

# After the theme has made what is changed here.
_LAST = 900
_CHANGES = {
    "body": (
        ('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper'),
        ('<div class="highlight"><pre>', '<div class="highlight"><pre tabindex="0">'),
    ),
    "furo_navigation_tree": (('role="heading"', 'role="heading" aria-level="2"'),),
}


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx asks for what this changes."""
    app.connect("html-page-context", _change, priority=_LAST)
    return {"parallel_read_safe": True}


def _change(
    app: Sphinx, name: str, template: str, context: dict[str, Any], document: nodes.document | None
) -> None:
    for part, changes in _CHANGES.items():
        for before, after in changes:
            if part in context:
                context[part] = context[part].replace(before, after)
