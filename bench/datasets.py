"""Texts to send: random words of given lengths, or real English with known answers."""

import importlib
import inspect
import math
import random
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

# Words that nearly every tokenizer keeps whole, so that a number of words is a number of tokens.
_WORDS = tuple(
    """the of and to in is was for on that with he as it his at by from are this be an had not which but have
    one you were her all she there would their we him been has when who will no more if out so said what up
    its about into than them can only other new some could time these two may then do first any my now such
    """.split()  # noqa: SIM905
)

# Modules that do something visible when imported.
_NOT_IMPORTED = {"antigravity", "this", "idlelib", "turtle", "turtledemo", "tkinter", "lib2to3"}

# A query for which no answer is known.
QUERY = "how is a file opened for reading"


@dataclass(frozen=True, slots=True)
class Request:
    """One call: a query, or one for each document. `answer` is the index of the document that belongs to the
    query, if one is known."""

    query: str | list[str]
    documents: list[str]
    answer: int | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    query: str
    document: str


def mixed_counts(mix: str, count: int, seed: int) -> list[int]:
    """Numbers of documents for `count` requests by a mix such as "20:0.9,500:0.1" (documents:share, ...).

    Raises ValueError for a mix that cannot be read or whose shares do not add up to 1."""
    parts = [part.split(":") for part in mix.split(",")]
    if any(len(part) != 2 for part in parts):
        raise ValueError(f"a mix is written as documents:share,documents:share and not {mix!r}")
    numbers, shares = [int(number) for number, _ in parts], [float(share) for _, share in parts]
    if abs(sum(shares) - 1) > 1e-6 or min(numbers) < 1:
        raise ValueError(f"the shares of {mix!r} must add up to 1, of at least one document each")
    return random.Random(seed).choices(numbers, shares, k=count)


def random_requests(
    count: int, documents: int | list[int], input_len: int, range_ratio: float, shared_query: bool, seed: int
) -> list[Request]:
    """Random words, `input_len` tokens a pair, half of them in the query, as vLLM's random-rerank has it.

    `documents` is how many each request has, or a list of that for each. Lengths vary by +-`range_ratio`.
    Each request has a query of its own unless `shared_query`, which gives the whole run a single one.
    """
    draw = random.Random(seed)

    def words(length: int) -> str:
        spread = int(length * range_ratio)
        return " ".join(draw.choices(_WORDS, k=max(1, draw.randint(length - spread, length + spread))))

    query_len = max(1, input_len // 2 - 1)
    document_len = max(1, input_len - query_len - 1)
    shared = words(query_len)
    return [
        Request(shared if shared_query else words(query_len), [words(document_len) for _ in range(number)])
        for number in (documents if isinstance(documents, list) else [documents] * count)
    ]


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


def docstring_requests(count: int, documents: int, seed: int) -> list[Request]:
    """Known-item ranking: each query has its own document among those that BM25 finds for it, shuffled."""
    pairs = docstring_pairs()
    index = Bm25([pair.document for pair in pairs])
    draw = random.Random(seed)
    requests = []
    for own in (draw.sample if count <= len(pairs) else draw.choices)(range(len(pairs)), k=count):
        found = [i for i in index.best(pairs[own].query, documents) if i != own][: documents - 1]
        candidates = [own, *found]
        draw.shuffle(candidates)
        texts = [pairs[i].document for i in candidates]
        requests.append(Request(pairs[own].query, texts, candidates.index(own)))
    return requests


def docstring_pairs(max_characters: int = 4000) -> list[Pair]:
    """Real English from the standard library of the running interpreter: the first sentence of a docstring
    as the query, the rest of it as the document. In a fixed order, without repetitions."""
    seen: set[str] = set()
    pairs = []
    for docstring in _docstrings():
        sentence, rest = _split_first_sentence(docstring)
        if len(sentence.split()) < 4 or len(rest.split()) < 25 or sentence in seen or rest in seen:
            continue
        seen |= {sentence, rest}
        pairs.append(Pair(sentence[:300], rest[:max_characters]))
    return pairs


def numbered_documents(count: int) -> list[str]:
    """`count` different documents: those of `docstring_pairs`, repeated with numbers."""
    texts = [pair.document for pair in docstring_pairs()]
    return [f"{i // len(texts)} {texts[i % len(texts)]}" for i in range(count)]


def _split_first_sentence(text: str) -> tuple[str, str]:
    match = re.search(r"[.!?](\s|$)|\n\s*\n", text)
    if match is None:
        return text, ""
    return " ".join(text[: match.start() + 1].split()), text[match.end() :].strip()


def _docstrings() -> Iterator[str]:
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in _NOT_IMPORTED:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(name)
        except Exception:
            continue
        for _, thing in sorted(vars(module).items()):
            if getattr(thing, "__module__", None) != name or not (inspect.isclass(thing) or callable(thing)):
                continue
            members = [thing]
            if inspect.isclass(thing):
                members += [member for _, member in sorted(vars(thing).items()) if inspect.isfunction(member)]
            for member in members:
                text = getattr(member, "__doc__", None)
                if isinstance(text, str):
                    yield inspect.cleandoc(text)
