"""Docstrings drawn as pages, in several fonts and layouts: documents whose content is known, for models that
read pictures."""

import random
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxsimd.bench.datasets import Pair

# Widths and heights of pages in pixels: A4 standing and lying at 72 an inch, a square, a slide.
_SIZES = ((595, 842), (842, 595), (640, 640), (960, 540))
_FONTS = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "DejaVuSans-Bold", "STIXGeneral")
_MARGIN = 40


def draw_pages(pairs: Sequence[Pair], seed: int) -> list[Any]:
    """A page of Pillow's for the document of each pair, white with black text: in one column or two, in one
    of several fonts and sizes, with or without a heading and a rule. What does not fit is left out."""
    chosen = random.Random(seed)
    return [_page(pair.document, chosen) for pair in pairs]


def _page(text: str, chosen: random.Random) -> Any:
    from PIL import Image, ImageDraw

    width, height = chosen.choice(_SIZES)
    name, size, columns = chosen.choice(_FONTS), chosen.choice((13, 15, 18)), chosen.choice((1, 1, 2))
    page = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(page)
    top = _MARGIN
    if chosen.random() < 0.5:
        heading, _, text = text.partition("\n")
        pen.text((_MARGIN, top), heading[:60], fill="black", font=_font("DejaVuSans-Bold", size + 6))
        top += size + 18
        pen.line((_MARGIN, top - 6, width - _MARGIN, top - 6), fill="gray", width=2)
    font = _font(name, size)
    column = (width - _MARGIN * (columns + 1)) // columns
    characters = max(10, int(column / pen.textlength("n", font=font)))
    lines = [line for part in text.splitlines() for line in textwrap.wrap(part, characters) or [""]]
    in_column = (height - top - _MARGIN) // (size + 5)
    for number, line in enumerate(lines[: in_column * columns]):
        at, row = divmod(number, in_column)
        pen.text((_MARGIN + at * (column + _MARGIN), top + row * (size + 5)), line, fill="black", font=font)
    return page


def _font(name: str, size: int) -> Any:
    """A font that comes with matplotlib, in pixels."""
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf", size)
