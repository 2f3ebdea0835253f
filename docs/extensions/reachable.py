"""Has all that scrolls be reached by keyboard, headings say how deep they are, and long tables have a filter,
which Sphinx and its theme leave out."""

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
# A field above each table of more than 20 rows, which hides the rows without all of its words.
_FILTER = """
addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.docutils")) {
    const rows = [...table.tBodies[0].rows];
    if (rows.length <= 20) continue;
    const field = Object.assign(document.createElement("input"), { type: "search" });
    field.placeholder = field.ariaLabel = "Filter this table";
    field.style.cssText = "font: inherit; padding: .3rem .6rem; width: 20rem; max-width: 100%";
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\\s+/);
      const hasAll = (text) => words.every((word) => text.includes(word));
      for (const row of rows) row.hidden = !hasAll(row.textContent.toLowerCase());
    });
    table.closest(".table-wrapper").before(field);
  }
});
"""


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx asks for what this changes."""
    app.connect("html-page-context", _change, priority=_LAST)
    app.add_js_file(None, body=_FILTER)
    return {"parallel_read_safe": True}


def _change(
    app: Sphinx, name: str, template: str, context: dict[str, Any], document: nodes.document | None
) -> None:
    for part, changes in _CHANGES.items():
        for before, after in changes:
            if part in context:
                context[part] = context[part].replace(before, after)
