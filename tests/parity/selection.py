"""Which of many cases `make test` runs; `make test-all` runs all of them."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from tests.parity.families import Family


def with_default(cases: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """Parameters of which all but the `default` ones are marked exhaustive. A case that is a tuple is spread
    over as many arguments; a function goes by its name."""
    params = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        name = getattr(case, "__name__", None)
        params.append(pytest.param(*values, id=name, marks=() if case in default else pytest.mark.exhaustive))
    return params


def family_id(family: Family) -> str:
    return f"{family.kind}: {family.name}"


# Families that another one stands for: the same structure, read from the same kind of files. Those of BERT
# and of colbertv2.0 are compared in test_cross_encoder.py and test_late_interaction.py.
ALIKE = {
    *("ColBERT", "ColBERT, attended expansion", "LateOn", "MiniLM", "BGE", "GTE", "bge-m3, dense"),
    *("BERT", "RoBERTa", "DistilBERT", "jina-reranker-v1", "Qwen2", "Llama", "Gemma"),
    *("Llama Nemotron Embed", "jina-embeddings-v5-text-nano", "T5 1.1"),
    *("gte-base-en-v1.5", "snowflake-arctic-embed-m-v2.0"),
    *("jina-embeddings-v2", "JinaBERT with ReLU"),
    *("SPLADE, heaviest words", "SPLADE over ModernBERT", "SPLADE over XLM-RoBERTa"),
}


def families(every: Iterable[Family], default: Collection[str] | None = None) -> pytest.MarkDecorator:
    """The argument `family`. By default those named are run, or those that no other one stands for."""
    params = []
    for family in every:
        is_default = family.name not in ALIKE if default is None else family.name in default
        marks = () if is_default else pytest.mark.exhaustive
        params.append(pytest.param(family, id=family_id(family), marks=marks))
    return pytest.mark.parametrize("family", params)
