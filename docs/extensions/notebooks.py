"""Draws notebooks as pages: their texts, code and stored outputs, as Markdown."""

import json
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx

# Before others change what is written.
_FIRST = 100


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx asks for what this changes."""
    app.add_source_suffix(".ipynb", "markdown")
    app.connect("source-read", _read, priority=_FIRST)
    return {"parallel_read_safe": True}


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    if str(app.env.doc2path(name)).endswith(".ipynb"):
        source[0] = "\n\n".join(_parts(json.loads(source[0])["cells"])) + "\n"


def _parts(cells: list[dict[str, Any]]) -> Iterator[str]:
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield text
        else:
            yield f"```python\n{text}\n```"
            for output in cell["outputs"]:
                yield _output(output, cell["metadata"].get("alt", ""))


def _output(output: dict[str, Any], alt: str) -> str:
    """A picture, else HTML, else text."""
    data = output.get("data", {})
    if "image/png" in data:
        return f"![{alt}](data:image/png;base64,{''.join(data['image/png']).replace(chr(10), '')})"
    if "text/html" in data:
        html = (
            "".join(data["text/html"])
            .replace(' border="1"', "")
            .replace('class="dataframe', 'class="docutils')
        )
        return f'````{{raw}} html\n<div class="table-wrapper" tabindex="0">\n{html}\n</div>\n````'
    return f"```text\n{''.join(data.get('text/plain') or output['text']).rstrip()}\n```"
