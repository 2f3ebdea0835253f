"""Cached documents of one query on their way to the launch: from the slab, and copied each time."""

import statistics
import time

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.cache import CachedEmbedding, EmbeddingCache
from maxsimd.engine.cache.memory import MemoryStore
from maxsimd.engine.cache.slab import EmbeddingSlab
from maxsimd.engine.processors.dual_encoder import IN_SLAB, ON_HOST, BatchLimits, in_batches
from maxsimd.engine.scoring.maxsim_triton import bounds_of
from maxsimd.engine.scoring.scorer import CachedDocument, DocumentScorer, ScoringPrice, StepOutcome
from maxsimd.pooling.ragged import Ragged, Spans, to_device
from maxsimd.scheduler import ResultSlot, Tokens, TokenSequence

_QUERY, _QUERY_TOKENS, _REQUEST = 1, 32, 7
# Batches that a step scores together.
_TOGETHER = 4


def measure_slab(documents: int, tokens: int, dim: int, rounds: int) -> dict[str, float]:
    """Medians of `rounds` turns, in bfloat16, of what the host does before it launches MaxSim, which nothing
    stands for: its scores are zeros. Then of what it does with the scores. Runs on a GPU where there is one,
    else what would be copied to it is copied in memory."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = torch.randn(tokens, dim).bfloat16()
    draw = np.random.default_rng(0)
    found = [
        CachedDocument(ResultSlot(_REQUEST, i), CachedEmbedding(rows, None, tokens, False, draw.bytes(32)))
        for i in range(documents)
    ]
    slab = EmbeddingSlab(2 * documents * tokens, dim, torch.bfloat16, device)
    figures: dict[str, float] = {"documents": documents, "tokens": tokens, "dim": dim}
    for name, limits, used in (("copied", ON_HOST, None), ("in_slab", IN_SLAB, slab)):
        launch, results = _timed(found, limits, used, device, rounds)
        figures |= {f"{name}_launch_ms": _ms(launch[1:]), f"{name}_results_ms": _ms(results[1:])}
        if used is not None:
            figures["copied_into_slab_ms"] = _ms(launch[:1])
    return figures


def _timed(
    found: list[CachedDocument],
    limits: BatchLimits,
    slab: EmbeddingSlab | None,
    device: torch.device,
    rounds: int,
) -> tuple[list[float], list[float]]:
    """Seconds until all is launched, and of making results, turn by turn."""
    cache = EmbeddingCache(b"", "bfloat16", MemoryStore(1), None)
    cache.slab = slab
    scorer = DocumentScorer(
        "maxsim", _zeros, device, torch.bfloat16, takes_int8=True, maxsim_spans=_zeros_of_spans, cache=cache
    )
    query = TokenSequence.query(_QUERY, _REQUEST, "token_embed", Tokens(np.zeros(3, dtype=np.int32)), 1 << 30)
    embedding = torch.randn(_QUERY_TOKENS, found[0].embedding.rows.shape[1]).bfloat16()
    scorer.queries.put(query, embedding.to(device))
    batches = list(in_batches(found, _QUERY, _QUERY_TOKENS, ScoringPrice(_QUERY_TOKENS), limits=limits))
    steps = [batches[i : i + _TOGETHER] for i in range(0, len(batches), _TOGETHER)]
    launch, results = [], []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        with torch.inference_mode():
            made = [scorer.score([], [], step) for step in steps]
        launch.append(time.perf_counter() - started)
        for one in made:
            numbers = torch.cat([output.items.values.reshape(-1) for output in one.outputs]).cpu()
            started = time.perf_counter()
            StepOutcome(tuple(one.outputs), numbers, (), one.releases, (), None).results()
            results.append(time.perf_counter() - started)
    cache.close()
    per_turn = [sum(results[i : i + len(steps)]) for i in range(0, len(results), len(steps))]
    return launch, per_turn


def _zeros(queries: Ragged, documents: Ragged, pairs: NDArray[np.int64]) -> torch.Tensor:
    return _zeros_of_spans(queries, Spans.of(documents), pairs)


def _zeros_of_spans(queries: Ragged, documents: Spans, pairs: NDArray[np.int64]) -> torch.Tensor:
    """Takes to the device what MaxSim by Triton takes there."""
    to_device(bounds_of(queries, documents, pairs).reshape(-1), documents.values.device)
    return torch.zeros(len(pairs), device=documents.values.device)


def _ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 2)
