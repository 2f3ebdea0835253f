"""Scores pairs with FlagEmbedding, whose authors trained bge-m3. Run by test_flag_embedding.py in an
environment of its own, so it imports nothing of ours.

Reads one JSON object from standard input: the `checkpoint`, `pairs` of query and document, the `weights` of
dense, sparse and multi-vector scores, and `output`, where the scores go by FlagEmbedding's names for them.
"""

import json
import sys

import numpy as np
from FlagEmbedding import BGEM3FlagModel


def main() -> None:
    order = json.load(sys.stdin)
    model = BGEM3FlagModel(order["checkpoint"], use_fp16=False, devices="cpu")
    # One by one: of padded documents its best match is at least 0.
    scores = model.compute_score(
        [(query, document) for query, document in order["pairs"]],
        batch_size=1,
        max_query_length=512,
        max_passage_length=512,
        weights_for_different_modes=order["weights"],
    )
    np.savez(order["output"], **{name: np.array(values) for name, values in scores.items()})


if __name__ == "__main__":
    main()
