"""Fixed dimensional encodings beside the MaxSim that they stand for: real queries over their BM25
candidates."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from maxsimd.bench.candidates import Bm25
from maxsimd.bench.datasets import Pair, docstring_pairs
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, Muvera

# How many of MaxSim's best are looked for among how many of the encoding's best.
TOP, AMONG = 10, 100

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Of one query the candidates, by their index, and their MaxSim."""

    indices: Array
    maxsim: Array


async def measure_muvera(
    config: EngineConfig, encodings: Mapping[str, Muvera], queries: int, candidates: int
) -> dict[str, Any]:
    """For each encoding Spearman's rank correlation with MaxSim over a query's candidates, as the mean over
    the queries and their lowest; and the recall of MaxSim's best among the encoding's best."""
    pairs = docstring_pairs()
    draw = np.random.default_rng(0)
    asked = draw.choice(len(pairs), min(queries, len(pairs)), replace=False).tolist()
    async with Engine(config) as engine:
        if engine.model.score_task != "token_embed":
            raise ValueError("this model does not score by late interaction")
        name = engine.model.name
        documents = (
            await engine.embed_tokens(
                [pair.document for pair in pairs], input_type="document", truncation=CUT_LONG
            )
        ).embeddings
        of_queries = (
            await engine.embed_tokens(
                [pairs[i].query for i in asked], input_type="query", truncation=CUT_LONG
            )
        ).embeddings
    exact = _candidates(pairs, asked, of_queries, documents, candidates)
    figures: dict[str, Any] = {
        "model": name,
        "queries": len(asked),
        "candidates": candidates,
        "documents": len(documents),
        "tokens_a_document": round(sum(map(len, documents)) / len(documents), 1),
    }
    for title, encoding in encodings.items():
        started = time.process_time()
        vectors = encoding.encode(documents, "document")
        seconds = time.process_time() - started
        figures[title] = {
            "dimensions": vectors.shape[1],
            **_beside(exact, encoding.encode(of_queries, "query"), vectors),
            "cpu_ms_a_document": round(seconds * 1e3 / len(documents), 3),
        }
    return figures


def _candidates(
    pairs: list[Pair], asked: list[int], queries: list[Array], documents: list[Array], most: int
) -> list[_Candidates]:
    index = Bm25([pair.document for pair in pairs])
    rows = np.concatenate(documents)
    starts = np.cumsum([0, *map(len, documents[:-1])])
    found = []
    for i, query in zip(asked, queries, strict=True):
        maxsim = np.maximum.reduceat(query @ rows.T, starts, axis=1).sum(axis=0)
        best = np.array(index.best(pairs[i].query, most))
        found.append(_Candidates(best, maxsim[best]))
    return found


def _beside(exact: list[_Candidates], queries: Array, documents: Array) -> dict[str, float]:
    correlations, recalls = [], []
    for one, query in zip(exact, queries, strict=True):
        estimate = documents[one.indices] @ query
        correlations.append(float(spearmanr(one.maxsim, estimate).statistic))
        best, among = (set(np.argsort(-scores, kind="stable")[:count].tolist())
                       for scores, count in ((one.maxsim, TOP), (estimate, AMONG)))  # fmt: skip
        recalls.append(len(best & among) / len(best))
    return {
        "spearman": round(float(np.mean(correlations)), 4),
        "lowest_spearman": round(min(correlations), 4),
        f"recall_of_{TOP}_in_{AMONG}": round(float(np.mean(recalls)), 4),
        "lowest_recall": round(min(recalls), 2),
    }
