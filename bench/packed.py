"""Models with relative positions: packed by the engine, padded by it, and by sentence-transformers."""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from maxsimd.bench.datasets import Pair, docstring_pairs
from maxsimd.bench.text_models import SHAPES
from maxsimd.engine import CUT_LONG, Engine, EngineConfig

# As sentence-transformers has it; it sorts texts by length.
_BATCH = 32

_Run = Callable[[list[Pair]], Awaitable[tuple[int, np.ndarray[Any, np.dtype[np.float32]]]]]


async def measure_packed(
    shape: str, count: int, layers: int, rounds: int, settings: dict[str, Any]
) -> dict[str, float]:
    """Medians of `rounds` for `count` pairs of docstrings, or as many documents, all in turns; `settings` are
    the engine's."""
    pairs = docstring_pairs()[:count]
    with tempfile.TemporaryDirectory() as folder:
        model = SHAPES[shape](Path(folder) / "model", layers)
        async with contextlib.AsyncExitStack() as stack:
            runs = {
                name: _by_engine(await stack.enter_async_context(_engine(model, packing, settings)))
                for name, packing in (("packed", "auto"), ("padded", "off"))
            }
            if settings.get("quantization", "none") == "none":
                runs["sentence_transformers"] = _by_sentence_transformers(model, settings["dtype"])
            return await _in_turns(runs, pairs, rounds)


async def _in_turns(runs: dict[str, _Run], pairs: list[Pair], rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    outputs = {}
    tokens = 0
    for run in runs.values():
        await run(pairs[:20])
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            counted, outputs[name] = await run(pairs)
            seconds[name].append(time.perf_counter() - started)
            tokens = counted or tokens
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    figures = {"texts": float(len(pairs)), "tokens": float(tokens)}
    for name, median in medians.items():
        figures[f"{name}_s"] = round(median, 3)
        if name != "packed":
            figures[f"{name}_over_packed"] = round(median / medians["packed"], 2)
            figures[f"{name}_differs_by"] = float(np.abs(outputs[name] - outputs["packed"]).max())
    return figures


def _engine(model: str, packing: Any, settings: dict[str, Any]) -> Engine:
    return Engine(EngineConfig(model=model, packing=packing, **settings))


def _by_engine(engine: Engine) -> _Run:
    async def run(pairs: list[Pair]) -> tuple[int, Any]:
        documents = [pair.document for pair in pairs]
        if engine.model.score_task == "classify":
            queries = [pair.query for pair in pairs]
            scored = await engine.score(queries, documents, cache="bypass", truncation=CUT_LONG)
            return scored.usage.prompt_tokens, np.array(scored.scores)
        embedded = await engine.embed(documents, truncation=CUT_LONG)
        await engine.clear_cache()
        return embedded.usage.prompt_tokens, np.array(embedded.embeddings)

    return run


def _by_sentence_transformers(model: str, dtype: str) -> _Run:
    import torch
    from sentence_transformers import CrossEncoder, SentenceTransformer

    options: dict[str, Any] = {"device": "cpu", "model_kwargs": {"dtype": getattr(torch, dtype)}}
    is_classifier = "Classification" in Path(model, "config.json").read_text(encoding="utf-8")
    library: Any = (CrossEncoder if is_classifier else SentenceTransformer)(model, **options)

    async def run(pairs: list[Pair]) -> tuple[int, Any]:
        if is_classifier:
            texts = [(pair.query, pair.document) for pair in pairs]
            return 0, library.predict(texts, batch_size=_BATCH, show_progress_bar=False)
        documents = [pair.document for pair in pairs]
        return 0, library.encode(documents, batch_size=_BATCH, show_progress_bar=False)

    return run
