"""Selection of the cases that `make test` runs; `make test-all` runs all of them."""

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pytest

from tests.parity.families import Family


def with_default(cases: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """Parameters of which all but the `default` ones are exhaustive; tuples are spread over arguments."""
    params = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        name = getattr(case, "__name__", None)
        params.append(pytest.param(*values, id=name, marks=() if case in default else pytest.mark.exhaustive))
    return params


def with_names(cases: Iterable[Any]) -> list[Any]:
    """Parameters that go by their names, of which some say that they are exhaustive."""
    marks: Any = {True: pytest.mark.exhaustive, False: ()}
    return [pytest.param(each, id=each.name, marks=marks[each.exhaustive]) for each in cases]


# One family of each structure, loader and way to score.
MAIN = {
    *("ColBERT", "GTE-ModernColBERT", "jina-colbert-v2", "LFM2-ColBERT"),
    *("native multi-vector, token pooling", "BERT", "XLM-RoBERTa", "gte-multilingual-reranker"),
    *("jina-reranker-v2", "Qwen3-Reranker", "monoT5", "Qwen3-Embedding", "EmbeddingGemma"),
    *("nomic-embed-text-v2-moe", "SPLADE", "gte-multilingual, sparse", "bge-m3, all three"),
    # Weights in forms of their own. test_readings.py and test_variants.py have others of both.
    *("Qwen3-Embedding, Q8_0", "compressed-tensors, w4a16"),
}


def families(every: Iterable[Family], default: Collection[str] | None = None) -> pytest.MarkDecorator:
    """The argument `family`. By default those named are run, or the main ones."""
    params = []
    for family in every:
        is_default = family.name in (MAIN if default is None else default)
        marks = () if is_default else pytest.mark.exhaustive
        params.append(pytest.param(family, id=f"{family.kind}: {family.name}", marks=marks))
    return pytest.mark.parametrize("family", params)


def rank_alike(exact: np.ndarray, rounded: np.ndarray, unit: float) -> None:
    """Scores that lie further apart than the rounding of a number as large as the largest, by `unit` of it
    each, have the same order. A unit is some roundings to bfloat16, each of up to 2^-9. Probabilities are
    rounded as logits, and change by at most a quarter of what these do."""
    largest = np.abs(exact).max()
    if exact.min() > 0 and exact.max() < 1:
        largest = max(largest, np.abs(np.log(exact / (1 - exact))).max() / 4)
    apart = exact[:, None] - exact > 2 * unit * largest
    assert apart.any()
    assert (rounded[:, None] - rounded)[apart].min() > 0
