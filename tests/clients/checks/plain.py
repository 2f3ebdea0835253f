"""Helpers of checks in the environment of each client: texts with an obvious answer, and plain HTTP."""

import json
import math
import os
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
LATE_INTERACTION = os.environ["LATE_INTERACTION_URL"]
BI_ENCODER = os.environ["BI_ENCODER_URL"]
CROSS_ENCODER = os.environ["CROSS_ENCODER_URL"]
TOKEN_CLASSIFIER = os.environ["TOKEN_CLASSIFIER_URL"]
RANKING = (LATE_INTERACTION, BI_ENCODER)
ALL = (*RANKING, CROSS_ENCODER)

QUERY = "How is a file opened for reading?"
# Docstrings of functions of Python's standard library.
DOCUMENTS = (
    "Return the arc cosine, measured in radians, of x. The result is between 0 and pi.",
    "Sort the list in ascending order and return None. The sort is in place and stable.",
    "Open file and return a stream. The file is opened for reading in text mode by default.",
    "Suspend execution of the calling thread for the given number of seconds.",
    "Return a list of the words in the string, using the separator as the delimiter.",
)
BEST = 2


def post(url: str, path: str, body: Any) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def check_vectors(
    vectors: Sequence[Any], texts: Sequence[str], input_type: str | None = None, dimensions: int | None = None
) -> None:
    """They are those that /v1/embeddings gives of these texts."""
    body = {"input": list(texts), "input_type": input_type, "dimensions": dimensions}
    plain = [each["embedding"] for each in post(BI_ENCODER, "/v1/embeddings", body)["data"]]
    assert len(vectors) == len(plain), f"{len(vectors)} vectors of {len(plain)} texts"
    for given, expected in zip(vectors, plain, strict=True):
        assert len(given) == len(expected), f"{len(given)} numbers and not {len(expected)}"
        assert cosine(given, expected) > 0.999, f"a cosine of {cosine(given, expected)} with the plain vector"


def check_ranking(url: str, ranking: Sequence[tuple[int, float]], top: int = len(DOCUMENTS)) -> None:
    """Indices of DOCUMENTS with scores are those that /rerank gives, and the best is the obvious one."""
    plain = post(url, "/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": top})["results"]
    expected = [(each["index"], each["relevance_score"]) for each in plain]
    assert [index for index, _ in ranking] == [index for index, _ in expected], f"{ranking} is not {expected}"
    for (_, score), (_, right) in zip(ranking, expected, strict=True):
        assert math.isclose(score, right, rel_tol=1e-3, abs_tol=1e-4), f"{ranking} is not {expected}"
    if url != CROSS_ENCODER:
        assert ranking[0][0] == BEST, f"{ranking} does not begin with {BEST}"


def for_each(cases: Mapping[str, T], check: Callable[[T], None]) -> None:
    """Checks each case; an error names the one that it is of."""
    for name, case in cases.items():
        try:
            check(case)
        except Exception as error:
            error.add_note(f"as {name} does")
            raise


def error_of(kind: type[Exception], call: Callable[[], Any]) -> Any:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"there is no {kind.__name__}")


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product / math.sqrt(sum(a * a for a in one) * sum(b * b for b in other))
