"""Rows of a data set that are to be scored, and what comes of them. Nothing of engines or of Ray."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# How many of a row's failed documents its error names.
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """A query and its documents, of whatever types the data set has them in: what is no text becomes an error
    of the row. A `pair` has one document, and then one score instead of a list."""

    query: Any
    documents: Any
    is_pair: bool

    @classmethod
    def of(cls, values: Mapping[str, Any], query: str | None) -> "ScoreRow":
        """The row with these columns, `documents` or `document`; `query` is that of all rows, if they have
        one in common."""
        asked = values.get("query") if query is None else query
        if "documents" in values:
            return cls(asked, values["documents"], is_pair=False)
        if "document" in values:
            return cls(asked, [values["document"]], is_pair=True)
        return cls(asked, None, is_pair=False)

    @property
    def refusal(self) -> str | None:
        """Why none of the documents can be scored, or None."""
        if not isinstance(self.query, str):
            return f"query is no text but {_kind(self.query)}"
        if self.documents is None:
            return "there are no documents"
        if not isinstance(self.documents, Sequence) or isinstance(self.documents, str | bytes):
            return f"documents is no list but {_kind(self.documents)}"
        return None

    @property
    def texts(self) -> dict[int, str]:
        """The documents that are texts, by their indexes."""
        return {i: text for i, text in enumerate(self.documents) if isinstance(text, str)}

    @property
    def not_texts(self) -> dict[int, str]:
        """Why the others have no score, by their indexes."""
        others = [(i, each) for i, each in enumerate(self.documents) if not isinstance(each, str)]
        return {i: f"is no text but {_kind(each)}" for i, each in others}


@dataclass(frozen=True, slots=True)
class RowScores:
    """`scores` in the documents' order, with None for those that have an error; None where there is no list
    of documents. `error` says why some have no score."""

    scores: list[float | None] | None
    error: str | None
    prompt_tokens: int

    @classmethod
    def refused(cls, row: ScoreRow, reason: str) -> "RowScores":
        """None of the row's documents has a score."""
        is_list = isinstance(row.documents, Sequence) and not isinstance(row.documents, str | bytes)
        return cls([None] * len(row.documents) if is_list else None, reason, 0)

    @classmethod
    def of(
        cls, row: ScoreRow, scores: Mapping[int, float], errors: Mapping[int, str], tokens: int
    ) -> "RowScores":
        """From scores and errors by the documents' indexes."""
        return cls([scores.get(i) for i in range(len(row.documents))], _error(row, errors), tokens)

    def columns(self, row: ScoreRow) -> dict[str, Any]:
        """What is written beside the row's own columns, by name."""
        rest = {"error": self.error, "prompt_tokens": self.prompt_tokens}
        if row.is_pair:
            return {"score": None if self.scores is None else self.scores[0], **rest}
        return {"scores": self.scores, **rest}


def _error(row: ScoreRow, errors: Mapping[int, str]) -> str | None:
    if not errors:
        return None
    if row.is_pair:
        return f"document {errors[0]}" if errors[0].startswith("is no text") else errors[0]
    named = [f"documents[{i}]: {errors[i]}" for i in sorted(errors)[:_MOST_NAMED]]
    more = len(errors) - len(named)
    return "; ".join(named) + (f"; and {more} more" if more else "")


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
