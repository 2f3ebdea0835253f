"""Tables and heat maps of results, for notebooks and terminals. Libraries are imported when one is drawn."""

import html
import unicodedata
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

# Longer tables and texts are shortened.
_MOST_ROWS = 50
_MOST_CHARACTERS = 200
# Labels on an axis of a heat map: of more tokens, only some are named.
_MOST_LABELS = 80
# Inches of a heat map: each token, labels and colors beside them, and the most of the map itself.
_INCHES_A_TOKEN, _INCHES_BESIDE, _MOST_INCHES = 0.26, 2.0, 18.0


def library(name: str, caller: str) -> Any:
    """Imports an optional library. Raises ImportError that says how to install it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        if error.name != top:
            raise
        raise ImportError(
            f"{caller} needs {top}, which is not installed: pip install {top}", name=top
        ) from None


def printable(text: str) -> str:
    """Drops control characters, and replaces halves of characters."""
    whole = text.encode("utf-8", "replace").decode("utf-8")
    return "".join([each for each in whole if unicodedata.category(each) != "Cc"])


def _cell(text: str) -> str:
    """One line of a text, shortened."""
    line = printable(" ".join(text[: 4 * _MOST_CHARACTERS].split()))
    return line if len(line) <= _MOST_CHARACTERS else line[: _MOST_CHARACTERS - 1] + "…"


def _row(tag: str, cells: Sequence[str]) -> str:
    """A row of HTML, whose last cell is text."""
    sides = [*["right"] * (len(cells) - 1), "left"]
    shown = zip(sides, map(html.escape, cells), strict=True)
    filled = [f'<{tag} style="text-align: {side}">{cell}</{tag}>' for side, cell in shown]
    return f"<tr>{''.join(filled)}</tr>"


class TextTable:
    """A table of numbers, whose last column is text. The caption below tells how many rows are left out."""

    def __init__(self, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], caption: str) -> None:
        left_out = len(rows) - _MOST_ROWS
        notes = [f"{left_out:,} more rows"] if left_out > 0 else []
        self.columns = columns
        self.rows = [(*row[:-1], _cell(row[-1])) for row in rows[:_MOST_ROWS]]
        self.caption = "; ".join([*notes, *([caption] if caption else [])])

    def as_html(self) -> str:
        """The table for a notebook, all texts escaped."""
        head = _row("th", self.columns)
        body = "".join([_row("td", row) for row in self.rows])
        below = f"<p>{html.escape(self.caption)}</p>" if self.caption else ""
        return f'<table class="dataframe"><thead>{head}</thead><tbody>{body}</tbody></table>{below}'

    def as_rich(self) -> "Table":
        """The table for a terminal. Texts are no markup."""
        from rich.table import Table
        from rich.text import Text

        made = Table(caption=Text(self.caption) if self.caption else None)
        for name in self.columns:
            made.add_column(name, justify="left" if name == self.columns[-1] else "right")
        for row in self.rows:
            made.add_row(*map(Text, row))
        return made


def heat_map(
    similarities: NDArray[np.float32],
    query_tokens: Sequence[str],
    document_tokens: Sequence[str],
    title: str,
    ax: "Axes | None",
) -> "Axes":
    """Draws similarities [query tokens, document tokens], with a dot on the best of each row. Without `ax`
    a new figure is made, as large as there are tokens."""
    if ax is None:
        pyplot = library("matplotlib.pyplot", "plot()")
        height, width = (
            min(_MOST_INCHES, _INCHES_A_TOKEN * tokens) + _INCHES_BESIDE for tokens in similarities.shape
        )
        _, ax = pyplot.subplots(figsize=(width, height), layout="constrained")
    assert ax is not None
    image = ax.imshow(similarities, aspect="auto", interpolation="nearest", cmap="viridis")
    for tokens, set_ticks, angle in (
        (document_tokens, ax.set_xticks, 90),
        (query_tokens, ax.set_yticks, 0),
    ):
        at = range(0, len(tokens), 1 + (len(tokens) - 1) // _MOST_LABELS)
        labels = [_cell(tokens[i])[:24] for i in at]
        set_ticks(at, labels, parse_math=False, rotation=angle)
    best = similarities.argmax(axis=1)
    ax.scatter(best, range(len(best)), s=16, color="white", edgecolors="black", linewidths=0.6)
    ax.set(xlabel="document", ylabel="query")
    ax.set_title(title, parse_math=False)
    ax.figure.colorbar(image, ax=ax, label="similarity")
    return ax
