"""The same pair has the same score, bit for bit, whatever is served beside it, in every precision."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, WINDOW_LONG, Engine, EngineConfig, Truncation
from maxsimd.engine.ops import cpu as kernels
from tests.checkpoints import bi_encoders, cross_encoders, late_interaction
from tests.checkpoints.shared import SharedCheckpoints
from tests.parity.selection import with_default

pytestmark = pytest.mark.skipif(not kernels.is_available(), reason="this processor cannot run our kernels")

QUERY = "How is a file opened and read?"
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
BUILDERS: dict[str, Callable[[Path], str]] = {
    "late-interaction": late_interaction.stanford,
    "cross-encoder": cross_encoders.xlm_roberta,
    "bi-encoder": bi_encoders.bge,
}
READINGS = {"whole": CUT_LONG, "windows": WINDOW_LONG}


@pytest.fixture(scope="module")
def documents(pairs: list[Pair]) -> list[str]:
    texts = [pair.document for pair in pairs]
    return [
        *(text[: 40 + 46 * i] for i, text in enumerate(texts[:20])),
        *texts[40:68],
        *[" ".join(texts[:9])] * 2,
    ]


async def _score(engine: Engine, texts: list[str], reading: Truncation, **options: Any) -> np.ndarray:
    result = await engine.score(QUERY, texts, truncation=reading, **options)
    return np.array(result.scores, dtype=np.float32)


async def _what_changes_bits(
    config: dict[str, Any], documents: list[str], reading: Truncation, budgets: tuple[int | None, ...]
) -> list[str]:
    """The surroundings in which a score has other bits than among all documents in their order."""
    changed: list[str] = []
    expected: np.ndarray | None = None
    for threads, budget in [(2, budgets[0]), (1, budgets[1]), (2, budgets[2])]:
        where = f"{threads} threads, a budget of {budget}"
        async with Engine(EngineConfig(threads=threads, max_batch_tokens=budget, **config)) as engine:
            new = await _score(engine, documents, reading, cache="bypass")
            if expected is None:
                expected = new
            found = {"not cached": new}
            found["first seen"] = await _score(engine, documents, reading)
            found["cached"] = await _score(engine, documents, reading)
            for seed in range(2):
                order = list(range(len(documents)))
                random.Random(seed).shuffle(order)
                shuffled = await _score(engine, [documents[i] for i in order], reading, cache="bypass")
                found[f"order {seed}"] = shuffled[np.argsort(order)]
            alone = [await _score(engine, [text], reading, cache="bypass") for text in documents]
            found["alone"] = np.concatenate(alone)
            found["among others"] = await _among_others(engine, documents, reading)
        changed += [
            f"{what}, {where}: {(scores != expected).sum()} of {len(documents)}"
            for what, scores in found.items()
            if not np.array_equal(scores, expected)
        ]
    assert expected is not None
    assert np.std(expected) > 1e-3, "the checkpoint must tell documents apart, or this test shows nothing"
    return changed


async def _among_others(engine: Engine, documents: list[str], reading: Truncation) -> np.ndarray:
    """The scores while 30 other requests are served, whose documents are run and not found in the cache."""

    def other(i: int) -> Awaitable[Any]:
        texts = documents[i % len(documents) :][: 1 + i % 7]
        return engine.score(f"another question, {i}", texts, truncation=CUT_LONG, cache="bypass")

    own = _score(engine, documents, reading, cache="bypass")
    return (await asyncio.gather(*map(other, range(30)), own))[-1]


CASES = [*itertools.product(BUILDERS, PRECISIONS, READINGS)]
# Every kind and every precision once, and windows in one.
DEFAULT = [
    ("late-interaction", "float32", "whole"), ("late-interaction", "bfloat16", "windows"),
    ("cross-encoder", "bfloat16", "whole"), ("bi-encoder", "int8", "whole"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "precision", "reading"), with_default(CASES, DEFAULT))
async def test_a_pairs_score_depends_on_the_pair_alone(
    kind: str, precision: str, reading: str, checkpoints: SharedCheckpoints, documents: list[str]
) -> None:
    config = {"model": checkpoints(BUILDERS[kind]), **PRECISIONS[precision]}
    assert await _what_changes_bits(config, documents, READINGS[reading], (None, 600, 4096)) == []


# The embedded model is large for a test.
@pytest.mark.parametrize("precision", with_default(PRECISIONS, {"int8"}))
async def test_the_default_model_keeps_bits(precision: str, documents: list[str]) -> None:
    config = PRECISIONS[precision]
    assert await _what_changes_bits(config, documents[::4], CUT_LONG, (None, 300, 4096)) == []


@pytest.mark.parametrize("precision", with_default(["float32", "bfloat16"], {"float32"}))
async def test_chunks_keep_bits(precision: str, documents: list[str], qwen3_reranker: str) -> None:
    config = {"model": qwen3_reranker, **PRECISIONS[precision]}
    assert await _what_changes_bits(config, documents[:24], CUT_LONG, (None, 61, 300)) == []
