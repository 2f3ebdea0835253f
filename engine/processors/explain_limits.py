"""How much one request may have explained, whatever it asks for."""

from collections.abc import Iterable, Sequence
from heapq import nlargest

from maxsimd.engine.errors import RequestTooLargeError

# Lines that one request's explanations may have together, a match or a window each.
MOST_EXPLAINED = 100_000
# Matches that may be noted for all of its documents, in each of their windows; a few bytes each.
MOST_NOTED = 2_000_000
# Numbers in the maps of all of its documents.
MOST_MAPPED = 2_000_000


def check_lines(explain: int, lines: Iterable[int]) -> None:
    """Refuses a request of which `explain` documents may be explained, with this many lines for each of its
    documents, where that might be too much."""
    most = sum(nlargest(explain, lines))
    if most > MOST_EXPLAINED:
        raise RequestTooLargeError(
            f"explain would give up to {most} matches and windows for {explain} results, and at most "
            f"{MOST_EXPLAINED} are given; ask for fewer results (top_n of a ranking), send fewer documents, "
            "or leave explain out"
        )


def check_mapped(numbers: Iterable[int]) -> None:
    """Refuses a request whose maps would have too much, by the `numbers` in those of each document."""
    mapped = sum(numbers)
    if mapped > MOST_MAPPED:
        raise RequestTooLargeError(
            f"explain would map {mapped} similarities for these documents, and at most {MOST_MAPPED} are "
            "mapped; send fewer documents, or explain without maps"
        )


def check_noted(query_rows: Sequence[int], windows: Sequence[int]) -> None:
    """Refuses a request for whose documents too many matches would be noted: each vector of the query in each
    window."""
    noted = sum(rows * count for rows, count in zip(query_rows, windows, strict=True))
    if noted > MOST_NOTED:
        raise RequestTooLargeError(
            f"explain would note {noted} matches for these documents, and at most {MOST_NOTED} are noted; "
            "send fewer documents, or leave explain out"
        )
