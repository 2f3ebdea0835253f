"""Scores pairs with FlagEmbedding, whose authors trained the models. Run by test_authors.py in
environments of their own, so it imports nothing of ours.

Reads one JSON object from standard input: the `checkpoint`, `pairs` of query and document, and `output`,
where scores go by names. Of bge-m3 it has the `weights` of dense, sparse and multi-vector scores, whose names
are FlagEmbedding's. Of the reranker that compresses tokens it has `runs` by their names, which have
`cutoff_layers`, `compress_ratio` and `compress_layers` each.
"""

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

    model, runs = (
        LightWeightFlagLLMReranker(order["checkpoint"], use_fp16=False, devices="cpu"),
        order["runs"],
    )
    return {name: model.compute_score(pairs, batch_size=8, max_length=1024, **runs[name]) for name in runs}


if __name__ == "__main__":
    main()
