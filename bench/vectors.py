"""Documents that come as their vectors: scored in Python and over HTTP, beside the package maxsim-cpu, and
ranked beside their texts."""

import asyncio
import base64
import importlib
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau

from maxsimd.bench.datasets import QUERY, docstring_pairs
from maxsimd.bench.peers.checkpoints import save_colbert
from maxsimd.bench.peers.systems import maxsimd
from maxsimd.engine import Engine

PEER = "maxsim-cpu"
_DIM, _QUERY_TOKENS = 128, 32
# Documents whose ranking by their vectors is compared with that by their texts.
_RANKED = 100
Array = NDArray[Any]


async def measure_vectors(documents: int, tokens: int, rounds: int) -> dict[str, Any]:
    """A ColBERT of 128 dimensions. Medians of `rounds` turns; maxsim-cpu takes float32 only, and is left out
    where it is not installed."""
    draw = np.random.default_rng(0)
    query = _unit(draw.standard_normal((_QUERY_TOKENS, _DIM), dtype=np.float32))
    whole = [_unit(draw.standard_normal((tokens, _DIM), dtype=np.float32)) for _ in range(documents)]
    halves = [rows.astype(np.float16) for rows in whole]
    body = _body(query, halves)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_colbert(Path(folder, "colbert"))
        async with (
            Engine(checkpoint) as engine,
            maxsimd("maxsimd").run(checkpoint, Path(folder, "log")) as running,
        ):
            ways: dict[str, Callable[[], Awaitable[Array]]] = {
                "python_float16": lambda: _scored(engine, query, halves),
                "python_float32": lambda: _scored(engine, query, whole),
                "http_float16": lambda: _posted(running.session, body),
            }
            if (peer := _peer(query, whole)) is not None:
                ways[PEER] = peer
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            scores: dict[str, Array] = {}
            for turn in range(rounds + 1):
                for name, way in ways.items():
                    started = time.perf_counter()
                    scores[name] = await way()
                    if turn:  # the first warms up
                        seconds[name].append(time.perf_counter() - started)
            ranking = await _beside_texts(engine)
    exact = np.array([(query @ rows.T).max(axis=1).sum() for rows in whole])
    figures: dict[str, Any] = {"documents": documents, "tokens": tokens, "body_mb": round(len(body) / 1e6, 1)}
    for name in ways:
        figures[f"{name}_ms"] = round(statistics.median(seconds[name]) * 1e3, 1)
        figures[f"{name}_largest_error"] = round(float(np.abs(scores[name] - exact).max()), 5)
    figures["http_more_ms"] = round(figures["http_float16_ms"] - figures["python_float16_ms"], 1)
    if PEER in ways:
        for name in ("python_float16", "python_float32"):
            by_turn = (theirs / ours for theirs, ours in zip(seconds[PEER], seconds[name], strict=True))
            figures[f"{PEER}_over_{name}"] = round(statistics.median(by_turn), 2)
    return figures | ranking


async def _beside_texts(engine: Engine) -> dict[str, Any]:
    """Real texts, ranked as such and by their vectors."""
    texts = [pair.document for pair in docstring_pairs()][:_RANKED]
    expected = (await engine.score(QUERY, texts)).scores
    vectors = (await engine.embed_tokens(texts, input_type="document")).embeddings
    figures: dict[str, Any] = {}
    for kind in (np.float32, np.float16):
        found = await _scored(engine, QUERY, [rows.astype(kind) for rows in vectors])
        name = f"texts_{np.dtype(kind)}"
        figures[f"{name}_kendall_tau"] = round(float(kendalltau(expected, found).statistic), 5)
        figures[f"{name}_largest_difference"] = round(float(np.abs(found - np.array(expected)).max()), 5)
    return figures


async def _scored(engine: Engine, query: str | Array, documents: list[Array]) -> Array:
    return np.array((await engine.score(query, documents)).scores)


async def _posted(session: aiohttp.ClientSession, body: bytes) -> Array:
    async with session.post("/score", data=body, headers={"Content-Type": "application/json"}) as response:
        response.raise_for_status()
        data = msgspec.json.decode(await response.read())["data"]
    return np.array([item["score"] for item in data])


def _peer(query: Array, documents: list[Array]) -> Callable[[], Awaitable[Array]] | None:
    """What scores with maxsim-cpu; None where it is not installed."""
    try:
        package: Any = importlib.import_module("maxsim_cpu")
    except ImportError:
        return None

    async def score() -> Array:
        return np.asarray(await asyncio.to_thread(package.maxsim_scores_variable, query, documents))

    return score


def _body(query: Array, documents: list[Array]) -> bytes:
    return msgspec.json.encode(
        {"queries": _sent(query.astype(np.float16)), "documents": [_sent(rows) for rows in documents]}
    )


def _sent(rows: Array) -> dict[str, Any]:
    return {"embedding": base64.b64encode(rows.tobytes()).decode(), "dtype": "float16", "shape": rows.shape}


def _unit(rows: Array) -> Array:
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True))
