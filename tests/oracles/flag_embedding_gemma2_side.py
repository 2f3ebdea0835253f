"""Scores pairs with FlagEmbedding's reranker that compresses tokens, whose authors trained
bge-reranker-v2.5-gemma2-lightweight. Run by test_flag_embedding.py in an environment of its own, with the
transformers that it was written for, so it imports nothing of ours.

Reads one JSON object from standard input: the `checkpoint`, `pairs` of query and document, `runs`, which have
a name, `cutoff_layers`, `compress_ratio` and `compress_layers` each, and `output`, where the scores go by the
names of the runs.
"""

import json
import sys

import numpy as np
from FlagEmbedding import LightWeightFlagLLMReranker


def main() -> None:
    order = json.load(sys.stdin)
    model = LightWeightFlagLLMReranker(order["checkpoint"], use_fp16=False, devices="cpu")
    pairs = [(query, document) for query, document in order["pairs"]]
    scores = {}
    for name, run in order["runs"].items():
        scores[name] = model.compute_score(pairs, batch_size=8, max_length=1024, **run)
    np.savez(order["output"], **{name: np.array(values) for name, values in scores.items()})


if __name__ == "__main__":
    main()
