"""How well a model that reads pictures finds a page by its first sentence."""

import re

from maxsimd.bench.datasets import Pair, docstring_pairs
from maxsimd.bench.drawn_pages import draw_pages
from maxsimd.engine import Engine, EngineConfig

_SENTENCE = re.compile(r"(?<=[.!?])\s")


async def measure_page_ranking(config: EngineConfig, pages: int, queries: int) -> dict[str, float]:
    """Mean reciprocal rank, and how often the page comes first, of `queries` against all pages."""
    pairs = [pair for pair in docstring_pairs() if len(_SENTENCE.split(pair.document, 1)) == 2][:pages]
    drawn = draw_pages(pairs, seed=0)
    ranks = []
    async with Engine(config) as engine:
        for number, pair in enumerate(pairs[:queries]):
            scores = (await engine.score(_first_sentence(pair), drawn)).scores
            ranks.append(1 + sum(score > scores[number] for score in scores))
    return {
        "pages": float(len(drawn)),
        "queries": float(len(ranks)),
        "mrr": round(sum(1 / rank for rank in ranks) / len(ranks), 4),
        "first": round(sum(rank == 1 for rank in ranks) / len(ranks), 4),
        "by_chance": round(sum(1 / rank for rank in range(1, len(drawn) + 1)) / len(drawn), 4),
    }


def _first_sentence(pair: Pair) -> str:
    return " ".join(_SENTENCE.split(pair.document, 1)[0].split())
