"""Queries, documents and judgements from files in BEIR's form, or TREC's for judgements.

Source: BEIR (Thakur et al. 2021, arXiv 2104.08663), https://github.com/beir-cellar/beir."""

import json
from collections.abc import Mapping
from pathlib import Path

# Of each query, which documents are judged, and whether they are relevant.
Judgements = Mapping[str, Mapping[str, bool]]


def read_texts(path: str) -> dict[str, str]:
    """Texts by their ids, from a JSON object a line; a title stands before its text. Raises ValueError with
    the number of a line that is none."""
    texts = {}
    for number, line in _lines(path):
        try:
            record = json.loads(line)
            title = record.get("title") or ""
            texts[str(record["_id"])] = f"{title} {record['text']}".strip()
        except (ValueError, KeyError, AttributeError):
            raise ValueError(f'{path}, line {number}: this is no {{"_id": ..., "text": ...}}') from None
    return texts


def read_judgements(path: str) -> Judgements:
    """A query, a document and a number a line, or a query, a word, a document and a number; the first line
    may be a heading. Raises ValueError with the number of a line that is neither."""
    judged: dict[str, dict[str, bool]] = {}
    for number, line in _lines(path):
        fields = line.split()
        try:
            grade = float(fields[-1])
            query, document = (fields[0], fields[-2]) if len(fields) in (3, 4) else fields
        except (ValueError, IndexError):
            if number == 1:
                continue
            raise ValueError(f"{path}, line {number}: this is no query, document and number") from None
        judged.setdefault(query, {})[document] = grade > 0
    return judged


def _lines(path: str) -> list[tuple[int, str]]:
    lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
