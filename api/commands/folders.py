"""The documents of a folder: pictures, the pages of PDFs, and texts."""

from collections.abc import Iterator
from pathlib import Path

import click

from maxsimd.api.commands.records import Record
from maxsimd.engine.media import PictureAt, PictureError, pages_of

_PICTURES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"})
_TEXTS = frozenset({".txt", ".md"})


def records_of(folder: Path) -> list[Record]:
    """A record for each picture and text of a folder and those in it, and for each page of its PDFs, by their
    names. Raises click.ClickException for what cannot be read."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not _is_hidden(path, folder))
    records = [record for path in files for record in _of_file(path, str(path.relative_to(folder)))]
    if not records:
        raise click.ClickException(f"there is no picture, PDF or text in {folder}")
    return records


def _of_file(path: Path, name: str) -> Iterator[Record]:
    ending = path.suffix.lower()
    if ending in _PICTURES:
        yield Record(name, name, PictureAt(path))
    elif ending == ".pdf":
        try:
            pages = pages_of(path)
        except ImportError:
            raise click.ClickException(f'{path} needs pypdfium2; pip install "maxsimd[pdf]"') from None
        except PictureError as error:
            raise click.ClickException(f"{path} {error}") from None
        for page in pages:
            label = f"{name} page {page.page + 1}"
            yield Record(label, label, page)
    elif ending in _TEXTS:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise click.ClickException(f"{path} cannot be read: {error}") from error
        if text.strip():
            yield Record(text, name)


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)
