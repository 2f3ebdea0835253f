"""Candidates for ranking as a first retrieval stage would hand them on: the best documents by BM25."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

_K1, _B = 1.2, 0.75


class Bm25:
    """An index of documents by Okapi BM25 (Robertson & Zaragoza 2009) over lower-cased words."""

    def __init__(self, documents: Sequence[str]) -> None:
        counts = [Counter(_words(document)) for document in documents]
        lengths = np.array([sum(count.values()) for count in counts])
        self._size = len(documents)
        self._norm = _K1 * (1 - _B + _B * lengths / lengths.mean())
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for i, count in enumerate(counts):
            for word, times in count.items():
                self._postings[word].append((i, times))

    def best(self, query: str, count: int) -> list[int]:
        """The `count` best documents for a query, best first, ties by index."""
        scores = np.zeros(self._size)
        for word in sorted(set(_words(query))):
            postings = self._postings.get(word, [])
            weight = math.log(1 + (self._size - len(postings) + 0.5) / (len(postings) + 0.5))
            for i, times in postings:
                scores[i] += weight * times * (_K1 + 1) / (times + self._norm[i])
        return [int(i) for i in np.argsort(-scores, kind="stable")[:count]]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
