"""Scores pairs with FlagEmbedding, in environments of its own, for test_authors.py.

Reads one JSON object: the `checkpoint`, `pairs` of query and document, and `output`, the file for scores by
name; for bge-m3 the `weights` of its scores, for the reranker that compresses tokens its `runs` by name."""

import json
import sys
from typing import Any

import numpy as np


def main() -> None:
    order = json.load(sys.stdin)
    pairs = [(query, document) for query, document in order["pairs"]]
    scores = _bge_m3(order, pairs) if "weights" in order else _gemma2(order, pairs)
    np.savez(order["output"], **{name: np.array(values) for name, values in scores.items()})


def _bge_m3(order: dict[str, Any], pairs: list[tuple[str, str]]) -> dict[str, Any]:
    from FlagEmbedding import BGEM3FlagModel

    model = BGEM3FlagModel(order["checkpoint"], use_fp16=False, devices="cpu")
    # One by one: of padded documents its best match is at least 0.
    scores: dict[str, Any] = model.compute_score(
        pairs, batch_size=1, max_query_length=512, max_passage_length=512,
        weights_for_different_modes=order["weights"],
    )  # fmt: skip
    return scores


def _gemma2(order: dict[str, Any], pairs: list[tuple[str, str]]) -> dict[str, Any]:
    from FlagEmbedding import LightWeightFlagLLMReranker

    runs = order["runs"]
    model = LightWeightFlagLLMReranker(order["checkpoint"], use_fp16=False, devices="cpu")
    return {name: model.compute_score(pairs, batch_size=8, max_length=1024, **runs[name]) for name in runs}


if __name__ == "__main__":
    main()
