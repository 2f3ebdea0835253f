"""Queries, documents and judgements from files in BEIR's form, or TREC's for judgements.

Source: BEIR (Thakur et al. 2021, arXiv 2104.08663), https://github.com/beir-cellar/beir."""

import json
from collections.abc import Mapping
from pathlib import Path

# Of each query, which documents are judged, and how relevant they are; from 0 down they are not.
Grades = Mapping[str, Mapping[str, float]]
# The same, and whether they are relevant.
Judgements = Mapping[str, Mapping[str, bool]]


def read_texts(path: str) -> dict[str, str]:
    """Texts by their ids, from a JSON object a line, where a title stands before its text, or from an id, a
    tab and a text a line. Raises ValueError with the number of a line that is neither."""
    texts = {}
    for number, line in _lines(path):
        id_, tab, text = line.partition("\t")
        if tab and not line.lstrip().startswith("{"):
            texts[id_.strip()] = text.strip()
            continue
        try:
            record = json.loads(line)
            title = record.get("title") or ""
            texts[str(record["_id"])] = f"{title} {record['text']}".strip()
        except (ValueError, KeyError, AttributeError):
            raise ValueError(f'{path}, line {number}: this is no {{"_id": ..., "text": ...}}') from None
    return texts


def read_judgements(path: str) -> Judgements:
    """What `read_grades` reads; documents with a number above 0 are relevant."""
    return {
        query: {document: grade > 0 for document, grade in grades.items()}
        for query, grades in read_grades(path).items()
    }


def read_grades(path: str) -> Grades:
    """A query, a document and a number a line, or a query, a word, a document and a number; the first line
    may be a heading. Raises ValueError with the number of a line that is neither."""
    judged: dict[str, dict[str, float]] = {}
    for number, line in _lines(path):
        fields = line.split()
        try:
            grade = float(fields[-1])
            query, document = (fields[0], fields[-2]) if len(fields) in (3, 4) else fields
        except (ValueError, IndexError):
            if number == 1:
                continue
            raise ValueError(f"{path}, line {number}: this is no query, document and number") from None
        judged.setdefault(query, {})[document] = grade
    return judged


def read_candidates(path: str) -> dict[str, list[str]]:
    """Of each query its documents, best first, from a run in TREC's form: query, Q0, document, rank, score
    and the run's name. Raises ValueError with the number of a line that is none."""
    found: dict[str, list[tuple[float, str]]] = {}
    for number, line in _lines(path):
        try:
            query, _, document, _, score, _ = line.split()
            found.setdefault(query, []).append((-float(score), document))
        except ValueError:
            raise ValueError(f"{path}, line {number}: this is no line of a run") from None
    return {query: [document for _, document in sorted(each)] for query, each in found.items()}


def _lines(path: str) -> list[tuple[int, str]]:
    lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
